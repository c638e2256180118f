// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "absl/status/statusor.h"

namespace crumb {

// How long a cache line takes from one of these cores to the other, in nanoseconds: some 40 where
// they share a cache, some 150 where they do not, and that changes when the host of a virtual
// machine moves them. Both cores work for 30 ms. kInvalidArgument: this process may not run there,
// or it is one core.
absl::StatusOr<double> CoreDistanceNs(int one, int other);

}  // namespace crumb
