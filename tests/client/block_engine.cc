// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/client/block_engine.h"

#include <algorithm>
#include <numeric>
#include <random>

#include "gtest/gtest.h"

namespace crumb::client {

using kernels::Bf16;

Engine::Engine(const WorkerOptions& options, int blocks)
    : options_(options),
      geometry_(BlockGeometryOf(options)),
      block_stride_(int64_t{geometry_.tile_bytes} * options.kv_heads * options.layers),
      blocks_(blocks),
      free_(blocks),
      backend_(NewBlockBackend(options, blocks)) {
  std::iota(free_.begin(), free_.end(), 0);
  std::shuffle(free_.begin(), free_.end(), std::mt19937(11));
}

std::vector<BlockPool> Engine::LayersAt(std::byte* base) const {
  std::vector<BlockPool> layers;
  for (int layer = 0; layer < options_.layers; ++layer) {
    std::byte* const at = base + block_stride_ / options_.layers * layer;
    layers.push_back({.history = at,
                      .sink = at,
                      .recent = at,
                      .block_stride = block_stride_,
                      .blocks = blocks_});
  }
  return layers;
}

EngineRequest Engine::NewRequest(const SequenceModel& model) {
  EngineRequest request{.model = &model};
  request.sink = Take(geometry_.sink_blocks);
  request.recent = Take(geometry_.recent_blocks);
  backend_->Write(block_stride_ * request.recent[0],
                  std::vector<std::byte>(static_cast<size_t>(block_stride_)));
  return request;
}

EngineRequest Engine::Hit(const EngineRequest& of, const SequenceModel& model, int hit) {
  EngineRequest request = NewRequest(model);
  Free(request.sink);
  request.sink = of.sink;
  request.history.assign(of.history.begin(), of.history.begin() + hit / 64);
  request.length = request.hit = hit;
  return request;
}

void Engine::Reserve(EngineRequest& request, int length) {
  while (static_cast<int>(request.history.size()) * 64 < length) {
    request.history.push_back(Take(1)[0]);
  }
}

absl::StatusOr<std::vector<std::vector<Bf16>>> Engine::Step(
    std::vector<EngineRequest*> requests, const std::vector<int>& tokens,
    const std::function<void(BlockStepInput&)>& spoil) {
  BlockStepInput step;
  const auto add = [](const std::vector<int32_t>& from, std::vector<int32_t>& to) {
    EXPECT_LE(static_cast<int64_t>(from.size()), BlockStepInput::kColumns);
    to.insert(to.end(), from.begin(), from.end());
    to.resize((to.size() + BlockStepInput::kColumns - 1) / BlockStepInput::kColumns *
                  BlockStepInput::kColumns,
              -1);
  };
  for (size_t i = 0; i < requests.size(); ++i) {
    EngineRequest& request = *requests[i];
    step.query_start.push_back(step.query_start.back() + tokens[i]);
    step.lengths.push_back(request.length + tokens[i]);
    Reserve(request, step.lengths.back());
    add(request.history.empty() ? std::vector<int32_t>{-1} : request.history, step.history);
    add(request.sink, step.sink);
    add(request.recent, step.recent);
  }
  for (auto* rows : {&step.q, &step.k, &step.v}) rows->resize(options_.layers);
  const auto append = [](std::vector<Bf16>& to, const std::vector<Bf16>& from) {
    to.insert(to.end(), from.begin(), from.end());
  };
  for (int layer = 0; layer < options_.layers; ++layer) {
    for (size_t i = 0; i < requests.size(); ++i) {
      const int begin = requests[i]->length, end = begin + tokens[i];
      append(step.q[layer], requests[i]->model->Queries(layer, begin, end));
      append(step.k[layer], requests[i]->model->Keys(layer, begin, end));
      append(step.v[layer], requests[i]->model->Values(layer, begin, end));
    }
  }
  if (spoil) spoil(step);
  std::vector<std::vector<Bf16>> out(options_.layers);
  const absl::Status status = backend_->Run(step, out);
  if (!status.ok()) return status;
  for (size_t i = 0; i < requests.size(); ++i) requests[i]->length += tokens[i];
  return out;
}

std::vector<int32_t> Engine::Take(int count) {
  EXPECT_GE(free_.size(), static_cast<size_t>(count));
  std::vector<int32_t> taken(free_.end() - count, free_.end());
  free_.resize(free_.size() - count);
  return taken;
}

}  // namespace crumb::client
