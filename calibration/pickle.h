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

// One value of a pickle. Parts are numbers of other values.
struct PickleValue {
  enum class Kind {
    kNone,
    kBool,
    kInt,
    kFloat,
    kText,
    kTuple,       // items: the elements
    kList,        // the same
    kDict,        // items: key, value, key, value...
    kGlobal,      // text: "module name"
    kCall,        // items: what was to be called, its tuple of arguments; nothing is called
    kPersistent,  // items: the id of something outside the pickle
  };

  Kind kind = Kind::kNone;
  int64_t integer = 0;  // kInt, kBool
  double number = 0.0;  // kFloat
  std::string text;
  std::vector<int> items;
};

// What a pickle says, as data: a reader for the opcodes that torch.save (protocol 2) writes for
// dictionaries, lists, numbers, strings and tensors. It imports and calls nothing: a call stands in
// the result as a name and its arguments, an OrderedDict as a dictionary. Immutable.
class Pickle {
 public:
  // `globals` are the "module name" pairs that may stand in it. kInvalidArgument says `where` and
  // at which byte: truncated, an unknown opcode or global, a value that contains itself, too large.
  static absl::StatusOr<Pickle> Parse(std::span<const std::byte> bytes,
                                      const std::set<std::string>& globals,
                                      const std::string& where);

  const PickleValue& root() const { return values_[root_]; }
  const PickleValue& At(int value) const { return values_[value]; }
  // The value of a dictionary's text key, or null.
  const PickleValue* Find(const PickleValue& dict, const std::string& key) const;

 private:
  Pickle(std::vector<PickleValue> values, int root) : values_(std::move(values)), root_(root) {}

  std::vector<PickleValue> values_;
  int root_;
};

}  // namespace crumb::calibration
