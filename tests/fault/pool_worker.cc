// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/fault/pool_worker.h"

#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <sstream>
#include <thread>
#include <utility>

#include "client/gpu/pools/device_pool.h"
#include "tests/fault/known_pages.h"

extern char** environ;

namespace crumb::fault {
namespace {

constexpr auto kWait = std::chrono::seconds(20);
constexpr uint64_t kHandleBytes = 2 << 20;

std::byte* BytesAt(client::DeviceAddress address) { return reinterpret_cast<std::byte*>(address); }

class Worker {
 public:
  Worker(std::unique_ptr<client::Client> client, KnownPages pages, client::DevicePool* pool)
      : client_(std::move(client)), pages_(std::move(pages)), pool_(pool) {}

  std::string Do(const std::string& line) {
    std::istringstream in(line);
    std::string verb;
    uint64_t first = 0;
    uint64_t second = 0;
    in >> verb >> first >> second;
    if (verb == "wait") return pool_->WaitBlank(static_cast<int>(first), kWait) ? "ok" : "late";
    if (verb == "write") return Write(first);
    if (verb == "commit") return Commit(first);
    if (verb == "acquire") return Acquire(first, second, true);
    if (verb == "take") return Acquire(first, second, false);
    if (verb == "taken") return Taken();
    if (verb == "check") return Right(first, written_.at(first)->address()) ? "right" : "wrong";
    if (verb == "free") return written_.erase(first) == 1 ? "ok" : "none";
    if (verb == "joined") return Joined();
    if (verb == "handles") return std::to_string(pool_->stats().handles);
    if (verb == "reclaimed") return std::to_string(pool_->stats().slots_reclaimed);
    if (verb == "demoted") return std::to_string(pool_->stats().pages_demoted);
    if (verb == "open") return Open();
    if (verb == "fds") return std::to_string(CountFds());
    if (verb == "maps") return std::to_string(CountMaps());
    if (verb != "release") return "unknown command";
    held_.clear();
    return "ok";
  }

  void LetGo() {
    written_.clear();
    held_.clear();
  }

 private:
  bool Right(uint64_t page, client::DeviceAddress address) const {
    const auto expected = pages_.Fragment(page);
    return std::memcmp(BytesAt(address), expected.data(), pages_.tiles_bytes()) == 0;
  }

  std::string Write(uint64_t page) {
    auto slot = pool_->TakeBlank();
    if (slot == nullptr) return "none";
    const auto bytes = pages_.Fragment(page);
    std::memcpy(BytesAt(slot->address()), bytes.data(), pages_.tiles_bytes());
    written_[page] = slot;
    return "slot " + std::to_string(slot->number());
  }

  std::string Commit(uint64_t page) {
    const auto bytes = pages_.Fragment(page);
    const client::DevicePool::Fragment fragment = {
        written_.at(page),
        DecodeFragmentHeader(std::span(bytes).subspan(pages_.tiles_bytes())).value()};
    const auto outcomes = pool_->Commit(pages_.keyspace().id, std::span(&fragment, 1), kWait);
    if (!outcomes.ok()) return outcomes.status().ToString();
    return std::to_string(static_cast<int>(outcomes->front()));
  }

  std::string Acquire(uint64_t first, uint64_t end, bool sums) {
    std::vector<PageKey> keys;
    for (uint64_t page = first; page < end; ++page) keys.push_back(pages_.Key(page));
    client::AcquireRequest request;
    request.keyspace = pages_.keyspace().id;
    request.generation = pages_.keyspace().generation;
    request.keys = keys;
    request.timeout = kWait;
    request.verify_every = 1;
    request.device_sums = sums;
    if (pool_->id() != client::PoolId()) request.pools = {pool_->id()};
    const auto result = client_->Acquire(request);
    if (!result.ok()) return result.status().ToString();
    size_t on_device = 0;
    size_t right = 0;
    if (result->lease != nullptr) {
      for (const client::DeviceFragment& fragment : result->lease->device_fragments()) {
        ++on_device;
        const client::DeviceFragment* const one = &fragment;
        const auto slots = pool_->Hold({&one, 1}, result->lease);
        if (!slots.ok()) continue;
        const auto& slot = slots->front();
        const uint64_t page = first + static_cast<uint64_t>(fragment.page);
        if (Right(page, slot->address())) ++right;
        held_.push_back({page, slot});
      }
    }
    return "hits " + std::to_string(result->hit_pages) + " device " + std::to_string(on_device) +
           " right " + std::to_string(right);
  }

  std::string Taken() const {
    const auto right = std::count_if(held_.begin(), held_.end(), [this](const auto& held) {
      return Right(held.first, held.second->address());
    });
    return std::to_string(right) + " of " + std::to_string(held_.size());
  }

