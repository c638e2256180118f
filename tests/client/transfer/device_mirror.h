// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "client/gpu/device/owned.h"
#include "gtest/gtest.h"
#include "kernels/bf16.h"
#include "tests/client/transfer/engine_cache.h"

namespace crumb::client {

// A copy of an engine's cache in device memory, and a stream of the engine.
class DeviceMirror {
 public:
  DeviceMirror(Device& device, EngineCache& cache) : device_(device), cache_(cache) {
    stream_ = NewStream(device).value();
    done_ = NewEvent(device).value();
    for (const std::vector<kernels::Bf16>& layer : cache.memory()) {
      layers_.push_back(NewDeviceBuffer(device, layer.size() * sizeof(kernels::Bf16)).value());
    }
    Upload();
  }
  ~DeviceMirror() { Drain(); }

  PagedCache View() const {
    std::vector<kernels::Bf16*> bases;
    for (const DeviceBuffer& layer : layers_)
      bases.push_back(reinterpret_cast<kernels::Bf16*>(layer.get()));
    return cache_.ViewOf(bases);
  }
  DeviceStream stream() const { return stream_.get(); }

  // Enqueues that all layers are overwritten with zeros.
  void Clear() {
    for (size_t i = 0; i < layers_.size(); ++i) {
      ASSERT_TRUE(device_.Clear(layers_[i].get(), Bytes(i), stream_.get()).ok());
    }
  }
  void Drain() {
    EXPECT_TRUE(device_.Record(done_.get(), stream_.get()).ok());
    EXPECT_TRUE(device_.Synchronize(done_.get()).ok());
  }
  // Copies the device's content to the engine's cache.
  void Download() {
    for (size_t i = 0; i < layers_.size(); ++i) {
      const DeviceCopy copy{HostOf(i), layers_[i].get(), Bytes(i)};
      ASSERT_TRUE(device_.ToHost({&copy, 1}, stream_.get()).ok());
    }
    Drain();
  }
  void Upload() {
    for (size_t i = 0; i < layers_.size(); ++i) {
      const DeviceCopy copy{layers_[i].get(), HostOf(i), Bytes(i)};
      ASSERT_TRUE(device_.ToDevice({&copy, 1}, stream_.get()).ok());
    }
    Drain();
  }

 private:
  size_t Bytes(size_t layer) const { return cache_.memory()[layer].size() * sizeof(kernels::Bf16); }
  uint64_t HostOf(size_t layer) const {
    return reinterpret_cast<uint64_t>(cache_.memory()[layer].data());
  }

  Device& device_;
  EngineCache& cache_;
  OwnedStream stream_;
  OwnedEvent done_;
  std::vector<DeviceBuffer> layers_;
};

}  // namespace crumb::client
