// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "kernels/cuda/evict/evict.h"
#include "kernels/quantize.h"
#include "tests/kernels/cuda/device_buffer.h"
#include "tests/kernels/cuda/evict/evict_inputs.h"

namespace crumb::kernels::cuda {

enum class Rows { kNormal, kOutliers, kExtreme };

struct EvictOptions {
  TileShape tile;
  Method method = Method::kOscar;
  RotatePath path = RotatePath::kAuto;
  DeviceLimits limits;
  int layers = 2;
  int kv_heads = 2;
  int windows = 3;
  int position_blocks = 1;
  bool rotated = true;
  bool centred = true;
  bool feedback = true;  // used by kCrumb
  bool metric = false;   // whether the feedback has weights
  float k_clip = 0.96f;
  float v_clip = 0.92f;
  Rows rows = Rows::kNormal;
  uint32_t seed = 1;
};

// Windows of all layers and heads, quantized on host and device. Every matrix and window has its
// own data.
class EvictCase {
 public:
  explicit EvictCase(const EvictOptions& options);

  // Evicts the windows with a grid for `windows_max` of them.
  void Run(int windows_max);
  // The parts of Run before and after the launch: FillTiles sets all bytes to 0xff, DownloadTiles
  // brings the device's to tiles().
  void FillTiles();
  void DownloadTiles() { device_tiles_ = tiles_.Download<uint8_t>(); }
  EvictParams Params() const;

  // Returns the rows of one tile in order: K, then V.
  std::vector<Bf16> WindowOf(int w, size_t m) const;
  // Returns the transform of K (0) or V (1).
  RowTransform HostTransform(int value, int w, size_t m) const;
  // Returns the CPU's tiles in the order of tiles(), and its status per window.
  std::vector<uint8_t> Expected(std::vector<uint32_t>* status) const;

  // [windows, matrices, 2, kEvictRing, head_dim]; UploadRows brings changes to the device.
  std::vector<Bf16>& rows() { return rows_; }
  void UploadRows();

  size_t matrices() const { return matrices_; }  // layers times KV heads
  // Results of the last run: [windows, matrices].
  const std::vector<uint8_t>& tiles() const { return device_tiles_; }
  std::vector<uint32_t> status() const { return status_.Download<uint32_t>(); }
  std::vector<uint32_t> sums() const { return sums_.Download<uint32_t>(); }
  std::vector<uint64_t> workspace() const { return workspace_.Download<uint64_t>(); }

 private:
  void FillRows();
  void MakeExtreme(int kind, Bf16* x);
  void Upload();
  EvictTransform DeviceTransform(int value) const;

  const EvictOptions o_;
  const size_t matrices_;
  std::mt19937 random_;
  std::vector<Bf16> rows_;
  std::vector<float> rotation_, mean_, feedback_;
  std::vector<int32_t> begin_, block_;
  std::vector<uint8_t> device_tiles_;
  EvictConstants constants_;
  DeviceBuffer device_rows_, tiles_, ring_, tile_, device_begin_, device_block_, count_, status_,
      sums_, workspace_;
};

}  // namespace crumb::kernels::cuda