  std::string Joined() const {
    const auto deadline = std::chrono::steady_clock::now() + kWait;
    while (pool_->id() == client::PoolId()) {
      if (std::chrono::steady_clock::now() > deadline) return "late";
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    return "ok";
  }

  std::string Open() {
    auto pages = KnownPages::Open(*client_);
    if (!pages.ok()) return pages.status().ToString();
    pages_ = *std::move(pages);
    return "ok";
  }

  static size_t CountFds() {
    size_t count = 0;
    for ([[maybe_unused]] const auto& entry :
         std::filesystem::directory_iterator("/proc/self/fd")) {
      ++count;
    }
    return count;
  }

  static size_t CountMaps() {
    std::ifstream maps("/proc/self/maps");
    size_t count = 0;
    for (std::string line; std::getline(maps, line);) {
      if (line.find("memfd:crumb-device") != std::string::npos) ++count;
    }
    return count;
  }

  const std::unique_ptr<client::Client> client_;
  KnownPages pages_;
  client::DevicePool* const pool_;
  std::map<uint64_t, std::shared_ptr<const client::DeviceSlot>> written_;
  // By page, of leases.
  std::vector<std::pair<uint64_t, std::shared_ptr<const client::DeviceSlot>>> held_;
};

int Serve(const PoolWorkerOptions& options, int socket) {
  client::ClientOptions connection;
  connection.socket_dir = options.socket_dir;
  connection.process_name = options.name;
  connection.token = options.token;
  connection.backoff_min = std::chrono::milliseconds(5);
  connection.backoff_max = std::chrono::milliseconds(50);
  if (!options.demotes) connection.staging_bytes = 0;
  auto client = client::Client::Open(connection);
  if (!client.ok()) return 2;
  auto pages = KnownPages::Open(**client);
  if (!pages.ok()) return 3;
  const auto memory = client::DeviceMemory::OpenHost({.name = options.device});
  client::DevicePoolOptions pool_options;
  pool_options.slot_bytes = pages->tiles_bytes();
  pool_options.handle_bytes = kHandleBytes;
  pool_options.bytes_max = options.bytes_max;
  pool_options.range_bytes = uint64_t{1} << 30;
  pool_options.blank_slots = options.blank_slots;
  auto pool = client::DevicePool::Open(pool_options, *memory, **client);
  if (!pool.ok()) return 4;
  Worker worker(*std::move(client), *std::move(pages), pool->get());
  std::string line(4096, '\0');
  while (true) {
    const ssize_t size = ::recv(socket, line.data(), line.size(), 0);
    if (size <= 0) break;
    const std::string response = worker.Do(line.substr(0, static_cast<size_t>(size)));
    if (::send(socket, response.data(), response.size(), MSG_NOSIGNAL) < 0) break;
  }
  worker.LetGo();
  pool->reset();
  return 0;
}

}  // namespace

PoolWorker::PoolWorker(const PoolWorkerOptions& options) {
  int sockets[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) != 0) return;
  socket_ = sockets[0];
  const std::string fd = std::to_string(::dup(sockets[1]));  // dup clears close-on-exec
  ::close(sockets[1]);
  const std::string bytes = std::to_string(options.bytes_max);
  const std::string blanks = std::to_string(options.blank_slots);
  const char* arguments[] = {"pool_worker",
                             "--pool-worker",
                             fd.c_str(),
                             options.socket_dir.c_str(),
                             options.name.c_str(),
                             options.device.c_str(),
                             options.token.c_str(),
                             bytes.c_str(),
                             blanks.c_str(),
                             options.demotes ? "1" : "0",
                             nullptr};
  ::posix_spawn(&pid_, "/proc/self/exe", nullptr, nullptr, const_cast<char**>(arguments), environ);
  ::close(std::stoi(fd));
}

PoolWorker::~PoolWorker() { Kill(); }

std::string PoolWorker::Do(const std::string& command) {
  std::string response(4096, '\0');
  if (::send(socket_, command.data(), command.size(), MSG_NOSIGNAL) < 0) return "";
  const ssize_t size = ::recv(socket_, response.data(), response.size(), 0);
  response.resize(size > 0 ? static_cast<size_t>(size) : 0);
  return response;
}

void PoolWorker::Kill() {
  if (socket_ >= 0) ::close(std::exchange(socket_, -1));
  if (pid_ < 0) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(std::exchange(pid_, -1), nullptr, 0);
}

int PoolWorker::Stop() {
  ::close(std::exchange(socket_, -1));
  int status = 0;
  ::waitpid(std::exchange(pid_, -1), &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

int RunPoolWorker(int argc, char** argv) {
  if (argc != 10 || std::strcmp(argv[1], "--pool-worker") != 0) return -1;
  PoolWorkerOptions options;
  options.socket_dir = argv[3];
  options.name = argv[4];
  options.device = argv[5];
  options.token = argv[6];
  options.bytes_max = std::stoull(argv[7]);
  options.blank_slots = std::stoi(argv[8]);
  options.demotes = std::strcmp(argv[9], "1") == 0;
  return Serve(options, std::stoi(argv[2]));
}

}  // namespace crumb::fault
