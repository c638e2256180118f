// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/gpu/window_watch.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "common/logging.h"
#include "common/status_macros.h"
#include "kernels/bf16.h"

namespace crumb::client {

using kernels::Bf16;
using kernels::PageFormat;

namespace {

constexpr int kSamples = 2;

}  // namespace

absl::StatusOr<std::unique_ptr<WindowWatch>> WindowWatch::Create(Device& device,
                                                                 const WorkerOptions& options,
                                                                 const DeviceGeometry& geometry,
                                                                 SequenceStarter& starter) {
  std::unique_ptr<WindowWatch> watch(new WindowWatch(device, options, geometry, starter));
  CRUMB_ASSIGN_OR_RETURN(watch->stream_, NewStream(device));
  CRUMB_ASSIGN_OR_RETURN(watch->copied_, NewEvent(device));
  const size_t tiles = geometry.layers * geometry.tile.int2_bytes();
  for (int i = 0; i < kSamples; ++i) {
    auto sample = std::make_unique<WindowSample>();
    CRUMB_ASSIGN_OR_RETURN(sample->queries, NewDeviceBuffer(device, watch->queries_bytes()));
    CRUMB_ASSIGN_OR_RETURN(sample->rows, NewDeviceBuffer(device, watch->rows_bytes()));
    CRUMB_ASSIGN_OR_RETURN(sample->host, NewPinnedBuffer(device, watch->queries_bytes() +
                                                                     watch->rows_bytes() + tiles));
    watch->idle_->Add(std::move(sample));
  }
  return watch;
}

// An abandoned sample may still be written to, so that later work waits for that.
std::shared_ptr<WindowSample> WindowWatch::NextSample(int page, DeviceStream stream) {
  std::unique_ptr<WindowSample> sample = idle_->Take();
  if (sample == nullptr) return nullptr;
  const PassRef& last = sample->last;
  const bool usable =
      last.timeline == nullptr || last.timeline->MakeWait(stream, last.pass).value_or(false);
  const std::optional<int> head = usable ? starter_.watch().NextSample() : std::nullopt;
  if (!head.has_value()) {
    idle_->Add(std::move(sample));
    return nullptr;
  }
  sample->page = page;
  sample->head = *head;
  sample->tokens = 0;
  return {sample.release(),
          [idle = idle_](WindowSample* given) { idle->Add(std::unique_ptr<WindowSample>(given)); }};
}

absl::Status WindowWatch::HoldQueries(WindowSample& sample, const PassRef& moment, int layer,
                                      DeviceAddress q, int tokens) const {
  const size_t token = size_t{2} * geometry_.q_heads * geometry_.head_dim;
  sample.tokens = std::min(tokens, kTokens);
  sample.last = moment;
  const DeviceRowsCopy copy{
      .to = sample.queries.get() + layer * kTokens * token_bytes(),
      .to_pitch = token_bytes(),
      .from = q + token * (tokens - sample.tokens) + token_bytes() * sample.head,
      .from_pitch = token,
      .row_bytes = token_bytes(),
      .rows = static_cast<size_t>(sample.tokens)};
  return device_.CopyRows(copy, moment.timeline->stream());
}

absl::Status WindowWatch::HoldQueriesOfAll(WindowSample& sample, const PassRef& moment,
                                           DeviceAddress held, int tokens) const {
  sample.tokens = std::min(tokens, kTokens);
  sample.last = moment;
  const DeviceRowsCopy copy{.to = sample.queries.get(),
                            .to_pitch = kTokens * token_bytes(),
                            .from = held + token_bytes() * (tokens - sample.tokens),
                            .from_pitch = token_bytes() * tokens,
                            .row_bytes = token_bytes() * sample.tokens,
                            .rows = static_cast<size_t>(geometry_.layers)};
  return device_.CopyRows(copy, moment.timeline->stream());
}

// K and V of all layers lie at equal distances, so that one call copies them all.
absl::Status WindowWatch::HoldRows(WindowSample& sample, const PassRef& moment, DeviceAddress ring,
                                   const RingShape& shape) const {
  sample.last = moment;
  for (int done = 0; done < kPageTokens;) {
    const int slot = (sample.page * kPageTokens + done) % shape.capacity;
    const int tokens = std::min(kPageTokens - done, shape.capacity - slot);
    const DeviceRowsCopy copy{
        .to = sample.rows.get() + done * shape.token_stride,
        .to_pitch = window_bytes(),
        .from = ring + sample.head * shape.head_stride + slot * shape.token_stride,
        .from_pitch = static_cast<size_t>(shape.v_offset),
        .row_bytes = static_cast<size_t>(tokens * shape.token_stride),
        .rows = size_t{2} * geometry_.layers};
    CRUMB_RETURN_IF_ERROR(device_.CopyRows(copy, moment.timeline->stream()));
    done += tokens;
  }
  return absl::OkStatus();
}

void WindowWatch::Measure(std::shared_ptr<WindowSample> sample,
                          std::shared_ptr<const DevicePage> page) {
  background_.Add([this, sample = std::move(sample), page = std::move(page)] {
    const absl::Status brought = CopyToHost(*sample, *page);
    if (!brought.ok()) return LogWarning("a window was not measured: {}", brought.ToString());
    const std::vector<QualitySample> layers = MeasureAll(*sample, *page);
    if (layers.empty()) return;
    starter_.publisher().NoteQuality(layers);
    starter_.watch().Record(layers);
  });
}

absl::Status WindowWatch::CopyToHost(WindowSample& sample, const DevicePage& page) {
  CRUMB_RETURN_IF_ERROR(sample.last.timeline->Synchronize(sample.last.pass));
  const auto host = reinterpret_cast<uint64_t>(sample.host.get());
  const size_t tile = page.tile_bytes;
  std::vector<DeviceCopy> copies = {{host, sample.queries.get(), queries_bytes()},
                                    {host + queries_bytes(), sample.rows.get(), rows_bytes()}};
  for (int layer = 0; layer < geometry_.layers; ++layer) {
    const auto from = reinterpret_cast<uint64_t>(page.layer(layer)) + tile * sample.head;
    copies.push_back({host + queries_bytes() + rows_bytes() + tile * layer, from, tile});
  }
  CRUMB_RETURN_IF_ERROR(device_.ToHost(copies, stream_.get()));
  CRUMB_RETURN_IF_ERROR(device_.Record(copied_.get(), stream_.get()));
  CRUMB_RETURN_IF_ERROR(device_.Synchronize(copied_.get()));
  sample.last = {};
  return absl::OkStatus();
}

// Returns nothing if a row is not finite: such a window is not published anyway.
std::vector<QualitySample> WindowWatch::MeasureAll(const WindowSample& sample,
                                                   const DevicePage& page) const {
  const auto* queries = reinterpret_cast<const Bf16*>(sample.host.get());
  const auto* rows = reinterpret_cast<const Bf16*>(sample.host.get() + queries_bytes());
  std::byte* tiles = sample.host.get() + queries_bytes() + rows_bytes();
  if (!AllFinite(rows, rows_bytes() / sizeof(Bf16))) return {};
  const size_t window = window_bytes() / sizeof(Bf16), token = token_bytes() / sizeof(Bf16);
  std::vector<QualitySample> layers;
  for (int layer = 0; layer < geometry_.layers; ++layer) {
    const Bf16* k = rows + 2 * window * layer;
    std::vector<float> held(token * sample.tokens);
    std::transform(queries + token * kTokens * layer,
                   queries + token * (kTokens * layer + sample.tokens), held.begin(),
                   [](Bf16 x) { return kernels::Bf16ToFloat(x); });
    layers.push_back(backend_.Measure({.k = k, .v = k + window, .stride = geometry_.head_dim},
                                      static_cast<int>(page.position) * kPageTokens, layer,
                                      sample.head, tiles + page.tile_bytes * layer, held));
  }
  return layers;
}

}  // namespace crumb::client
