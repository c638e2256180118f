// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "calibration/pickle.h"

#include <bit>
#include <map>
#include <utility>

#include "common/little_endian.h"
#include "common/status_macros.h"
#include "fmt/format.h"

namespace crumb::calibration {
namespace {

using Kind = PickleValue::Kind;

constexpr size_t kBytesMax = 64 << 20;
constexpr size_t kValuesMax = 4 << 20;
// The entry of the stack that the opcode MARK pushes.
constexpr int kMark = -1;
constexpr char kOrderedDict[] = "collections OrderedDict";

class Machine {
 public:
  Machine(std::span<const std::byte> bytes, const std::set<std::string>& globals,
          const std::string& where)
      : bytes_(bytes), globals_(globals), where_(where) {}

  // Returns the value that is on the stack at STOP.
  absl::StatusOr<int> Run() {
    if (bytes_.size() > kBytesMax) {
      return Wrong(fmt::format("{} bytes, at most {} are read", bytes_.size(), kBytesMax));
    }
    while (status_.ok() && !stopped_) {
      opcode_at_ = at_;
      const char opcode = static_cast<char>(Take<uint8_t>());
      if (!status_.ok()) break;
      if (!Constant(opcode) && !Memo(opcode) && !Container(opcode) && !Reference(opcode)) {
        Fail(fmt::format("opcode {:#04x} is none that rotation files need; nothing is executed",
                         static_cast<uint8_t>(opcode)));
      }
      if (values_.size() > kValuesMax) Fail("more values than are read");
    }
    if (status_.ok() && (stack_.size() != 1 || stack_[0] == kMark)) {
      Fail("it does not end with one value");
    }
    CRUMB_RETURN_IF_ERROR(status_);
    CRUMB_RETURN_IF_ERROR(CheckNoCycle(stack_[0]));
    return stack_[0];
  }

  std::vector<PickleValue> TakeValues() { return std::move(values_); }

 private:
  absl::Status Wrong(const std::string& what) const {
    return absl::InvalidArgumentError(fmt::format("{}: byte {}: {}", where_, opcode_at_, what));
  }
  void Fail(const std::string& what) {
    if (status_.ok()) status_ = Wrong(what);
  }

