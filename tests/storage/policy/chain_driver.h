// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "storage/policy/policy.h"

namespace crumb::storage {

// A forest of nodes of which some are resident in a policy, driven like a tier drives it. Keeps its
// own records of resident nodes, their parents and their last uses.
class ChainDriver {
 public:
  struct Node {
    int parent = -1;
    ItemHandle handle = kNoItem;
    uint64_t last_access = 0;
  };

  ChainDriver(std::unique_ptr<EvictionPolicy> policy, int nodes, std::mt19937_64& random)
      : policy_(std::move(policy)), nodes_(nodes) {
    for (int i = 0; i < nodes; ++i) {
      if (i > 0 && random() % 8 != 0) nodes_[i].parent = static_cast<int>(random() % i);
    }
  }

  EvictionPolicy& policy() { return *policy_; }
  size_t resident() const { return by_handle_size_; }
  const Node& node(int i) const { return nodes_[i]; }
  int nodes() const { return static_cast<int>(nodes_.size()); }
  int NodeOf(ItemHandle handle) const {
    return handle < by_handle_.size() ? by_handle_[handle] : -1;
  }

  bool IsLeaf(int i) const {
    for (const Node& other : nodes_) {
      if (other.handle != kNoItem && other.parent == i) return false;
    }
    return true;
  }

  // Uses node `i` and all above it: hits deepest first, insertions from the top.
  void Access(int i) {
    ++access_;
    policy_->BeginAccess();
    std::vector<int> chain;  // deepest first
    for (int n = i; n >= 0; n = nodes_[n].parent) chain.push_back(n);
    for (const int n : chain) {
      if (nodes_[n].handle != kNoItem) policy_->Hit(nodes_[n].handle);
      nodes_[n].last_access = access_;
    }
    for (size_t k = chain.size(); k-- > 0;) {
      if (nodes_[chain[k]].handle == kNoItem) Insert(chain[k]);
    }
  }

  void Remove(int i, Removal reason) {
    policy_->Remove(nodes_[i].handle, reason);
    by_handle_[nodes_[i].handle] = -1;
    nodes_[i].handle = kNoItem;
    --by_handle_size_;
    const int parent = nodes_[i].parent;
    const bool was_last = parent >= 0 && nodes_[parent].handle != kNoItem && IsLeaf(parent);
    if (was_last) policy_->SetHasChildren(nodes_[parent].handle, false);
  }

 private:
  void Insert(int i) {
    Node& node = nodes_[i];
    const ItemHandle parent = node.parent < 0 ? kNoItem : nodes_[node.parent].handle;
    const bool is_first = parent != kNoItem && IsLeaf(node.parent);
    node.handle = policy_->Insert({.fingerprint = static_cast<uint64_t>(i) * 7919,
                                   .parent = parent,
                                   .has_children = !IsLeaf(i)});
    if (node.handle >= by_handle_.size()) by_handle_.resize(node.handle + 1, -1);
    by_handle_[node.handle] = i;
    ++by_handle_size_;
    if (is_first) policy_->SetHasChildren(parent, true);
  }

  std::unique_ptr<EvictionPolicy> policy_;
  std::vector<Node> nodes_;
  std::vector<int> by_handle_;  // -1 where the handle is free
  size_t by_handle_size_ = 0;
  uint64_t access_ = 0;
};

}  // namespace crumb::storage
