// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/client/gpu/simulated_device.h"

#include <cstdlib>
#include <cstring>
#include <utility>

#include "gtest/gtest.h"

namespace crumb::client {
namespace {

constexpr size_t kAlignment = 512;
constexpr int kBurst = 6;

bool Inside(const std::map<uint64_t, size_t>& ranges, uint64_t address, size_t bytes) {
  auto after = ranges.upper_bound(address);
  if (after == ranges.begin()) return false;
  --after;
  return address + bytes <= after->first + after->second;
}

std::byte* NewBytes(size_t bytes) {
  const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  return static_cast<std::byte*>(std::aligned_alloc(kAlignment, rounded));
}

}  // namespace

// A range of host memory that the device knows as its own memory, or as a peer's.
class SimulatedDevice::SharedRange final : public DeviceRange {
 public:
  SharedRange(SimulatedDevice& device, std::unique_ptr<DeviceRange> range, bool peer)
      : device_(device), range_(std::move(range)), peer_(peer) {}
  ~SharedRange() override {
    MutexLock lock(&device_.mutex_);
    while (device_.RunOne()) {
    }
    for (const auto& [offset, bytes] : mapped_) Known().erase(base() + offset);
  }

  DeviceAddress base() const override { return range_->base(); }
  uint64_t bytes() const override { return range_->bytes(); }
  absl::Status Map(uint64_t offset, const DeviceHandle& handle) override {
    const absl::Status mapped = range_->Map(offset, handle);
    if (!mapped.ok()) return mapped;
    MutexLock lock(&device_.mutex_);
    mapped_[offset] = handle.bytes();
    Known()[base() + offset] = handle.bytes();
    return absl::OkStatus();
  }
  absl::Status Unmap(uint64_t offset) override {
    {
      MutexLock lock(&device_.mutex_);
      mapped_.erase(offset);
      Known().erase(base() + offset);
    }
    return range_->Unmap(offset);
  }

 private:
  std::map<uint64_t, size_t>& Known() ABSL_EXCLUSIVE_LOCKS_REQUIRED(device_.mutex_) {
    return peer_ ? device_.peer_ : device_.shared_;
  }

  SimulatedDevice& device_;
  const std::unique_ptr<DeviceRange> range_;
  const bool peer_;
  std::map<uint64_t, uint64_t> mapped_;
};

class SimulatedDevice::SharedMemory final : public DeviceMemory {
 public:
  SharedMemory(SimulatedDevice& device, const std::string& name, bool peer)
      : device_(device), memory_(OpenHost({.name = name})), peer_(peer) {}

  const DeviceUuid& uuid() const override { return memory_->uuid(); }
  uint64_t granularity() const override { return memory_->granularity(); }
  absl::StatusOr<std::unique_ptr<DeviceHandle>> Allocate(uint64_t bytes) override {
    if (peer_) return absl::FailedPreconditionError("a peer's memory");
    return memory_->Allocate(bytes);
  }
  absl::StatusOr<std::unique_ptr<DeviceHandle>> Import(UniqueFd fd, uint64_t bytes) override {
    return memory_->Import(std::move(fd), bytes);
  }
  absl::StatusOr<std::unique_ptr<DeviceRange>> Reserve(uint64_t bytes) override {
    auto range = memory_->Reserve(bytes);
    if (!range.ok()) return range.status();
    return std::make_unique<SharedRange>(device_, *std::move(range), peer_);
  }
  absl::Status CopyToHost(DeviceAddress from, std::span<std::byte> to) override {
    return memory_->CopyToHost(from, to);
  }

