// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <vector>

#include "common/fd_channel.h"
#include "device_memory_contract.h"

namespace crumb::client {
namespace {

void Write(DeviceAddress to, std::span<const std::byte> bytes) {
  ASSERT_EQ(
      cudaMemcpy(reinterpret_cast<void*>(to), bytes.data(), bytes.size(), cudaMemcpyHostToDevice),
      cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

INSTANTIATE_TEST_SUITE_P(Cuda, DeviceMemoryContract,
                         testing::Values(DeviceUnderTest{
                             "cuda", [] { return DeviceMemory::OpenCuda(0); }, Write}),
                         [](const auto& test) { return test.param.name; });

class CudaDeviceMemoryTest : public testing::Test {
 protected:
  void SetUp() override {
    const auto memory = DeviceMemory::OpenCuda(0);
    if (absl::IsUnavailable(memory.status()))
      GTEST_SKIP() << "needs a CUDA device: " << memory.status();
  }
};

TEST_F(CudaDeviceMemoryTest, HasTheNameOfItsDevice) {
  const auto memory = DeviceMemory::OpenCuda(0);
  ASSERT_TRUE(memory.ok()) << memory.status().ToString();
  cudaDeviceProp properties;
  ASSERT_EQ(cudaGetDeviceProperties(&properties, 0), cudaSuccess);
  EXPECT_EQ(std::memcmp((*memory)->uuid().bytes.data(), properties.uuid.bytes, 16), 0);
}

TEST_F(CudaDeviceMemoryTest, SaysThatTheDeviceIsFull) {
  const auto memory = DeviceMemory::OpenCuda(0);
  ASSERT_TRUE(memory.ok()) << memory.status().ToString();
  size_t free = 0;
  size_t total = 0;
  ASSERT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  const uint64_t piece = (*memory)->granularity();
  EXPECT_TRUE(absl::IsResourceExhausted((*memory)->Allocate((total / piece + 1) * piece).status()));
}

TEST(CudaDriver, ThereIsNoSuchDevice) {
  EXPECT_TRUE(absl::IsUnavailable(DeviceMemory::OpenCuda(1 << 20).status()));
}

// A process that dies leaves its memory to the processes that have its descriptor. The writer
// starts with exec, because CUDA does not survive a fork.
constexpr const char* kWriterArgument = "--crumb-writer";
constexpr uint64_t kPattern = 0x5AC35AC35AC35AC3;

int RunWriter(int socket) {
  const auto memory = DeviceMemory::OpenCuda(0);
  if (!memory.ok()) return 2;
  const uint64_t piece = (*memory)->granularity();
  const auto handle = (*memory)->Allocate(piece);
  const auto range = (*memory)->Reserve(piece);
  if (!handle.ok() || !range.ok() || !(*range)->Map(0, **handle).ok()) return 3;
  std::vector<uint64_t> words(1024, kPattern);
  if (cudaMemcpy(reinterpret_cast<void*>((*range)->base()), words.data(), words.size() * 8,
                 cudaMemcpyHostToDevice) != cudaSuccess) {
    return 4;
  }
  const auto fd = (*handle)->Export();
  if (!fd.ok()) return 5;
  const int fds[] = {fd->get()};
  return SendFdMessage(socket, std::to_string(piece), fds).ok() ? 0 : 6;
}

TEST_F(CudaDeviceMemoryTest, ADeadProcesssMemoryIsTakenOver) {
  int sockets[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sockets), 0);
  const std::string fd = std::to_string(sockets[1]);
  const pid_t writer = ::fork();
  if (writer == 0) {
    ::execl("/proc/self/exe", "writer", kWriterArgument, fd.c_str(), nullptr);
    ::_exit(9);
  }
  ::close(sockets[1]);
  auto message = ReceiveFdMessage(sockets[0]);
  int status = -1;
  ASSERT_EQ(::waitpid(writer, &status, 0), writer);
  ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  ASSERT_TRUE(message.ok()) << message.status().ToString();
  ASSERT_EQ(message->fds.size(), 1u);
  const auto memory = DeviceMemory::OpenCuda(0);
  ASSERT_TRUE(memory.ok()) << memory.status().ToString();
  const uint64_t piece = std::stoull(message->bytes);
  const auto import = (*memory)->Import(std::move(message->fds.front()), piece);
  ASSERT_TRUE(import.ok()) << import.status().ToString();
  const auto range = (*memory)->Reserve(piece);
  ASSERT_TRUE(range.ok());
  ASSERT_TRUE((*range)->Map(0, **import).ok());
  std::vector<uint64_t> words(1024);
  ASSERT_TRUE(
      (*memory)->CopyToHost((*range)->base(), std::as_writable_bytes(std::span(words))).ok());
  EXPECT_EQ(words, std::vector<uint64_t>(1024, kPattern));
  ::close(sockets[0]);
}

}  // namespace
}  // namespace crumb::client

int main(int argc, char** argv) {
  if (argc == 3 && std::strcmp(argv[1], crumb::client::kWriterArgument) == 0) {
    return crumb::client::RunWriter(std::stoi(argv[2]));
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
