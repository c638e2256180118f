// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include "absl/status/status.h"

namespace crumb::bench {

// One way to move the fragments of a FragmentSet into a store and out of it, as the store workload
// drives it. Blocking; not thread-safe.
class StorePlane {
 public:
  virtual ~StorePlane() = default;

  // Stores pages [first, first + count). kResourceExhausted: the store refused some.
  virtual absl::Status Put(size_t first, size_t count) = 0;

  // Reads every byte of pages [first, first + count), with the checks that a reader must make.
  // kNotFound: not all are there; kDataLoss: a check failed.
  virtual absl::Status Get(size_t first, size_t count) = 0;
};

}  // namespace crumb::bench
