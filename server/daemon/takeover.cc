// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/daemon/takeover.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <span>
#include <utility>
#include <vector>

#include "common/errno_status.h"
#include "common/fd_channel.h"
#include "common/logging.h"
#include "common/mapping.h"
#include "common/status_macros.h"
#include "crumb/v1/takeover.pb.h"
#include "fmt/format.h"

namespace crumb::server {
namespace {

// A successor sends its request right after it has connected.
constexpr Duration kRequestTimeout = std::chrono::seconds(5);
constexpr char kServes = 's';

// A path that does not depend on how it is written.
std::string Canonical(const std::string& path) {
  if (path.empty()) return path;
  std::error_code error;
  const auto canonical = std::filesystem::weakly_canonical(path, error);
  return error ? path : canonical.string();
}

// kUnavailable: the other process has ended; kDeadlineExceeded: it says nothing.
absl::StatusOr<FdMessage> Receive(int socket, const char* what) {
  absl::StatusOr<FdMessage> message = ReceiveFdMessage(socket);
  if (message.ok() || absl::IsInvalidArgument(message.status())) return message;
  const std::string why = fmt::format("{}: {}", what, std::string(message.status().message()));
  // ErrnoStatus makes this of EAGAIN, by which a socket's timeout shows.
  const bool timed_out =
      absl::IsUnavailable(message.status()) && message.status().message() != "closed by the peer";
  return timed_out ? absl::DeadlineExceededError(why) : absl::UnavailableError(why);
}

// kUnavailable: the other process has ended.
absl::Status Send(int socket, const std::string& bytes, std::span<const int> fds = {}) {
  const absl::Status sent = SendFdMessage(socket, bytes, fds);
  if (sent.ok() || absl::IsInvalidArgument(sent)) return sent;
  return absl::UnavailableError(std::string(sent.message()));
}

absl::StatusOr<UniqueFd> FileOf(const std::string& image) {
  CRUMB_ASSIGN_OR_RETURN(UniqueFd fd, CreateMemfd("crumb-host-image", image.size()));
  for (size_t written = 0; written < image.size();) {
    const ssize_t more = ::pwrite(fd.get(), image.data() + written, image.size() - written,
                                  static_cast<off_t>(written));
    if (more < 0 && errno != EINTR) return ErrnoStatus(errno, "writing the image of host memory");
    written += static_cast<size_t>(std::max<ssize_t>(more, 0));
  }
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_WRITE) != 0) {
    return ErrnoStatus(errno, "sealing the image of host memory");
  }
  return fd;
}

absl::StatusOr<storage::HostImage> ReadImage(int fd, uint64_t bytes) {
  struct stat status;
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (::fstat(fd, &status) != 0 || static_cast<uint64_t>(status.st_size) != bytes || bytes == 0 ||
      seals < 0 || (seals & F_SEAL_SHRINK) == 0 || (seals & F_SEAL_WRITE) == 0) {
    return absl::DataLossError(
        fmt::format("the predecessor's image of host memory must be a sealed file of {} bytes, and "
                    "is not: the memory is not taken over",
                    bytes));
  }
  CRUMB_ASSIGN_OR_RETURN(const Mapping mapping, Mapping::Of(fd, bytes, Mapping::Access::kReadOnly));
  return storage::DecodeHostImage(mapping.bytes());
}

absl::StatusOr<std::unique_ptr<storage::HandedOverMemory>> ReceiveMemory(int socket) {
  CRUMB_ASSIGN_OR_RETURN(FdMessage first, Receive(socket, "waiting for the memory"));
  v1::TakeoverMemory announced;
  if (!announced.ParseFromString(first.bytes)) {
    return absl::DataLossError(
        "the predecessor's announcement of its memory is malformed: its version may not support a "
        "takeover by this one; stop it and start crumbd without --takeover");
  }
  const size_t expected = size_t{announced.slabs()} + 1;
  while (first.fds.size() < expected) {
    CRUMB_ASSIGN_OR_RETURN(FdMessage more, Receive(socket, "waiting for slabs"));
    if (more.fds.empty()) break;
    for (UniqueFd& fd : more.fds) first.fds.push_back(std::move(fd));
  }
  if (first.fds.size() != expected) {
    return absl::DataLossError(
        fmt::format("{} descriptors were announced and {} sent", expected, first.fds.size()));
  }
  auto memory = std::make_unique<storage::HandedOverMemory>();
  CRUMB_ASSIGN_OR_RETURN(memory->image,
                         ReadImage(first.fds.front().get(), announced.image_bytes()));
  if (memory->image.slabs != announced.slabs()) {
    return absl::DataLossError(
        fmt::format("the predecessor announced {} slabs, its image of host memory has {}: the "
                    "memory is not taken over",
                    announced.slabs(), memory->image.slabs));
  }
  memory->slabs.assign(std::make_move_iterator(first.fds.begin() + 1),
                       std::make_move_iterator(first.fds.end()));
  return memory;
}

}  // namespace