  // Returns the next bytes, or zeros after a failure.
  std::span<const std::byte> TakeBytes(size_t count) {
    if (!status_.ok() || bytes_.size() - at_ < count) {
      Fail("it is truncated");
      return {};
    }
    at_ += count;
    return bytes_.subspan(at_ - count, count);
  }
  template <typename T>
  T Take() {
    const auto bytes = TakeBytes(sizeof(T));
    return bytes.empty() ? T{} : LoadLittle<T>(bytes.data());
  }
  std::string TakeText(size_t count) {
    const auto bytes = TakeBytes(count);
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
  std::string TakeLine() {
    std::string line;
    for (char c = 0; status_.ok();) {
      c = static_cast<char>(Take<uint8_t>());
      if (c == '\n') break;
      line += c;
    }
    return line;
  }

  void Push(PickleValue value) {
    stack_.push_back(static_cast<int>(values_.size()));
    values_.push_back(std::move(value));
  }
  void PushInt(int64_t value, Kind kind = Kind::kInt) {
    Push({.kind = kind, .integer = value, .number = 0.0, .text = {}, .items = {}});
  }
  void PushText(std::string text, Kind kind = Kind::kText) {
    Push({.kind = kind, .integer = 0, .number = 0.0, .text = std::move(text), .items = {}});
  }
  void PushItems(std::vector<int> items, Kind kind) {
    Push({.kind = kind, .integer = 0, .number = 0.0, .text = {}, .items = std::move(items)});
  }

  // Returns the topmost values, the lowest first; fewer after a failure.
  std::vector<int> Pop(size_t count) {
    for (size_t i = 0; i < count; ++i) {
      if (i >= stack_.size() || stack_[stack_.size() - 1 - i] == kMark) {
        Fail("its stack is too short");
        return std::vector<int>(count, 0);
      }
    }
    const std::vector<int> items(stack_.end() - static_cast<ptrdiff_t>(count), stack_.end());
    stack_.resize(stack_.size() - count);
    return items;
  }
  // Pops the values above the topmost mark, and the mark.
  std::vector<int> PopToMark() {
    size_t mark = stack_.size();
    while (mark > 0 && stack_[mark - 1] != kMark) --mark;
    if (mark == 0) {
      Fail("a mark is missing");
      return {};
    }
    const std::vector<int> items(stack_.begin() + static_cast<ptrdiff_t>(mark), stack_.end());
    stack_.resize(mark - 1);
    return items;
  }
  // Adds items to the container on top of the stack.
  void Extend(Kind kind, const std::vector<int>& items) {
    if (!status_.ok()) return;
    if (stack_.empty() || stack_.back() == kMark || values_[stack_.back()].kind != kind) {
      return Fail("items for something that takes none");
    }
    if (kind == Kind::kDict && items.size() % 2 != 0) return Fail("a key without a value");
    std::vector<int>& to = values_[stack_.back()].items;
    to.insert(to.end(), items.begin(), items.end());
  }

  // Each function below returns whether the opcode belongs to its group.
  bool Constant(char opcode) {
    switch (opcode) {
      case 'N':
        return PushInt(0, Kind::kNone), true;
      case '\x88':
        return PushInt(1, Kind::kBool), true;
      case '\x89':
        return PushInt(0, Kind::kBool), true;
      case 'J':
        return PushInt(Take<int32_t>()), true;
      case 'K':
        return PushInt(Take<uint8_t>()), true;
      case 'M':
        return PushInt(Take<uint16_t>()), true;
      case '\x8a':
        return PushLong(), true;
      case 'G':
        return PushFloat(), true;
      case 'X':
        return PushText(TakeText(Take<uint32_t>())), true;
      default:
        return false;
    }
  }
  // Reads a two's complement integer of up to eight bytes.
  void PushLong() {
    const size_t count = Take<uint8_t>();
    if (count > sizeof(int64_t)) return Fail("an integer of more than 64 bits");
    const auto bytes = TakeBytes(count);
    uint64_t value = 0;
    for (size_t i = bytes.size(); i-- > 0;) value = value << 8 | static_cast<uint8_t>(bytes[i]);
    const int shift = 64 - 8 * static_cast<int>(count);
    PushInt(count == 0 ? 0 : static_cast<int64_t>(value << shift) >> shift);
  }
  void PushFloat() {
    const uint64_t bits = __builtin_bswap64(Take<uint64_t>());
    Push({.kind = Kind::kFloat,
          .integer = 0,
          .number = std::bit_cast<double>(bits),
          .text = {},
          .items = {}});
  }

  bool Memo(char opcode) {
    switch (opcode) {
      case 'q':
        return Remember(Take<uint8_t>()), true;
      case 'r':
        return Remember(Take<uint32_t>()), true;
      case 'h':
        return Recall(Take<uint8_t>()), true;
      case 'j':
        return Recall(Take<uint32_t>()), true;
      default:
        return false;
    }
  }
  void Remember(uint32_t name) {
    if (!status_.ok()) return;
    if (stack_.empty() || stack_.back() == kMark) return Fail("nothing to remember");
    memo_[name] = stack_.back();
  }
  void Recall(uint32_t name) {
    const auto it = memo_.find(name);
    if (it == memo_.end()) return Fail("it recalls what it never remembered");
    stack_.push_back(it->second);
  }

  bool Container(char opcode) {
    switch (opcode) {
      case '}':
        return PushItems({}, Kind::kDict), true;
      case ']':
        return PushItems({}, Kind::kList), true;
      case ')':
        return PushItems({}, Kind::kTuple), true;
      case '(':
        return stack_.push_back(kMark), true;
      case 't':
        return PushItems(PopToMark(), Kind::kTuple), true;
      case '\x85':
      case '\x86':
      case '\x87':
        return PushItems(Pop(static_cast<uint8_t>(opcode) - 0x84u), Kind::kTuple), true;
      case 's':
        return Extend(Kind::kDict, Pop(2)), true;
      case 'u':
        return Extend(Kind::kDict, PopToMark()), true;
      case 'a':
        return Extend(Kind::kList, Pop(1)), true;
      case 'e':
        return Extend(Kind::kList, PopToMark()), true;
      default:
        return false;
    }
  }

  bool Reference(char opcode) {
    switch (opcode) {
      case '\x80':
        if (const int protocol = Take<uint8_t>(); protocol != 2) {
          Fail(fmt::format("protocol {}, torch.save writes 2", protocol));
        }
        return true;
      case '.':
        return stopped_ = true, true;
      case 'c':
        return Global(), true;
      case 'R':
        return Call(), true;
      case 'Q':
        return PushItems(Pop(1), Kind::kPersistent), true;
      default:
        return false;
    }
  }
  void Global() {
    std::string name = TakeLine();
    name += ' ';
    name += TakeLine();
    if (status_.ok() && !globals_.contains(name)) {
      return Fail("global \"" + name + "\" is none that rotation files need; nothing is imported");
    }
    PushText(std::move(name), Kind::kGlobal);
  }
  void Call() {
    const std::vector<int> items = Pop(2);
    if (!status_.ok()) return;
    const PickleValue &callee = values_[items[0]], &arguments = values_[items[1]];
    if (callee.kind != Kind::kGlobal || arguments.kind != Kind::kTuple) {
      return Fail("a call of something that is no global");
    }
    const bool empty_dict = callee.text == kOrderedDict && arguments.items.empty();
    PushItems(empty_dict ? std::vector<int>() : items, empty_dict ? Kind::kDict : Kind::kCall);
  }

  // Returns whether a value contains itself, which only a list or dictionary can. The walk uses no
  // recursion, because the depth is the file's choice.
  absl::Status CheckNoCycle(int root) const {
    enum : uint8_t { kNew, kOpen, kDone };
    std::vector<uint8_t> state(values_.size(), kNew);
    std::vector<std::pair<int, size_t>> trail = {{root, 0}};  // value, next of its items
    state[root] = kOpen;
    while (!trail.empty()) {
      auto& [value, next] = trail.back();
      if (next == values_[value].items.size()) {
        state[value] = kDone;
        trail.pop_back();
        continue;
      }
      const int item = values_[value].items[next++];
      if (state[item] == kOpen) return Wrong("a value contains itself");
      if (state[item] == kDone) continue;
      state[item] = kOpen;
      trail.emplace_back(item, 0);
    }
    return absl::OkStatus();
  }

  const std::span<const std::byte> bytes_;
  const std::set<std::string>& globals_;
  const std::string& where_;
  size_t at_ = 0;
  size_t opcode_at_ = 0;
  bool stopped_ = false;
  absl::Status status_;
  std::vector<PickleValue> values_;
  std::vector<int> stack_;  // numbers of values, or kMark
  std::map<uint32_t, int> memo_;
};

}  // namespace

absl::StatusOr<Pickle> Pickle::Parse(std::span<const std::byte> bytes,
                                     const std::set<std::string>& globals,
                                     const std::string& where) {
  Machine machine(bytes, globals, where);
  CRUMB_ASSIGN_OR_RETURN(const int root, machine.Run());
  return Pickle(machine.TakeValues(), root);
}

const PickleValue* Pickle::Find(const PickleValue& dict, const std::string& key) const {
  if (dict.kind != Kind::kDict) return nullptr;
  for (size_t i = 0; i < dict.items.size(); i += 2) {
    const PickleValue& name = At(dict.items[i]);
    if (name.kind == Kind::kText && name.text == key) return &At(dict.items[i + 1]);
  }
  return nullptr;
}

}  // namespace crumb::calibration
