// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>

#include "storage/policy/policy.h"

namespace crumb::storage {

// `s3fifo`: S3-FIFO (Yang et al., SOSP 2023) over leaves. New items pass a small queue, a tenth of
// the residents; those used twice or more meanwhile, and those that come back after an eviction, go
// to the main queue, which gives an item one more round per use, up to three. Remembers four
// times `capacity_items` evicted items.
std::unique_ptr<EvictionPolicy> MakeS3FifoPolicy(size_t capacity_items);

}  // namespace crumb::storage
