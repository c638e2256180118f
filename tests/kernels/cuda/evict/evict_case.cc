// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/kernels/cuda/evict/evict_case.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/bf16.h"
#include "tests/kernels/cuda/random_inputs.h"

namespace crumb::kernels::cuda {

EvictCase::EvictCase(const EvictOptions& options)
    : o_(options), matrices_(options.layers * options.kv_heads), random_(options.seed) {
  const int dim = o_.tile.head_dim;
  rows_.resize(matrices_ * o_.windows * 2 * kEvictRing * dim);
  FillRows();
  for (size_t i = 0; i < 2 * matrices_; ++i) {
    const std::vector<float> r = RandomRotation(dim, random_);
    std::vector<float> u = RandomFeedback(dim, random_);
    if (o_.metric) AddWeights(dim, random_, u);
    rotation_.insert(rotation_.end(), r.begin(), r.end());
    feedback_.insert(feedback_.end(), u.begin(), u.end());
  }
  std::normal_distribution<float> normal(0.0f, 0.3f);
  mean_.resize(2 * matrices_ * o_.position_blocks * dim);
  for (float& m : mean_) m = normal(random_);
  Upload();
}

void EvictCase::FillTiles() {
  tiles_.Fill(0xff);
  sums_.Fill(0xff);
}

void EvictCase::Run(int windows_max) {
  FillTiles();
  status_.Upload(std::vector<uint32_t>(o_.windows, 0));
  EvictParams p = Params();
  p.windows_max = windows_max;
  ASSERT_CUDA(EvictWindows(p, nullptr, {o_.path, o_.limits}));
  ASSERT_CUDA(cudaDeviceSynchronize());
  DownloadTiles();
}

EvictParams EvictCase::Params() const {
  EvictParams p;
  p.tile = o_.tile;
  p.method = o_.method;
  p.layers = o_.layers;
  p.kv_heads = o_.kv_heads;
  p.windows_max = o_.windows;
  p.windows = count_.as<int32_t>();
  p.ring_address = ring_.as<uint64_t>();
  p.ring_begin = device_begin_.as<int32_t>();
  p.tile_address = tile_.as<uint64_t>();
  SetStrides(&p);
  p.k = DeviceTransform(0);
  p.v = DeviceTransform(1);
  p.position_block = device_block_.as<int32_t>();
  p.position_blocks = o_.position_blocks;
  p.status = status_.as<uint32_t>();
  p.checksums = sums_.as<uint32_t>();
  p.workspace = workspace_.as<void>();
  return p;
}

std::vector<Bf16> EvictCase::WindowOf(int w, size_t m) const {
  const int dim = o_.tile.head_dim;
  return WindowOfRing(&rows_[(w * matrices_ + m) * 2 * kEvictRing * dim], begin_[w], dim);
}

RowTransform EvictCase::HostTransform(int value, int w, size_t m) const {
  const int dim = o_.tile.head_dim;
  RowTransform t;
  const size_t matrix = value * matrices_ + m;
  if (o_.rotated) t.rotation = rotation_.data() + matrix * dim * dim;
  if (o_.centred) t.mean = mean_.data() + (matrix * o_.position_blocks + block_[w]) * dim;
  if (o_.method == Method::kCrumb && o_.feedback) {
    t.feedback = feedback_.data() + matrix * dim * dim;
  }
  t.clip = value == 0 ? o_.k_clip : o_.v_clip;
  return t;
}

std::vector<uint8_t> EvictCase::Expected(std::vector<uint32_t>* status) const {
  const int dim = o_.tile.head_dim;
  std::vector<uint8_t> tiles(device_tiles_.size());
  status->assign(o_.windows, 0);
  for (int w = 0; w < o_.windows; ++w) {
    for (size_t m = 0; m < matrices_; ++m) {
      const std::vector<Bf16> window = WindowOf(w, m);
      alignas(128) uint8_t tile[16384];
      QuantizeParams p;
      p.shape = o_.tile;
      p.method = o_.method;
      p.k = window.data();
      p.v = window.data() + 64 * dim;
      p.k_stride = p.v_stride = dim;
      p.k_transform = HostTransform(0, w, m);
      p.v_transform = HostTransform(1, w, m);
      p.tile = tile;
      (*status)[w] |= QuantizeTile(p);
      std::copy_n(tile, o_.tile.int2_bytes(),
                  tiles.begin() + (w * matrices_ + m) * o_.tile.int2_bytes());
    }
  }
  return tiles;
}

void EvictCase::UploadRows() { device_rows_.Upload(rows_); }

void EvictCase::Upload() {
  UploadRows();
  const int dim = o_.tile.head_dim;
  constants_.Upload(rotation_, feedback_, mean_, dim);
  tiles_.Allocate(matrices_ * o_.windows * o_.tile.int2_bytes());
  std::vector<uint64_t> ring, tile;
  for (int w = 0; w < o_.windows; ++w) {
    ring.push_back(device_rows_.address() + w * matrices_ * 4 * kEvictRing * dim);
    tile.push_back(tiles_.address() + w * matrices_ * o_.tile.int2_bytes());
    begin_.push_back(static_cast<int>(random_() % kEvictRing));
    block_.push_back(static_cast<int>(random_() % o_.position_blocks));
  }
  ring_.Upload(ring);
  tile_.Upload(tile);
  device_begin_.Upload(begin_);
  device_block_.Upload(block_);
  count_.Upload(std::vector<int32_t>{o_.windows});
  status_.Upload(std::vector<uint32_t>(o_.windows, 0));
  sums_.Allocate(4 * matrices_ * o_.windows);
  workspace_.Upload(std::vector<uint64_t>(matrices_ * 128, 0));
}

EvictTransform EvictCase::DeviceTransform(int value) const {
  EvictTransform t = constants_.Of(value);
  if (!o_.rotated) t.rotation = nullptr;
  if (!o_.centred) t.mean = nullptr;
  if (!o_.feedback) t.feedback = nullptr;
  t.clip = value == 0 ? o_.k_clip : o_.v_clip;
  return t;
}

void EvictCase::FillRows() {
  std::normal_distribution<float> normal;
  const int dim = o_.tile.head_dim;
  for (size_t row = 0; row < rows_.size() / dim; ++row) {
    Bf16* x = rows_.data() + row * dim;
    for (int i = 0; i < dim; ++i) x[i] = Bf16FromFloat(normal(random_));
    if (o_.rows == Rows::kOutliers && row % 3 == 0) x[random_() % dim] = Bf16FromFloat(1e4f);
    if (o_.rows == Rows::kExtreme) MakeExtreme(row % 9, x);
  }
}

void EvictCase::MakeExtreme(int kind, Bf16* x) {
  const int dim = o_.tile.head_dim;
  for (int i = 0; i < dim; ++i) {
    const float sign = random_() % 2 == 0 ? 1.0f : -1.0f;
    if (kind == 0) x[i] = Bf16FromFloat(-2.5f);
    if (kind == 1) x[i] = {};
    if (kind == 2) x[i] = Bf16FromFloat(sign * 1e-39f);
    if (kind == 3) x[i] = Bf16FromFloat(sign * 65504.0f);
    if (kind == 4) x[i] = Bf16FromFloat(sign * static_cast<float>(random_() % 4));
    if (kind == 5) x[i] = Bf16FromFloat(sign * 1e30f);
  }
  if (kind == 6) x[random_() % dim] = Bf16FromFloat(std::numeric_limits<float>::quiet_NaN());
  if (kind == 7) x[random_() % dim] = Bf16FromFloat(std::numeric_limits<float>::infinity());
}

}  // namespace crumb::kernels::cuda
