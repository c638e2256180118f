// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "storage/policy/chunked_vector.h"

namespace crumb::storage {

// Names a node of a PageForest. Dense: handles of removed nodes are used again.
using ForestHandle = uint32_t;
inline constexpr ForestHandle kNoForestNode = UINT32_MAX;

// A forest that finds out in O(log n) whether two nodes are in one tree, so that a page index can
// refuse a parent that would close a ring without walking up a chain of pages.
//
// It keeps the Euler tour of each tree, an opening and a closing mark for every node, in a treap
// with parent pointers. Adding or removing a node without children takes O(1) expected steps;
// linking or cutting a whole tree and SameTree take O(log n). Priorities are random, so that no
// order of calls makes a treap deep. Not thread-safe.
class PageForest {
 public:
  PageForest();

  // A new tree of one node.
  ForestHandle Add();
  // Removes a node. REQUIRES: it has no children.
  void Remove(ForestHandle node);

  // Hangs the tree whose root is `child` below `parent`. REQUIRES: !SameTree(child, parent).
  void Link(ForestHandle child, ForestHandle parent);
  // Makes `node`, with all that hangs below it, a tree of its own. REQUIRES: it has a parent.
  void Cut(ForestHandle node);

  bool SameTree(ForestHandle a, ForestHandle b) const;

  // Returns how many marks were examined since the beginning, which is the cost of all calls.
  uint64_t steps() const { return steps_; }

 private:
  using Mark = uint32_t;  // 2 * node: it opens; 2 * node + 1: it closes
  static constexpr Mark kNone = UINT32_MAX;

  struct Entry {
    Mark left = kNone;
    Mark right = kNone;
    Mark up = kNone;
    uint32_t priority = 0;
  };

  static Mark Opening(ForestHandle node) { return 2 * node; }
  static Mark Closing(ForestHandle node) { return 2 * node + 1; }

  uint32_t RandomPriority();
  Mark RootOf(Mark mark) const;
  void SetLeft(Mark mark, Mark left);
  void SetRight(Mark mark, Mark right);
  // Puts `now` in the place that `before` has below `up`.
  void Replace(Mark up, Mark before, Mark now);
  void RotateUp(Mark mark);
  void InsertBehind(Mark before, Mark mark);
  void Erase(Mark mark);
  Mark Merge(Mark a, Mark b);
  // Splits the treap of `mark` into the marks up to `mark` and those behind it.
  std::pair<Mark, Mark> SplitBehind(Mark mark);
  // Splits it into the marks before `mark` and the others, of which `mark` is the first.
  std::pair<Mark, Mark> SplitBefore(Mark mark);
  std::pair<Mark, Mark> SplitUpwards(Mark from, Mark up, Mark left, Mark right);

  ChunkedVector<Entry> marks_;
  std::vector<ForestHandle> free_;
  uint64_t random_;
  mutable uint64_t steps_ = 0;
};

}  // namespace crumb::storage
