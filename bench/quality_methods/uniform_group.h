// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "bench/quality_methods/bit_stream.h"
#include "bench/quality_methods/window_codec.h"

// Asymmetric round-to-nearest of one group: scale (max - min) / (2^bits - 1) and minimum in fp16,
// then the codes.
namespace crumb::bench {

void EncodeGroup(const Eigen::Ref<const Eigen::VectorXf>& group, int bits, BitWriter& out);
void DecodeGroup(int bits, BitReader& in, Eigen::Ref<Eigen::VectorXf> group);

}  // namespace crumb::bench
