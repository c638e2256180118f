// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/index/page_forest.h"

#include <random>

namespace crumb::storage {

PageForest::PageForest() {
  std::random_device seed;
  random_ = (uint64_t{seed()} << 32 | seed()) | 1;
}

uint32_t PageForest::RandomPriority() {  // xorshift64*
  random_ ^= random_ >> 12;
  random_ ^= random_ << 25;
  random_ ^= random_ >> 27;
  return static_cast<uint32_t>((random_ * 0x2545F4914F6CDD1D) >> 32);
}

ForestHandle PageForest::Add() {
  auto node = static_cast<ForestHandle>(marks_.size() / 2);
  if (free_.empty()) {
    marks_.GrowTo(marks_.size() + 2);
  } else {
    node = free_.back();
    free_.pop_back();
  }
  for (const Mark mark : {Opening(node), Closing(node)}) {
    marks_[mark] = {.priority = RandomPriority()};
  }
  InsertBehind(Opening(node), Closing(node));
  return node;
}

void PageForest::Remove(ForestHandle node) {
  Erase(Closing(node));
  Erase(Opening(node));
  free_.push_back(node);
}

void PageForest::Link(ForestHandle child, ForestHandle parent) {
  const Mark opening = Opening(child);
  const Mark closing = Closing(child);
  const bool alone = marks_[opening].up == closing || marks_[closing].up == opening;
  const bool single = alone && marks_[opening].left == kNone && marks_[closing].right == kNone &&
                      (marks_[opening].right == kNone || marks_[opening].right == closing) &&
                      (marks_[closing].left == kNone || marks_[closing].left == opening) &&
                      (marks_[opening].up == kNone || marks_[closing].up == kNone);
  if (single) {  // a page without children, which is by far the most frequent case
    for (const Mark mark : {opening, closing}) {
      marks_[mark].left = marks_[mark].right = marks_[mark].up = kNone;
    }
    InsertBehind(Opening(parent), opening);
    InsertBehind(opening, closing);
    return;
  }
  const Mark tree = RootOf(opening);
  const auto [before, behind] = SplitBehind(Opening(parent));
  Merge(Merge(before, tree), behind);
}

void PageForest::Cut(ForestHandle node) {
  const auto [front, behind] = SplitBehind(Closing(node));
  const auto [before, tree] = SplitBefore(Opening(node));
  Merge(before, behind);
}

bool PageForest::SameTree(ForestHandle a, ForestHandle b) const {
  return RootOf(Opening(a)) == RootOf(Opening(b));
}

PageForest::Mark PageForest::RootOf(Mark mark) const {
  ++steps_;
  while (marks_[mark].up != kNone) {
    mark = marks_[mark].up;
    ++steps_;
  }
  return mark;
}

void PageForest::SetLeft(Mark mark, Mark left) {
  marks_[mark].left = left;
  if (left != kNone) marks_[left].up = mark;
}

void PageForest::SetRight(Mark mark, Mark right) {
  marks_[mark].right = right;
  if (right != kNone) marks_[right].up = mark;
}

void PageForest::Replace(Mark up, Mark before, Mark now) {
  if (now != kNone) marks_[now].up = up;
  if (up == kNone) return;
  (marks_[up].left == before ? marks_[up].left : marks_[up].right) = now;
}

void PageForest::RotateUp(Mark mark) {
  ++steps_;
  const Mark up = marks_[mark].up;
  const Mark above = marks_[up].up;
  Replace(above, up, mark);
  if (marks_[up].left == mark) {
    SetLeft(up, marks_[mark].right);
    SetRight(mark, up);
  } else {
    SetRight(up, marks_[mark].left);
    SetLeft(mark, up);
  }
}

void PageForest::InsertBehind(Mark before, Mark mark) {
  ++steps_;
  if (marks_[before].right == kNone) {
    SetRight(before, mark);
  } else {
    Mark at = marks_[before].right;
    for (; marks_[at].left != kNone; at = marks_[at].left) ++steps_;
    SetLeft(at, mark);
  }
  while (marks_[mark].up != kNone && marks_[marks_[mark].up].priority < marks_[mark].priority) {
    RotateUp(mark);
  }
}

void PageForest::Erase(Mark mark) {
  const Mark up = marks_[mark].up;
  const Mark joined = Merge(marks_[mark].left, marks_[mark].right);
  Replace(up, mark, joined);
  marks_[mark] = {};
}

PageForest::Mark PageForest::Merge(Mark a, Mark b) {
  ++steps_;
  if (a == kNone) return b;
  if (b == kNone) return a;
  if (marks_[a].priority > marks_[b].priority) {
    SetRight(a, Merge(marks_[a].right, b));
    return a;
  }
  SetLeft(b, Merge(a, marks_[b].left));
  return b;
}

std::pair<PageForest::Mark, PageForest::Mark> PageForest::SplitBehind(Mark mark) {
  const Mark right = marks_[mark].right;
  const Mark up = marks_[mark].up;
  marks_[mark].right = kNone;
  return SplitUpwards(mark, up, mark, right);
}

std::pair<PageForest::Mark, PageForest::Mark> PageForest::SplitBefore(Mark mark) {
  const Mark left = marks_[mark].left;
  const Mark up = marks_[mark].up;
  marks_[mark].left = kNone;
  return SplitUpwards(mark, up, left, mark);
}

// Subtrees on the left of an ancestor that lies to the left of `from` go with it, and those on the
// right of one to its right.
std::pair<PageForest::Mark, PageForest::Mark> PageForest::SplitUpwards(Mark from, Mark up,
                                                                       Mark left, Mark right) {
  while (up != kNone) {
    ++steps_;
    const Mark above = marks_[up].up;
    if (marks_[up].left == from) {
      SetLeft(up, right);
      right = up;
    } else {
      SetRight(up, left);
      left = up;
    }
    from = up;
    up = above;
  }
  if (left != kNone) marks_[left].up = kNone;
  if (right != kNone) marks_[right].up = kNone;
  return {left, right};
}

}  // namespace crumb::storage
