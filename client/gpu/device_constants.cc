// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/gpu/device_constants.h"

#include <functional>
#include <utility>
#include <vector>

#include "common/status_macros.h"

namespace crumb::client {

using Layer = RotationSet::Layer;

namespace {

// Returns null if both are the same array, which then need not be copied twice.
const float* Unlike(const float* array, const float* other) {
  return array == other ? nullptr : array;
}

}  // namespace

// Uploader copies arrays of all layers to the device, on a stream of its own.
class DeviceConstants::Uploader {
 public:
  Uploader(Device& device, const WorkerOptions& options)
      : device_(device),
        dim_(options.head_dim),
        heads_(options.own_kv_heads()),
        layers_(options.rotations.Expand(options.own_tiles(), options.own_q_head_range())) {}

  absl::Status Start() {
    CRUMB_ASSIGN_OR_RETURN(stream_, NewStream(device_));
    CRUMB_ASSIGN_OR_RETURN(done_, NewEvent(device_));
    return absl::OkStatus();
  }
  absl::Status Finish() {
    CRUMB_RETURN_IF_ERROR(device_.Record(done_.get(), stream_.get()));
    return device_.Synchronize(done_.get());
  }

  // `of` returns the address of a layer's `elements` floats. Each piece of `piece` floats is
  // repeated `copies` times. If the first layer has none, no layer has.
  absl::Status Send(const std::function<const float*(const Layer&)>& of, size_t elements,
                    Array* array, size_t piece = 1, int copies = 1) {
    if (of(*layers_.front()) == nullptr) return absl::OkStatus();
    std::vector<float> all;
    for (const auto& layer : layers_) {
      const float* from = of(*layer);
      for (size_t at = 0; at < elements; at += piece) {
        for (int i = 0; i < copies; ++i) all.insert(all.end(), from + at, from + at + piece);
      }
    }
    return Send(std::move(all), elements * copies, array);
  }

  // Copies `values`, [layers, elements]; an empty vector leaves the array empty.
  absl::Status Send(std::vector<float> values, size_t elements, Array* array) {
    if (values.empty()) return absl::OkStatus();
    const std::vector<float>& all = sent_.emplace_back(std::move(values));
    const size_t bytes = all.size() * sizeof(float);
    CRUMB_ASSIGN_OR_RETURN(array->memory, NewDeviceBuffer(device_, bytes));
    array->elements = elements;
    const DeviceCopy copy{array->memory.get(), reinterpret_cast<uint64_t>(all.data()), bytes};
    return device_.ToDevice({&copy, 1}, stream_.get());
  }

  // Converts a rotation to the layout of the evict kernel; returns null if there is no rotation.
  absl::StatusOr<const kernels::cuda::EvictRotation*> Prepare(const Array& rotation,
                                                              DeviceBuffer* prepared) {
    if (rotation.elements == 0) return nullptr;
    const size_t bytes = device_.kernels().RotationBytes(dim_) * matrices();
    CRUMB_ASSIGN_OR_RETURN(*prepared, NewDeviceBuffer(device_, bytes));
    auto* out = reinterpret_cast<kernels::cuda::EvictRotation*>(prepared->get());
    CRUMB_RETURN_IF_ERROR(
        device_.kernels().PrepareRotation(At(rotation, 0), dim_, matrices(), out, stream_.get()));
    return out;
  }
  absl::StatusOr<const kernels::cuda::EvictFeedback*> PrepareFeedback(
      const std::function<const float*(const Layer&)>& of, DeviceBuffer* prepared) {
    Array& plain = plain_.emplace_back();
    CRUMB_RETURN_IF_ERROR(Send(of, square(), &plain));
    if (plain.elements == 0) return nullptr;
    const size_t bytes = device_.kernels().FeedbackBytes(dim_) * matrices();
    CRUMB_ASSIGN_OR_RETURN(*prepared, NewDeviceBuffer(device_, bytes));
    auto* out = reinterpret_cast<kernels::cuda::EvictFeedback*>(prepared->get());
    CRUMB_RETURN_IF_ERROR(
        device_.kernels().PrepareFeedback(At(plain, 0), dim_, matrices(), out, stream_.get()));
    return out;
  }