 private:
  SimulatedDevice& device_;
  const std::unique_ptr<DeviceMemory> memory_;
  const bool peer_;
};

absl::StatusOr<std::unique_ptr<DeviceMemory>> SimulatedDevice::OpenMemory() {
  return std::make_unique<SharedMemory>(*this, name_, false);
}

absl::StatusOr<std::unique_ptr<DeviceMemory>> SimulatedDevice::OpenPeerMemory(int ordinal) {
  if (ordinal < 0 || static_cast<size_t>(ordinal) >= peers_.size()) {
    return absl::UnavailableError("there is no peer " + std::to_string(ordinal));
  }
  return std::make_unique<SharedMemory>(*this, peers_[static_cast<size_t>(ordinal)], true);
}

SimulatedDevice::SimulatedDevice(uint32_t seed, size_t memory_max, std::string name,
                                 std::vector<std::string> peers)
    : memory_max_(memory_max),
      name_(std::move(name)),
      peers_(std::move(peers)),
      kernels_(*this),
      random_(seed),
      eagerness_(static_cast<int>(seed % 3) * 2) {
  streams_[nullptr] = std::make_unique<Stream>();
}

SimulatedDevice::~SimulatedDevice() {
  MutexLock lock(&mutex_);
  EXPECT_EQ(memory_.size() + pinned_.size(), 0u) << "device memory was left behind";
  EXPECT_EQ(shared_.size() + peer_.size(), 0u) << "shared memory was left mapped";
  EXPECT_EQ(pinned_by_.size(), 0u) << "memory was left pinned";
  EXPECT_EQ(streams_.size(), 1u) << "streams were left behind";
  EXPECT_EQ(events_.size(), 0u) << "events were left behind";
}

absl::StatusOr<DeviceAddress> SimulatedDevice::Allocate(size_t bytes) {
  EXPECT_FALSE(allocations_forbidden.load()) << "device memory is allocated where it must not";
  MutexLock lock(&mutex_);
  CheckNotCapturing("Allocate");
  if (used_ + bytes > memory_max_) return absl::ResourceExhaustedError("device memory is full");
  std::byte* memory = NewBytes(bytes);
  std::memset(memory, 0xff, bytes);
  used_ += bytes;
  memory_[reinterpret_cast<uint64_t>(memory)] = bytes;
  return reinterpret_cast<uint64_t>(memory);
}

void SimulatedDevice::Free(DeviceAddress address) {
  MutexLock lock(&mutex_);
  while (RunOne()) {
  }
  used_ -= memory_.at(address);
  memory_.erase(address);
  std::free(reinterpret_cast<void*>(address));
}

absl::StatusOr<std::byte*> SimulatedDevice::AllocatePinned(size_t bytes) {
  EXPECT_FALSE(allocations_forbidden.load()) << "pinned memory is allocated where it must not";
  MutexLock lock(&mutex_);
  CheckNotCapturing("AllocatePinned");
  std::byte* memory = NewBytes(bytes);
  std::memset(memory, 0xff, bytes);
  pinned_[reinterpret_cast<uint64_t>(memory)] = bytes;
  return memory;
}

void SimulatedDevice::FreePinned(std::byte* bytes) {
  MutexLock lock(&mutex_);
  while (RunOne()) {
  }
  pinned_.erase(reinterpret_cast<uint64_t>(bytes));
  std::free(bytes);
}

absl::Status SimulatedDevice::Pin(std::span<const std::byte> bytes, PinAccess) {
  MutexLock lock(&mutex_);
  const auto address = reinterpret_cast<uint64_t>(bytes.data());
  if (pinned_by_.count(address) != 0) return absl::AlreadyExistsError("pinned already");
  pinned_by_[address] = bytes.size();
  return absl::OkStatus();
}

void SimulatedDevice::Unpin(std::span<const std::byte> bytes) {
  MutexLock lock(&mutex_);
  while (RunOne()) {
  }
  EXPECT_EQ(pinned_by_.erase(reinterpret_cast<uint64_t>(bytes.data())), 1u);
}

absl::StatusOr<DeviceStream> SimulatedDevice::NewStream() {
  MutexLock lock(&mutex_);
  auto stream = std::make_unique<Stream>();
  stream->priority = random_();
  auto* handle = reinterpret_cast<DeviceStream>(stream.get());
  streams_[handle] = std::move(stream);
  return handle;
}

void SimulatedDevice::DeleteStream(DeviceStream stream) {
  Drain(stream);
  MutexLock lock(&mutex_);
  streams_.erase(stream);
}

absl::StatusOr<DeviceEvent> SimulatedDevice::NewEvent() {
  MutexLock lock(&mutex_);
  auto event = std::make_unique<Event>();
  auto* handle = reinterpret_cast<DeviceEvent>(event.get());
  events_[handle] = std::move(event);
  return handle;
}

void SimulatedDevice::DeleteEvent(DeviceEvent event) {
  MutexLock lock(&mutex_);
  while (RunOne()) {
  }
  events_.erase(event);
}

SimulatedDevice::Stream& SimulatedDevice::Of(DeviceStream stream) { return *streams_.at(stream); }

bool SimulatedDevice::Pinned(uint64_t address, size_t bytes) const {
  const bool whole = Inside(pinned_, address, bytes) || Inside(pinned_by_, address, bytes) ||
                     Inside(peer_, address, bytes) || Inside(shared_, address, bytes);
  if (whole || everything_pinned.load()) return true;
  EXPECT_FALSE(Inside(pinned_by_, address, 1) || Inside(pinned_by_, address + bytes - 1, 1))
      << "a copy crosses the end of pinned memory";
  return false;
}

bool SimulatedDevice::KernelMayRead(uint64_t address, size_t bytes) const {
  const auto pinned = [this](uint64_t at) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    return Inside(pinned_, at, 1) || Inside(pinned_by_, at, 1);
  };
  return Inside(memory_, address, bytes) || Inside(shared_, address, bytes) ||
         Inside(peer_, address, bytes) || (pinned(address) && pinned(address + bytes - 1));
}

