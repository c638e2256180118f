// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

namespace crumb::models {

// The most likely next token: the index of the largest of `logits`, the lowest such index when
// several are equal. NaN is never chosen before a number. `logits` must not be empty.
int32_t GreedyToken(std::span<const float> logits);

}  // namespace crumb::models
