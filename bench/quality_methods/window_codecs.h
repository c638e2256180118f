// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Eigen/Dense>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/fp16.h"
#include "kernels/tile_codec.h"

namespace crumb::bench {

// Writes codes of a few bits and fp16 values as a bit stream, lowest bit first.
class BitWriter {
 public:
  void Add(uint32_t value, int bits) {
    for (int i = 0; i < bits; ++i) {
      if (used_ % 8 == 0) bytes_.push_back(0);
      bytes_.back() |= static_cast<uint8_t>((value >> i & 1) << (used_ % 8));
      ++used_;
    }
  }
  // Adds the nearest fp16 value and returns it.
  float AddHalf(float value) {
    bool saturated = false;
    const uint16_t half = kernels::Fp16FromFloat(value, &saturated);
    Add(half, 16);
    return kernels::Fp16ToFloat(half);
  }
  std::vector<uint8_t> Take() { return std::move(bytes_); }

 private:
  std::vector<uint8_t> bytes_;
  size_t used_ = 0;
};

// Reads such a bit stream. REQUIRES: it is not read beyond its end.
class BitReader {
 public:
  explicit BitReader(const std::vector<uint8_t>& bytes) : bytes_(bytes) {}
  uint32_t Next(int bits) {
    uint32_t value = 0;
    for (int i = 0; i < bits; ++i, ++at_) {
      value |= static_cast<uint32_t>(bytes_[at_ / 8] >> (at_ % 8) & 1) << i;
    }
    return value;
  }
  float NextHalf() { return kernels::Fp16ToFloat(static_cast<uint16_t>(Next(16))); }

 private:
  const std::vector<uint8_t>& bytes_;
  size_t at_ = 0;
};

// The rows [tokens, head_dim] of one KV head.
using WindowRows = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// A published KV cache quantizer, for comparison: it encodes a window of tokens that leaves the
// recent window. The bytes contain everything that decoding needs except the method's constants, so
// their number is the method's storage cost. Written for clarity, not for speed. Immutable, so
// thread-safe.
class WindowCodec {
 public:
  virtual ~WindowCodec() = default;
  // Returns the tokens of a window: a multiple of 64.
  virtual int window_tokens() const { return 64; }
  // Encodes keys after QK-norm and RoPE, or values.
  virtual std::vector<uint8_t> Encode(kernels::TilePart part, const WindowRows& rows) const = 0;
  // Decodes `tokens` rows from the bytes of Encode for as many rows.
  virtual WindowRows Decode(kernels::TilePart part, const std::vector<uint8_t>& bytes,
                            int tokens) const = 0;
};

// Asymmetric round-to-nearest of one group: the scale (max - min) / (2^bits - 1) and the minimum in
// fp16, then the codes.
void EncodeGroup(const Eigen::Ref<const Eigen::VectorXf>& group, int bits, BitWriter& out);
void DecodeGroup(int bits, BitReader& in, Eigen::Ref<Eigen::VectorXf> group);

// 4 bits after a Hadamard rotation, as QuaRot (Ashkboos et al., 2024, arXiv 2404.00456) stores the
// KV cache: rows are rotated and rounded to nearest between minimum and maximum per token and group
// of 128 channels, with fp16 scale and minimum. 4.25 bits per element at head_dim 128.
class Int4Hadamard : public WindowCodec {
 public:
  explicit Int4Hadamard(int head_dim);  // REQUIRES: head_dim is a power of two
  std::vector<uint8_t> Encode(kernels::TilePart part, const WindowRows& rows) const override;
  WindowRows Decode(kernels::TilePart part, const std::vector<uint8_t>& bytes,
                    int tokens) const override;

 private:
  const WindowRows hadamard_;  // symmetric, so it is its inverse
};

// KIVI (Liu et al., 2024, arXiv 2402.02750) at 2 bits with groups of 64: keys are quantized per
// channel over 64 tokens, values per token over 64 channels, by rounding to nearest between minimum
// and maximum, with fp16 scale and minimum. 2.5 bits per element, without rotation and calibration.
class Kivi : public WindowCodec {
 public:
  explicit Kivi(int head_dim) : head_dim_(head_dim) {}
  std::vector<uint8_t> Encode(kernels::TilePart part, const WindowRows& rows) const override;
  WindowRows Decode(kernels::TilePart part, const std::vector<uint8_t>& bytes,
                    int tokens) const override;

 private:
  const int head_dim_;
};

// Returns the 2^bits levels of least mean squared error, ascending, for one coordinate of a
// uniformly drawn point of the unit sphere in `dim` dimensions, whose density is (1 - t^2)^((dim -
// 3) / 2). They are computed by Lloyd's iteration on a fine grid.
std::vector<double> SphereCodebook(int dim, int bits);

// Returns the index of the level nearest to `value`.
uint32_t NearestLevel(const std::vector<double>& levels, double value);

// Returns a matrix that is uniform over the orthogonal group: the Q of a Gaussian matrix, with
// signs from the diagonal of R.
WindowRows RandomOrthogonal(int dim, uint32_t seed);

// TurboQuant (Zandieh et al., 2025, arXiv 2504.19874) at 3 bits per coordinate. A row is its norm
// (fp16) and a direction. The direction is rotated by a random orthogonal matrix, and each
// coordinate is rounded to the levels above ("mse"). For unbiased inner products ("prod") that
// takes one bit less, and the signs of S r are stored for the residual r, with Gaussian S, and the
// norm of r (fp16).
class TurboQuant : public WindowCodec {
 public:
  // kProduct stores keys as "prod" (3.25 bits at head_dim 128) and values as "mse" (3.125). kMse
  // stores both as "mse".
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
