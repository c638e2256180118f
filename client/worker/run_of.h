// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "common/placement.h"

namespace crumb::client {

// Makes what a fetched prefix has one of for each page, in runs: a run is one piece of memory and
// goes with its last reference. One thread at a time makes them.
template <typename T>
class RunOf {
 public:
  std::shared_ptr<T> New() {
    if (run_ == nullptr || run_->size() == kRunPages) {
      run_ = std::make_shared<std::vector<T>>();
      run_->reserve(kRunPages);
    }
    T& made = run_->emplace_back();
    return {run_, &made};
  }

 private:
  std::shared_ptr<std::vector<T>> run_;
};

}  // namespace crumb::client
