// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Both ends of crumbd.takeover.sock. The first byte says which end the input is sent to: the crumbd
// that runs gets one message of a successor; a successor gets the messages of the crumbd that it
// takes over from. A message is a byte that says which descriptors come along, the size in two
// bytes, and the bytes.
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <string>
#include <thread>

#include "common/fd_channel.h"
#include "common/mapping.h"
#include "crumb/v1/takeover.pb.h"
#include "server/daemon/takeover.h"
#include "tests/common/temporary_folder.h"
#include "tests/fuzz/fuzz_target.h"

namespace crumb::fuzz {
namespace {

using namespace server;

enum class End : unsigned char { kPredecessor, kSuccessor, kEnds };
enum class Files : unsigned char { kNone, kSealed, kUnsealed, kSlab, kPipe, kKinds };
constexpr size_t kMessagesMax = 8;
constexpr Duration kPatience = std::chrono::seconds(5);

const Options& OptionsOf() {
  static const TemporaryFolder folder;
  static const Options options = [] {
    Options made;
    made.listen.socket_dir = folder.path();
    made.store.ssd.path = folder.path() + "/ssd";
    return made;
  }();
  return options;
}

storage::HostImage Image() {
  storage::HostImage image;
  image.slab_bytes = 1 << 20;
  image.slabs = 1;
  image.records = {{"name", "value"}};
  return image;
}

// The image as a predecessor sends it; its content does not follow from the input, since the target
// host_image is about that.
UniqueFd ImageFile(bool sealed) {
  const std::string image = storage::EncodeHostImage(Image());
  UniqueFd file = CreateMemfd("fuzz-image", image.size()).value();
  Check(::pwrite(file.get(), image.data(), image.size(), 0) == static_cast<ssize_t>(image.size()));
  if (sealed) {
    Check(::fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE) == 0);
  }
  return file;
}

UniqueFd FileOf(Files files) {
  switch (files) {
    case Files::kSealed:
      return ImageFile(true);
    case Files::kUnsealed:
      return ImageFile(false);
    case Files::kSlab:
      return CreateMemfd("fuzz-slab", 4096).value();
    case Files::kPipe:
      return UniqueFd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    default:
      return {};
  }
}

// Sends messages of the input, as far as the other end takes them.
void SendMessages(int socket, const std::string& bytes, size_t messages_max) {
  size_t messages = 0;
  for (size_t at = 0; at + 3 <= bytes.size() && messages < messages_max; ++messages) {
    const auto files = static_cast<unsigned char>(bytes[at]);
    const size_t size = static_cast<uint8_t>(bytes[at + 1]) |
                        static_cast<size_t>(static_cast<uint8_t>(bytes[at + 2])) << 8;
    const std::string message = bytes.substr(at + 3, size);
    const UniqueFd file = FileOf(static_cast<Files>(files % static_cast<unsigned>(Files::kKinds)));
    const int fds[] = {file.get()};
    const auto sent = SendFdMessage(socket, message, std::span(fds, file.valid() ? 1 : 0));
    if (!sent.ok()) return;
    at += 3 + size;
  }
}

// The crumbd that runs: it hands over to a successor that sends a valid request, and to no other.
void RunPredecessor(const std::string& bytes) {
  std::atomic<bool> requested{false};
  auto listener = TakeoverListener::Start(OptionsOf(), [&] { requested = true; });
  Check(listener.ok());
  {
    const UniqueFd successor = ConnectFdChannel(TakeoverSocket(OptionsOf())).value();
    // A second one that is not read would take the response away.
    SendMessages(successor.get(), bytes, 1);
    Check(::shutdown(successor.get(), SHUT_WR) == 0);
    const auto response = ReceiveFdMessage(successor.get());
    Check(response.ok() && !response->bytes.empty() && response->fds.empty());
    v1::TakeoverResponse parsed;
    Check(parsed.ParseFromString(response->bytes.substr(0, response->bytes.size() - 1)));
    const UniqueFd taken = (*listener)->TakeSuccessor();
    Check(!taken.valid() || parsed.error().empty());
  }
  listener->reset();
  Check(!requested || bytes.size() > 3);
}

// A successor: it takes a whole image, or none.
void RunSuccessor(const std::string& bytes) {
  const UniqueFd listener = ListenFdChannel(TakeoverSocket(OptionsOf())).value();
  std::thread predecessor([&] {
    const UniqueFd successor(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    Check(ReceiveFdMessage(successor.get()).ok());
    SendMessages(successor.get(), bytes, kMessagesMax);
  });
  const auto taken = TakeOver(OptionsOf(), kPatience);
  predecessor.join();
  ::unlink(TakeoverSocket(OptionsOf()).c_str());
  if (!taken.ok() || taken->memory == nullptr) return;
  Check(taken->memory->image == Image());
  Check(taken->memory->slabs.size() == taken->memory->image.slabs);
  for (const UniqueFd& slab : taken->memory->slabs) Check(slab.valid());
}

void Run(std::span<const std::byte> input) {
  const std::string bytes = TextOf(input);
  if (bytes.empty()) return;
  const auto end = static_cast<unsigned char>(bytes.front()) % static_cast<unsigned>(End::kEnds);
  if (static_cast<End>(end) == End::kPredecessor) return RunPredecessor(bytes.substr(1));
  RunSuccessor(bytes.substr(1));
}

std::string Message(Files files, const std::string& bytes) {
  return std::string{static_cast<char>(files), static_cast<char>(bytes.size() & 255),
                     static_cast<char>(bytes.size() >> 8)} +
         bytes;
}

std::vector<std::string> Seeds() {
  const std::string to_predecessor(1, static_cast<char>(End::kPredecessor));
  const std::string to_successor(1, static_cast<char>(End::kSuccessor));
  v1::TakeoverRequest request;
  request.set_image_version(storage::kHostImageVersion);
  request.set_ssd_path(std::filesystem::weakly_canonical(OptionsOf().store.ssd.path).string());
  v1::TakeoverResponse refusal;
  refusal.set_error("no");
  v1::TakeoverMemory memory;
  memory.set_image_bytes(storage::EncodeHostImage(Image()).size());
  memory.set_slabs(1);
  const std::string yes = Message(Files::kNone, std::string(1, '\0'));
  const std::string announced = memory.SerializeAsString();
  const std::string zero(1, '\0');
  return {to_predecessor + Message(Files::kNone, request.SerializeAsString()),
          to_successor + Message(Files::kNone, refusal.SerializeAsString() + zero),
          to_successor + yes + Message(Files::kSealed, announced) + Message(Files::kSlab, zero),
          to_successor + yes + Message(Files::kUnsealed, announced) + Message(Files::kSlab, zero),
          to_successor + yes + Message(Files::kPipe, announced)};
}

}  // namespace

const FuzzTarget kTakeoverTarget = {"takeover", Run, Seeds};

}  // namespace crumb::fuzz
