// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/raw_limits.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "bench/measure.h"
#include "common/errno_status.h"
#include "common/status_macros.h"
#include "common/thread.h"
#include "common/unique_fd.h"

namespace crumb::bench {
namespace {

constexpr size_t kDirectAlignment = 4096;
constexpr size_t kSocketPieceBytes = 256 << 10;

// Repeats `pass`, which moves `bytes`, for a time.
double GbPerS(size_t bytes, Duration duration, const std::function<void()>& pass) {
  const TimePoint begin = Clock::Real().Now();
  uint64_t passes = 0;
  do {
    pass();
    ++passes;
  } while (Clock::Real().Now() - begin < duration && !Interrupted());
  return static_cast<double>(passes * bytes) / ToSeconds(Clock::Real().Now() - begin) * 1e-9;
}

// The ends of a TCP connection over the loopback address.
absl::StatusOr<std::pair<UniqueFd, UniqueFd>> LoopbackPair() {
  const UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  UniqueFd client(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (::bind(listener.get(), generic, size) != 0 || ::listen(listener.get(), 1) != 0 ||
      ::getsockname(listener.get(), generic, &size) != 0 ||
      ::connect(client.get(), generic, size) != 0) {
    return ErrnoStatus(errno, "loopback connection");
  }
  UniqueFd server(::accept(listener.get(), nullptr, nullptr));
  if (!server.valid()) return ErrnoStatus(errno, "accept");
  return std::pair(std::move(client), std::move(server));
}

struct Piece {
  int fd = -1;
  off_t offset = 0;
};

struct OpenFiles {
  std::vector<UniqueFd> fds;
  std::vector<Piece> pieces;
};

absl::StatusOr<OpenFiles> OpenPieces(const DirectReadOptions& options) {
  OpenFiles files;
  std::error_code error;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(options.folder, error)) {
    if (!entry.is_regular_file() || entry.file_size() < options.piece_bytes) continue;
    UniqueFd fd(::open(entry.path().c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC));
    if (!fd.valid()) return ErrnoStatus(errno, entry.path().string());
    const uint64_t whole = entry.file_size() / options.piece_bytes;
    for (uint64_t i = 0; i < whole; ++i) {
      if (files.pieces.size() * options.piece_bytes >= options.bytes_max) break;
      files.pieces.push_back({fd.get(), static_cast<off_t>(i * options.piece_bytes)});
    }
    files.fds.push_back(std::move(fd));
  }
  if (error) return ErrnoStatus(error.value(), options.folder);
  if (files.pieces.empty()) {
    return absl::NotFoundError(options.folder + " has no file that is as large as a piece");
  }
  return files;
}

}  // namespace

double MemoryReadGbPerS(size_t bytes, Duration duration) {
  const std::vector<std::byte> buffer(bytes, std::byte{1});
  uint64_t sum = 0;
  const double rate = GbPerS(bytes, duration, [&] { sum += TouchBytes(buffer); });
  KeepResult(sum);
  return rate;
}

double MemoryCopyGbPerS(size_t bytes, Duration duration) {
  const std::vector<std::byte> from(bytes, std::byte{1});
  std::vector<std::byte> to(bytes);
  return GbPerS(bytes, duration, [&] {
    std::memcpy(to.data(), from.data(), bytes);
    KeepResult(static_cast<uint64_t>(to[bytes / 2]));
  });
}

absl::StatusOr<double> LoopbackTcpGbPerS(Duration duration) {
  CRUMB_ASSIGN_OR_RETURN(auto ends, LoopbackPair());
  Thread sender("loopback-send", [fd = std::move(ends.first), duration] {
    const std::vector<std::byte> piece(kSocketPieceBytes);
    const TimePoint end = Clock::Real().Now() + duration;
    while (Clock::Real().Now() < end && !Interrupted()) {
      if (::send(fd.get(), piece.data(), piece.size(), MSG_NOSIGNAL) <= 0) return;
    }
  });
  std::vector<std::byte> piece(kSocketPieceBytes);
  const TimePoint begin = Clock::Real().Now();
  uint64_t received = 0;
  for (;;) {
    const ssize_t size = ::recv(ends.second.get(), piece.data(), piece.size(), 0);
    if (size <= 0) break;
    received += static_cast<uint64_t>(size);
  }
  return static_cast<double>(received) / ToSeconds(Clock::Real().Now() - begin) * 1e-9;
}

absl::StatusOr<double> DirectReadGbPerS(const DirectReadOptions& options) {
  CRUMB_ASSIGN_OR_RETURN(const OpenFiles files, OpenPieces(options));
  std::atomic<size_t> next{0};
  std::atomic<int> failure{0};
  const TimePoint begin = Clock::Real().Now();
  {
    std::vector<Thread> readers;
    for (int i = 0; i < options.depth; ++i) {
      readers.emplace_back("direct-read", [&] {
        const std::unique_ptr<void, decltype(&std::free)> buffer(
            std::aligned_alloc(kDirectAlignment, options.piece_bytes), &std::free);
        for (size_t at; (at = next.fetch_add(1)) < files.pieces.size() && !Interrupted();) {
          const Piece& piece = files.pieces[at];
          if (::pread(piece.fd, buffer.get(), options.piece_bytes, piece.offset) < 0) {
            failure = errno;
          }
        }
      });
    }
  }
  if (failure != 0) return ErrnoStatus(failure, "read in " + options.folder);
  const double bytes = static_cast<double>(files.pieces.size() * options.piece_bytes);
  return bytes / ToSeconds(Clock::Real().Now() - begin) * 1e-9;
}

}  // namespace crumb::bench
