// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "crumb/block_attention.h"
#include "tests/client/sequence_model.h"

namespace crumb::client {

// The tables and fresh rows of one step. Addresses of rows are those of host memory.
struct BlockStepInput {
  static constexpr int64_t kColumns = 64;
  std::vector<int32_t> query_start = {0};
  std::vector<int32_t> lengths;
  std::vector<int32_t> history, sink, recent;       // [requests, kColumns]
  std::vector<std::vector<kernels::Bf16>> q, k, v;  // [layers]
  int requests() const { return static_cast<int>(lengths.size()); }
};

// BlockBackend has a pool's memory and computes attention over it. Block b of a layer begins at
// layer_stride * layer + block_stride * b, as in an engine that keeps a block of all layers
// together.
class BlockBackend {
 public:
  virtual ~BlockBackend() = default;
  virtual void Write(int64_t at, std::span<const std::byte> bytes) = 0;
  virtual std::vector<std::byte> Read(int64_t at, size_t bytes) = 0;
  // Sets `out` to the outputs of every layer, [layers][tokens, q_heads, head_dim].
  virtual absl::Status Run(const BlockStepInput& step,
                           std::vector<std::vector<kernels::Bf16>>& out) = 0;
};

// Each program is linked with one back end. Not OK: this machine lacks a resource of it, such as a
// GPU.
absl::Status BlockBackendStatus();
// Makes a back end, whose pool is filled with 0xa5.
std::unique_ptr<BlockBackend> NewBlockBackend(const WorkerOptions& options, int blocks);
// Bound on a token's error relative to the norm of its output. Outputs are rounded to BF16, which
// is at most 2^-9 of each element.
double BlockErrorMax();

// A request of the engine below: its tokens, how many are computed, and its blocks.
struct EngineRequest {
  const SequenceModel* model = nullptr;
  int length = 0;
  int hit = 0;
  std::vector<int32_t> history = {};
  std::vector<int32_t> sink = {};
  std::vector<int32_t> recent = {};
};

// An engine with a block pool for all three groups, whose blocks are handed out in random order and
// with the bytes of their former owners.
class Engine {
 public:
  Engine(const WorkerOptions& options, int blocks);

  const BlockGeometry& geometry() const { return geometry_; }
  std::vector<std::byte> block(int32_t index) const {
    return backend_->Read(block_stride_ * index, static_cast<size_t>(block_stride_));
  }

  // All blocks, one behind the other, of which each layer has its part in every block.
  std::vector<std::byte> pool() const { return backend_->Read(0, block_stride_ * blocks_); }
  void set_pool(std::span<const std::byte> bytes) { backend_->Write(0, bytes); }
  // Describes a copy of the pool that begins at `base`.
  std::vector<BlockPool> LayersAt(std::byte* base) const;

  EngineRequest NewRequest(const SequenceModel& model);

  // Returns a request that shares the leading `hit` tokens of another.
  EngineRequest Hit(const EngineRequest& of, const SequenceModel& model, int hit);

  // Gives the request history blocks for `length` tokens.
  void Reserve(EngineRequest& request, int length);
  void Free(const std::vector<int32_t>& blocks) {
    free_.insert(free_.end(), blocks.begin(), blocks.end());
  }

  // Computes the next tokens[i] tokens of request i. `spoil` changes the tables before they are
  // used. Returns the outputs of every layer, [layers, tokens, q_heads, head_dim].
  absl::StatusOr<std::vector<std::vector<kernels::Bf16>>> Step(
      std::vector<EngineRequest*> requests, const std::vector<int>& tokens,
      const std::function<void(BlockStepInput&)>& spoil = nullptr);

 private:
  std::vector<int32_t> Take(int count);

  const WorkerOptions options_;
  const BlockGeometry geometry_;
  const int64_t block_stride_;
  const int blocks_;
  std::vector<int32_t> free_;
  std::unique_ptr<BlockBackend> backend_;
};

}  // namespace crumb::client