void SimulatedDevice::CheckOnDevice(DeviceAddress address, size_t bytes) const {
  EXPECT_TRUE(Inside(memory_, address, bytes) || Inside(shared_, address, bytes))
      << "no device memory at " << address;
}

void SimulatedDevice::CheckNotCapturing(const char* call) const {
  for (const auto& [handle, stream] : streams_) {
    EXPECT_FALSE(stream->capturing) << call << " while a stream is captured";
  }
}

bool SimulatedDevice::RunOne() {
  std::vector<Stream*> ready;
  for (const auto& [handle, stream] : streams_) {
    if (stream->queue.empty()) continue;
    const Operation& head = stream->queue.front();
    if (head.awaited == nullptr || head.awaited->completed >= head.ticket) {
      ready.push_back(stream.get());
    }
  }
  if (ready.empty()) return false;
  Stream* chosen = ready[random_() % ready.size()];
  // Mostly one stream runs far ahead of the others.
  if (random_() % 16 == 0) chosen->priority = random_();
  for (Stream* stream : ready) {
    if (random_() % 8 != 0 && stream->priority > chosen->priority) chosen = stream;
  }
  const Operation operation = std::move(chosen->queue.front());
  chosen->queue.pop_front();
  if (operation.run) operation.run();
  return true;
}

void SimulatedDevice::RunUntil(const std::function<bool()>& done) {
  while (!done()) {
    if (!RunOne()) {
      ADD_FAILURE() << "streams wait for each other";
      return;
    }
  }
  progress_.NotifyAll();
}

void SimulatedDevice::Add(Stream& stream, Operation operation) {
  stream.queue.push_back(std::move(operation));
  if (static_cast<int>(random_() % 8) >= eagerness_) return;
  for (int i = static_cast<int>(random_() % kBurst); i-- > 0;) RunOne();
}

absl::Status SimulatedDevice::Enqueue(DeviceStream handle, std::function<void()> run) {
  MutexLock lock(&mutex_);
  Stream& stream = Of(handle);
  if (stream.capturing) {
    stream.captured.push_back(std::move(run));
  } else {
    Add(stream, {.run = std::move(run), .awaited = nullptr, .ticket = 0});
  }
  return absl::OkStatus();
}

absl::Status SimulatedDevice::Record(DeviceEvent handle, DeviceStream stream) {
  MutexLock lock(&mutex_);
  EXPECT_FALSE(Of(stream).capturing) << "Record while the stream is captured";
  Event* event = events_.at(handle).get();
  const uint64_t ticket = ++event->recorded;
  Add(Of(stream),
      {.run = [event, ticket] { event->completed = ticket; }, .awaited = nullptr, .ticket = 0});
  return absl::OkStatus();
}

absl::Status SimulatedDevice::Wait(DeviceStream stream, DeviceEvent handle) {
  MutexLock lock(&mutex_);
  EXPECT_FALSE(Of(stream).capturing) << "Wait while the stream is captured";
  const Event* event = events_.at(handle).get();
  Add(Of(stream), {.run = nullptr, .awaited = event, .ticket = event->recorded});
  return absl::OkStatus();
}

absl::StatusOr<bool> SimulatedDevice::Done(DeviceEvent handle) {
  MutexLock lock(&mutex_);
  const Event& event = *events_.at(handle);
  return event.completed == event.recorded;
}

absl::Status SimulatedDevice::Synchronize(DeviceEvent handle) {
  MutexLock lock(&mutex_);
  const Event& event = *events_.at(handle);
  const uint64_t ticket = event.recorded;
  const auto held = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return holder_ != std::thread::id() && holder_ != std::this_thread::get_id();
  };
  while (event.completed < ticket && held()) progress_.Wait(&mutex_);
  RunUntil([&] { return event.completed >= ticket; });
  return absl::OkStatus();
}

void SimulatedDevice::HoldOthers() {
  MutexLock lock(&mutex_);
  holder_ = std::this_thread::get_id();
}

void SimulatedDevice::ReleaseOthers() {
  MutexLock lock(&mutex_);
  holder_ = std::thread::id();
  progress_.NotifyAll();
}