  size_t square() const { return size_t{1} * heads_ * dim_ * dim_; }
  size_t vector() const { return size_t{1} * heads_ * dim_; }

 private:
  int matrices() const { return static_cast<int>(layers_.size()) * heads_; }

  Device& device_;
  const int dim_;
  const int heads_;
  const std::vector<std::shared_ptr<const Layer>> layers_;
  OwnedStream stream_;
  OwnedEvent done_;
  std::vector<std::vector<float>> sent_;  // kept until the copies are done
  std::vector<Array> plain_;
};

absl::StatusOr<std::unique_ptr<DeviceConstants>> DeviceConstants::Upload(
    Device& device, const WorkerOptions& options) {
  auto constants = std::make_unique<DeviceConstants>();
  DeviceConstants& c = *constants;
  Uploader uploader(device, options);
  CRUMB_RETURN_IF_ERROR(uploader.Start());
  const int blocks = options.rotations.position_blocks();
  const size_t square = uploader.square(), vector = uploader.vector();
  const auto mean_v = [](const Layer& l) { return l.rotated_mean_v(); };
  CRUMB_RETURN_IF_ERROR(
      uploader.Send([](const Layer& l) { return l.rotation_k(); }, square, &c.rotation_k_));
  CRUMB_RETURN_IF_ERROR(
      uploader.Send([](const Layer& l) { return l.rotation_v(); }, square, &c.rotation_v_));
  CRUMB_RETURN_IF_ERROR(uploader.Send(
      [](const Layer& l) { return Unlike(l.dual_k(), l.rotation_k()); }, square, &c.dual_k_));
  CRUMB_RETURN_IF_ERROR(uploader.Send(
      [](const Layer& l) { return Unlike(l.dual_v(), l.rotation_v()); }, square, &c.dual_v_));
  CRUMB_RETURN_IF_ERROR(uploader.Send([](const Layer& l) { return l.mean_k_columns(); },
                                      vector * blocks, &c.mean_k_columns_));
  CRUMB_RETURN_IF_ERROR(uploader.Send([](const Layer& l) { return l.rotated_mean_k(); },
                                      vector * blocks, &c.rotated_mean_k_));
  CRUMB_RETURN_IF_ERROR(uploader.Send(mean_v, vector, &c.mean_v_));
  // The evict kernel takes one mean per position block.
  CRUMB_RETURN_IF_ERROR(uploader.Send(mean_v, vector, &c.spread_mean_v_, options.head_dim, blocks));
  CRUMB_RETURN_IF_ERROR(
      uploader.Send([](const Layer& l) { return l.shift(); }, options.own_q_heads(), &c.shift_));
  CRUMB_RETURN_IF_ERROR(
      uploader.Send(options.own_sink_logits(), options.own_q_heads(), &c.sink_logits_));
  c.evict_k_ = {.mean = At(c.rotated_mean_k_, 0), .clip = options.clip_k};
  c.evict_v_ = {.mean = At(c.spread_mean_v_, 0), .clip = options.clip_v};
  CRUMB_ASSIGN_OR_RETURN(c.evict_k_.rotation, uploader.Prepare(c.rotation_k_, &c.prepared_k_));
  CRUMB_ASSIGN_OR_RETURN(c.evict_v_.rotation, uploader.Prepare(c.rotation_v_, &c.prepared_v_));
  if (options.method == kernels::Method::kCrumb) {
    CRUMB_ASSIGN_OR_RETURN(
        c.evict_k_.feedback,
        uploader.PrepareFeedback([](const Layer& l) { return l.feedback_k(); }, &c.feedback_k_));
    CRUMB_ASSIGN_OR_RETURN(
        c.evict_v_.feedback,
        uploader.PrepareFeedback([](const Layer& l) { return l.feedback_v(); }, &c.feedback_v_));
  }
  CRUMB_RETURN_IF_ERROR(uploader.Finish());
  return constants;
}

}  // namespace crumb::client