std::string TakeoverSocket(const Options& options) {
  return options.listen.socket_dir + "/crumbd.takeover.sock";
}

TakeoverListener::TakeoverListener(const Options& options, std::function<void()> requested)
    : path_(TakeoverSocket(options)),
      ssd_path_(Canonical(options.store.ssd.path)),
      requested_(std::move(requested)) {}

absl::StatusOr<std::unique_ptr<TakeoverListener>> TakeoverListener::Start(
    const Options& options, std::function<void()> requested) {
  std::unique_ptr<TakeoverListener> listener(new TakeoverListener(options, std::move(requested)));
  listener->wake_ = UniqueFd(::eventfd(0, EFD_CLOEXEC));
  if (!listener->wake_.valid()) return ErrnoStatus(errno, "eventfd");
  CRUMB_ASSIGN_OR_RETURN(listener->listener_, ListenFdChannel(listener->path_));
  if (::chmod(listener->path_.c_str(), 0600) != 0) {
    return ErrnoStatus(errno, "setting the mode of " + listener->path_);
  }
  listener->thread_ = Thread("crumb-takeover", [raw = listener.get()] { raw->Run(); });
  return listener;
}

TakeoverListener::~TakeoverListener() {
  if (listener_.valid()) ::unlink(path_.c_str());
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof(one));
  thread_.Join();
}

UniqueFd TakeoverListener::TakeSuccessor() {
  MutexLock lock(&mutex_);
  return std::move(successor_);
}

void TakeoverListener::Run() {
  while (true) {
    std::array<pollfd, 2> waits = {pollfd{wake_.get(), POLLIN, 0},
                                   pollfd{listener_.get(), POLLIN, 0}};
    if (::poll(waits.data(), waits.size(), -1) < 0 && errno != EINTR) return;
    if (waits[0].revents != 0) return;
    if (waits[1].revents == 0) continue;
    UniqueFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!socket.valid()) continue;
    const absl::Status status = Examine(socket.get());
    v1::TakeoverResponse response;
    response.set_error(std::string(status.message()));
    const absl::Status sent = SendFdMessage(socket.get(), response.SerializeAsString() + '\0', {});
    if (!status.ok() || !sent.ok()) {
      LogWarning("a takeover is refused: {}", (status.ok() ? sent : status).ToString());
      continue;
    }
    {
      MutexLock lock(&mutex_);
      successor_ = std::move(socket);
    }
    return requested_();
  }
}

absl::Status TakeoverListener::Examine(int socket) const {
  CRUMB_RETURN_IF_ERROR(SetSocketTimeout(socket, kRequestTimeout));
  CRUMB_ASSIGN_OR_RETURN(const PeerCredentials peer, CredentialsOf(socket));
  if (peer.uid != ::geteuid()) {
    return absl::FailedPreconditionError(
        fmt::format("crumbd runs as user {}, its successor as {}", ::geteuid(), peer.uid));
  }
  CRUMB_ASSIGN_OR_RETURN(const FdMessage message, ReceiveFdMessage(socket));
  v1::TakeoverRequest request;
  if (!request.ParseFromString(message.bytes) || !message.fds.empty()) {
    return absl::InvalidArgumentError("that was no TakeoverRequest");
  }
  if (request.image_version() < storage::kHostImageVersion) {
    return absl::FailedPreconditionError(
        fmt::format("the successor reads images of version {}, this crumbd writes {}: stop it and "
                    "start the other",
                    request.image_version(), storage::kHostImageVersion));
  }
  if (Canonical(request.ssd_path()) != ssd_path_) {
    return absl::FailedPreconditionError(
        fmt::format("store.ssd.path is '{}' here and '{}' at the successor: stop this crumbd and "
                    "start the other",
                    ssd_path_, request.ssd_path()));
  }
  return absl::OkStatus();
}

