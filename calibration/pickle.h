// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace crumb::calibration {

// One value of a pickle. Its items are indices of other values of the same pickle.
struct PickleValue {
  enum class Kind {
    kNone,
    kBool,
    kInt,
    kFloat,
    kText,
    kTuple,       // items: the elements
    kList,        // items: the elements
    kDict,        // items: key, value, key, value...
    kGlobal,      // text: "module name"
    kCall,        // items: the global, its tuple of arguments; it is never called
    kPersistent,  // items: the id of something outside the pickle
  };

  Kind kind = Kind::kNone;
  int64_t integer = 0;  // kInt, kBool
  double number = 0.0;  // kFloat
  std::string text;
  std::vector<int> items;
};

// The contents of a pickle as data. Python's unpickler executes calls that the file names; this
// reader executes nothing. It accepts the opcodes that torch.save (protocol 2) writes for
// dictionaries, lists, numbers, strings and tensors. A call becomes a value with its name and
// arguments, an OrderedDict a dictionary. The bytes may be hostile. Immutable, so thread-safe.
class Pickle {
 public:
  // `globals` are the "module name" pairs that may occur. kInvalidArgument names `where` and the
  // byte: the pickle is truncated or too large, has an unknown opcode or global, or a value that
  // contains itself.
  static absl::StatusOr<Pickle> Parse(std::span<const std::byte> bytes,
                                      const std::set<std::string>& globals,
                                      const std::string& where);

  const PickleValue& root() const { return values_[root_]; }
  const PickleValue& At(int value) const { return values_[value]; }
  // Returns the value of a dictionary's text key, or null.
  const PickleValue* Find(const PickleValue& dict, const std::string& key) const;

 private:
  Pickle(std::vector<PickleValue> values, int root) : values_(std::move(values)), root_(root) {}

  std::vector<PickleValue> values_;
  int root_;
};

}  // namespace crumb::calibration