void SimulatedDevice::Drain(DeviceStream handle) {
  MutexLock lock(&mutex_);
  Stream& stream = Of(handle);
  RunUntil([&] { return stream.queue.empty(); });
}

absl::Status SimulatedDevice::ToDevice(std::span<const DeviceCopy> copies, DeviceStream stream) {
  if (copies.size() >= copies_fail_from.load()) return absl::InternalError("copies fail here");
  for (const DeviceCopy& copy : copies) {
    auto from = std::make_shared<std::vector<std::byte>>();
    {
      MutexLock lock(&mutex_);
      CheckOnDevice(copy.to, copy.bytes);
      if (!Pinned(copy.from, copy.bytes)) {
        unpinned_copies_.fetch_add(1);
        const auto* bytes = reinterpret_cast<const std::byte*>(copy.from);
        from->assign(bytes, bytes + copy.bytes);
      }
    }
    const absl::Status queued = Enqueue(stream, [copy, from] {
      const void* source = from->empty() ? reinterpret_cast<const void*>(copy.from) : from->data();
      std::memcpy(reinterpret_cast<void*>(copy.to), source, copy.bytes);
    });
    if (!queued.ok()) return queued;
  }
  return absl::OkStatus();
}

absl::Status SimulatedDevice::ToHost(std::span<const DeviceCopy> copies, DeviceStream stream) {
  const size_t most = copies_to_host_max.load();
  for (size_t i = 0; i < copies.size(); ++i) {
    if (i >= most) return absl::InternalError("copies to the host fail here");
    const DeviceCopy& copy = copies[i];
    bool pinned = false;
    {
      MutexLock lock(&mutex_);
      CheckOnDevice(copy.from, copy.bytes);
      pinned = Pinned(copy.to, copy.bytes);
    }
    const absl::Status queued = Enqueue(stream, [this, copy] {
      if (before_copy_to_host) before_copy_to_host(copy);
      std::memcpy(reinterpret_cast<void*>(copy.to), reinterpret_cast<const void*>(copy.from),
                  copy.bytes);
    });
    if (!queued.ok()) return queued;
    if (!pinned) {
      unpinned_copies_.fetch_add(1);
      Drain(stream);
    }
  }
  return absl::OkStatus();
}

absl::Status SimulatedDevice::CopyRows(const DeviceRowsCopy& copy, DeviceStream stream) {
  {
    MutexLock lock(&mutex_);
    const size_t last = copy.rows - 1;
    CheckOnDevice(copy.to, copy.to_pitch * last + copy.row_bytes);
    CheckOnDevice(copy.from, copy.from_pitch * last + copy.row_bytes);
  }
  return Enqueue(stream, [copy] {
    for (size_t row = 0; row < copy.rows; ++row) {
      std::memcpy(reinterpret_cast<void*>(copy.to + row * copy.to_pitch),
                  reinterpret_cast<const void*>(copy.from + row * copy.from_pitch), copy.row_bytes);
    }
  });
}

absl::Status SimulatedDevice::Clear(DeviceAddress address, size_t bytes, DeviceStream stream) {
  {
    MutexLock lock(&mutex_);
    CheckOnDevice(address, bytes);
  }
  return Enqueue(stream, [=] { std::memset(reinterpret_cast<void*>(address), 0, bytes); });
}

void SimulatedDevice::BeginCapture(DeviceStream stream) {
  MutexLock lock(&mutex_);
  Of(stream).capturing = true;
  Of(stream).captured.clear();
}

SimulatedDevice::Graph SimulatedDevice::EndCapture(DeviceStream stream) {
  MutexLock lock(&mutex_);
  Of(stream).capturing = false;
  return std::make_shared<const std::vector<std::function<void()>>>(std::move(Of(stream).captured));
}

void SimulatedDevice::Launch(const Graph& graph, DeviceStream stream) {
  for (const std::function<void()>& run : *graph) Enqueue(stream, run).IgnoreError();
}

size_t SimulatedDevice::live_allocations() const {
  MutexLock lock(&mutex_);
  return memory_.size() + pinned_.size();
}

size_t SimulatedDevice::live_handles() const {
  MutexLock lock(&mutex_);
  return streams_.size() - 1 + events_.size();
}

size_t SimulatedDevice::pinned_ranges() const {
  MutexLock lock(&mutex_);
  return pinned_by_.size();
}

size_t SimulatedDevice::shared_ranges() const {
  MutexLock lock(&mutex_);
  return shared_.size() + peer_.size();
}

}  // namespace crumb::client