absl::StatusOr<int> HandMemoryOver(int successor, const storage::HandedOverMemory& memory,
                                   Duration timeout) {
  CRUMB_RETURN_IF_ERROR(SetSocketTimeout(successor, timeout));
  const std::string image = storage::EncodeHostImage(memory.image);
  CRUMB_ASSIGN_OR_RETURN(const UniqueFd file, FileOf(image));
  v1::TakeoverMemory announced;
  announced.set_image_bytes(image.size());
  announced.set_slabs(memory.image.slabs);
  std::vector<int> fds = {file.get()};
  for (const UniqueFd& slab : memory.slabs) fds.push_back(slab.get());
  std::string bytes = announced.SerializeAsString();
  for (size_t sent = 0; sent < fds.size();) {
    const size_t count = std::min(fds.size() - sent, kFdsPerMessageMax);
    CRUMB_RETURN_IF_ERROR(Send(successor, bytes, std::span<const int>(fds).subspan(sent, count)));
    sent += count;
    bytes.assign(1, '\0');
  }
  CRUMB_ASSIGN_OR_RETURN(const FdMessage word, Receive(successor, "waiting for the successor"));
  if (word.bytes != std::string(1, kServes)) {
    return absl::DataLossError("the successor says something else than that it serves");
  }
  CRUMB_ASSIGN_OR_RETURN(const PeerCredentials peer, CredentialsOf(successor));
  return peer.pid;
}

absl::StatusOr<Takeover> TakeOver(const Options& options, Duration timeout) {
  Takeover takeover;
  absl::StatusOr<UniqueFd> connected = ConnectFdChannel(TakeoverSocket(options));
  if (!connected.ok()) return absl::NotFoundError(std::string(connected.status().message()));
  takeover.predecessor = *std::move(connected);
  const int socket = takeover.predecessor.get();
  CRUMB_RETURN_IF_ERROR(SetSocketTimeout(socket, timeout));
  CRUMB_ASSIGN_OR_RETURN(const PeerCredentials peer, CredentialsOf(socket));
  if (peer.uid != ::geteuid()) {
    return absl::FailedPreconditionError(fmt::format(
        "the crumbd that runs is user {}'s, this one user {}'s", peer.uid, ::geteuid()));
  }
  v1::TakeoverRequest request;
  request.set_image_version(storage::kHostImageVersion);
  request.set_ssd_path(Canonical(options.store.ssd.path));
  CRUMB_RETURN_IF_ERROR(Send(socket, request.SerializeAsString()));
  CRUMB_ASSIGN_OR_RETURN(const FdMessage message, Receive(socket, "waiting for a response"));
  v1::TakeoverResponse response;
  // The zero byte at the end keeps an empty response from being no message.
  if (message.bytes.empty() ||
      !response.ParseFromArray(message.bytes.data(), static_cast<int>(message.bytes.size()) - 1)) {
    return absl::FailedPreconditionError(
        "the crumbd that runs sent a response that this one cannot read");
  }
  if (!response.error().empty()) {
    return absl::FailedPreconditionError("the crumbd that runs refuses and goes on: " +
                                         response.error());
  }
  absl::StatusOr<std::unique_ptr<storage::HandedOverMemory>> memory = ReceiveMemory(socket);
  if (memory.ok()) {
    takeover.memory = *std::move(memory);
  } else if (absl::IsDataLoss(memory.status()) || absl::IsFailedPrecondition(memory.status())) {
    LogWarning("host memory starts empty: {}", memory.status().ToString());
  } else {
    return memory.status();
  }
  return takeover;
}

absl::Status ConfirmTakeover(Takeover takeover, Duration timeout) {
  const int socket = takeover.predecessor.get();
  CRUMB_RETURN_IF_ERROR(SetSocketTimeout(socket, timeout));
  absl::Status ended = Send(socket, std::string(1, kServes));
  if (ended.ok()) ended = Receive(socket, "waiting for the end of the predecessor").status();
  return absl::IsUnavailable(ended) ? absl::OkStatus() : ended;
}

}  // namespace crumb::server
