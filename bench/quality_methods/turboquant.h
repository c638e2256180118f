// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "bench/quality_methods/bit_stream.h"
#include "bench/quality_methods/window_codec.h"

namespace crumb::bench {

// The 2^bits levels of least mean squared error, ascending, for one coordinate of a point drawn
// uniformly from the unit sphere in `dim` dimensions: density (1 - t^2)^((dim - 3) / 2). Lloyd's
// iteration on a fine grid.
std::vector<double> SphereCodebook(int dim, int bits);

// TurboQuant (Zandieh et al., 2025, arXiv 2504.19874) at 3 bits per coordinate. A row is its norm
// (fp16) and a direction; the direction is turned by a random orthogonal matrix and each coordinate
// rounded to the levels above ("mse"). For unbiased inner products ("prod") one bit less is spent
// on that, and the signs of S r, S Gaussian, are stored of the residual r, with its norm (fp16).
class TurboQuant : public WindowCodec {
 public:
  // kProduct: keys as "prod" (3.25 bits at head_dim 128), values as "mse" (3.125), each for
  // what it is used for. kMse: both as "mse".
  enum class Keys { kProduct, kMse };

  TurboQuant(int head_dim, Keys keys);
  std::vector<uint8_t> Encode(kernels::TilePart part, const WindowRows& rows) const override;
  WindowRows Decode(kernels::TilePart part, const std::vector<uint8_t>& bytes,
                    int tokens) const override;

 private:
  bool Product(kernels::TilePart part) const {
    return part == kernels::TilePart::kKey && keys_ == Keys::kProduct;
  }

  const Keys keys_;
  const WindowRows rotation_;    // random orthogonal, fixed seed
  const WindowRows projection_;  // S, fixed seed
  const std::vector<double> codebook_;
  const std::vector<double> product_codebook_;  // one bit less
};

}  // namespace crumb::bench
