// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/client/gpu/device_run.h"

#include <cmath>
#include <cstring>
#include <utility>

#include "client/gpu/gpu_sequence.h"
#include "gtest/gtest.h"

namespace crumb::client {

using kernels::Bf16;

namespace {

// Returns the heads in `range` of rows [tokens, heads, dim].
std::vector<Bf16> Slice(std::vector<Bf16> rows, int heads, IndexRange range, int dim) {
  if (range.size() == heads) return rows;
  std::vector<Bf16> out;
  for (size_t at = 0; at < rows.size(); at += static_cast<size_t>(heads) * dim) {
    const auto begin = rows.begin() + static_cast<std::ptrdiff_t>(at);
    out.insert(out.end(), begin + range.begin * dim, begin + range.end * dim);
  }
  return out;
}

}  // namespace

void Drain(Device& device, DeviceStream stream) {
  const OwnedEvent done = NewEvent(device).value();
  EXPECT_TRUE(device.Record(done.get(), stream).ok());
  EXPECT_TRUE(device.Synchronize(done.get()).ok());
}

Capturing Simulated(SimulatedDevice& device) {
  return {.begin = [&device](DeviceStream stream) { device.BeginCapture(stream); },
          .end =
              [&device](DeviceStream stream) {
                return [&device, stream, graph = device.EndCapture(stream)] {
                  device.Launch(graph, stream);
                };
              }};
}

std::vector<float> RunPass::Outputs(size_t entry) const {
  Drain(*device, stream);
  std::vector<float> outputs;
  const auto* all = reinterpret_cast<const float*>(out.get());
  for (int layer = 0; layer < layers; ++layer) {
    const float* from = all + (layer * rows_max + first[entry]) * row;
    outputs.insert(outputs.end(), from, from + tokens[entry] * row);
  }
  return outputs;
}

DeviceRun::DeviceRun(Device& device, DeviceWorker& worker, DeviceBatchOptions options)
    : device_(device),
      simulated_(dynamic_cast<SimulatedDevice*>(&device)),
      worker_(worker),
      options_(options),
      stream_(NewStream(device).value()) {
  options_.stream = stream_.get();
  options_.output = DeviceOutput::kF32;
  auto batch = worker.NewBatch(options_);
  EXPECT_TRUE(batch.ok()) << batch.status();
  batch_ = std::move(batch).value();
}

DeviceRun::~DeviceRun() { Drain(device_, stream_.get()); }

void DeviceRun::ForbidAllocations(bool forbid) {
  if (simulated_ != nullptr) simulated_->allocations_forbidden = forbid;
}

DeviceAddress DeviceRun::Buffer(RunPass& pass, size_t bytes) {
  pass.buffers.push_back(NewDeviceBuffer(device_, bytes).value());
  return pass.buffers.back().get();
}

// Copies the rows of entry i to its row (decode) or behind those of the entries before it (prompt).
void DeviceRun::Fill(RunPass& pass, const std::vector<RunEntry>& entries) {
  const WorkerOptions& options = worker_.options();
  const size_t q_row = size_t{2} * options.own_q_heads() * options.head_dim;
  const size_t k_row = size_t{2} * options.own_kv_heads() * options.head_dim;
  for (int layer = 0; layer < pass.layers; ++layer) {
    for (size_t i = 0; i < entries.size(); ++i) {
      const int begin = entries[i].sequence->length(), end = entries[i].end;
      const auto send = [&](DeviceAddress to, size_t row, std::vector<Bf16> made) {
        const std::vector<Bf16>& rows = pass.rows.emplace_back(std::move(made));
        const DeviceCopy copy{to + row * pass.first[i], reinterpret_cast<uint64_t>(rows.data()),
                              row * (end - begin)};
        EXPECT_TRUE(device_.ToDevice({&copy, 1}, stream_.get()).ok());
      };
      const SequenceModel& model = *entries[i].model;
      const TileRange own = options.own_tiles();
      const int global = own.layers.begin + layer, dim = options.head_dim;
      send(q_[layer], q_row,
           Slice(model.Queries(global, begin, end), options.q_heads, options.own_q_head_range(),
                 dim));
      std::vector<Bf16> keys =
          Slice(model.Keys(global, begin, end), options.kv_heads, own.heads, dim);
      if (poisoned_position >= begin && poisoned_position < end) {
        keys[(poisoned_position - begin) * k_row / 2] = Bf16{0x7fc0};
      }
      send(k_[layer], k_row, keys);
      send(v_[layer], k_row,
           Slice(model.Values(global, begin, end), options.kv_heads, own.heads, dim));
    }
  }
}

void DeviceRun::Enqueue(RunPass& pass) {
  EXPECT_TRUE(batch_->Start().ok());
  for (int layer = 0; layer < pass.layers; ++layer) {
    const auto pointer = [](DeviceAddress address) { return reinterpret_cast<void*>(address); };
    absl::Status status = batch_->Append(layer, pointer(k_[layer]), pointer(v_[layer]));
    EXPECT_TRUE(status.ok()) << status;
    status = batch_->Attend(layer, pointer(q_[layer]), pointer(out_[layer]));
    EXPECT_TRUE(status.ok()) << status;
  }
}

absl::StatusOr<std::shared_ptr<RunPass>> DeviceRun::TryPass(const std::vector<RunEntry>& entries) {
  const WorkerOptions& options = worker_.options();
  auto pass = std::make_shared<RunPass>();
  pass->device = &device_;
  pass->stream = stream_.get();
  pass->layers = options.own_layers();
  pass->row = size_t{1} * options.own_q_heads() * options.head_dim;
  pass->rows_max = size_t{1} * options_.sequences * options_.tokens;
  std::vector<PassEntry> shares;
  int next = 0;
  for (const RunEntry& entry : entries) {
    const int tokens = entry.end - entry.sequence->length();
    shares.push_back({entry.sequence, tokens});
    pass->first.push_back(next);
    pass->tokens.push_back(tokens);
    next += tokens;
  }
  const bool capture = capturing_.begin != nullptr;
  if (!capture || captured_ == nullptr) {
    const size_t k_row = size_t{2} * options.own_kv_heads() * options.head_dim;
    q_.clear(), k_.clear(), v_.clear(), out_.clear();
    for (int layer = 0; layer < pass->layers; ++layer) {
      q_.push_back(Buffer(*pass, pass->rows_max * pass->row * 2));
      k_.push_back(Buffer(*pass, pass->rows_max * k_row));
      v_.push_back(Buffer(*pass, pass->rows_max * k_row));
      out_.push_back(Buffer(*pass, pass->rows_max * pass->row * 4));
    }
  }
  const size_t layer_bytes = pass->rows_max * pass->row * 4;
  pass->out = NewPinnedBuffer(device_, layer_bytes * pass->layers).value();
  Fill(*pass, entries);

  ForbidAllocations(true);
  absl::Status status = batch_->Prepare(shares);
  if (!status.ok()) {
    ForbidAllocations(false);
    Drain(device_, stream_.get());
    return status;
  }
  if (capture) {
    if (captured_ == nullptr) {
      capturing_.begin(stream_.get());
      Enqueue(*pass);
      launch_ = capturing_.end(stream_.get());
      captured_ = pass;
    }
    launch_();
  } else {
    Enqueue(*pass);
  }
  for (int layer = 0; layer < pass->layers; ++layer) {
    const DeviceCopy copy{reinterpret_cast<uint64_t>(pass->out.get()) + layer * layer_bytes,
                          out_[layer], layer_bytes};
    EXPECT_TRUE(device_.ToHost({&copy, 1}, stream_.get()).ok());
  }
  std::vector<std::span<const int32_t>> accepted;
  for (const RunEntry& entry : entries) {
    accepted.emplace_back(entry.model->tokens().data() + entry.sequence->length(),
                          static_cast<size_t>(entry.accepted));
  }
  status = batch_->Advance(accepted);
  ForbidAllocations(false);
  if (!status.ok()) return status;
  return pass;
}

std::shared_ptr<RunPass> DeviceRun::Pass(const std::vector<RunEntry>& entries) {
  auto pass = TryPass(entries);
  EXPECT_TRUE(pass.ok()) << pass.status();
  return std::move(pass).value();
}

double RelativeError(const std::vector<float>& got, const std::vector<float>& expected) {
  if (got.size() != expected.size()) return INFINITY;
  double error = 0.0, norm = 0.0;
  for (size_t i = 0; i < got.size(); ++i) {
    error += std::pow(double{got[i]} - expected[i], 2);
    norm += std::pow(double{expected[i]}, 2);
  }
  return std::sqrt(error / norm);
}

std::string FlipBit(Device& device, DeviceSequence& sequence, int page) {
  const auto& pages = static_cast<GpuSequence&>(sequence).pages;
  if (page < 0 || static_cast<size_t>(page) >= pages.size()) return "no such page";
  const uint64_t at = reinterpret_cast<uint64_t>(pages[page]->tiles) + pages[page]->bytes / 2;
  const OwnedStream stream = NewStream(device).value();
  const PinnedBuffer byte = NewPinnedBuffer(device, 1).value();
  const DeviceCopy out{reinterpret_cast<uint64_t>(byte.get()), at, 1};
  if (!device.ToHost({&out, 1}, stream.get()).ok()) return "not read";
  Drain(device, stream.get());
  *byte.get() ^= std::byte{4};
  const DeviceCopy in{at, reinterpret_cast<uint64_t>(byte.get()), 1};
  if (!device.ToDevice({&in, 1}, stream.get()).ok()) return "not written";
  Drain(device, stream.get());
  return "ok";
}

}  // namespace crumb::client
