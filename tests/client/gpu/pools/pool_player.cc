// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/client/gpu/pools/pool_player.h"

#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <thread>
#include <utility>

#include "crumb/client.h"
#include "crumb/device_worker.h"
#include "gtest/gtest.h"
#include "tests/client/gpu/device_run.h"
#include "tests/client/sequence_model.h"

extern char** environ;

namespace crumb::client {
namespace {

constexpr auto kPatience = std::chrono::seconds(60);
constexpr int kTokens = 3000;
constexpr int kChunk = 400;
constexpr uint64_t kHandleBytes = 2 << 20;
// Enough slots for all windows of a test's sequence.
constexpr int kBlankPages = 60;
constexpr int kBlankSinks = 4;

class Player {
 public:
  Player(Device& device, std::unique_ptr<Client> client, std::unique_ptr<DeviceWorker> worker,
         std::string outputs)
      : device_(device),
        client_(std::move(client)),
        worker_(std::move(worker)),
        outputs_(std::move(outputs)),
        prompts_(std::make_unique<DeviceRun>(
            device, *worker_, DeviceBatchOptions{.kind = PassKind::kPrompt, .tokens = kChunk})),
        decode_(std::make_unique<DeviceRun>(device, *worker_, DeviceBatchOptions{})) {}

  std::string Do(const std::string& line) {
    std::istringstream in(line);
    std::string verb;
    uint32_t seed = 0;
    int count = 0;
    in >> verb >> seed >> count;
    if (verb == "joined") return Joined();
    if (verb == "begin") return Begin(seed, count);
    if (verb == "play") return Play(seed, count);
    if (verb == "finish") return Finish(seed);
    if (verb == "drop") return sequences_.erase(seed) == 1 ? "ok" : "none";
    if (verb == "flip") return FlipBit(device_, *sequences_.at(seed).sequence, count);
    if (verb == "published") return worker_->WaitPublished(kPatience).ok() ? "ok" : "late";
    if (verb == "pool") return Pool();
    if (verb == "counters") return Counters();
    return "unknown command";
  }

 private:
  struct Playing {
    SequenceModel model;
    int prompt = 0;
    std::unique_ptr<DeviceSequence> sequence;
  };

  std::string Joined() const {
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    while (true) {
      const DevicePoolUse use = worker_->pool_use();
      if (use.joined && use.blank_slots >= kBlankPages + kBlankSinks) return "ok";
      if (std::chrono::steady_clock::now() > deadline) return "late";
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }

  std::string Begin(uint32_t seed, int count) {
    SequenceModel model(worker_->options(), PlayerTokens(seed));
    SequenceOptions options;
    options.deadline = std::chrono::seconds(20);
    auto sequence = worker_->Begin(model.prompt(count), options);
    if (!sequence.ok()) return sequence.status().ToString();
    const SequenceStats stats = (*sequence)->stats();
    sequences_.erase(seed);
    sequences_.emplace(seed, Playing{std::move(model), count, *std::move(sequence)});
    return "cached " + std::to_string(stats.hit_tokens()) + " device " +
           std::to_string(stats.hit_tokens_device) + " host " +
           std::to_string(stats.hit_tokens_host) + " loaded " + std::to_string(stats.loaded_bytes);
  }

  std::string Play(uint32_t seed, int count) {
    Playing& playing = sequences_.at(seed);
    DeviceSequence& sequence = *playing.sequence;
    while (sequence.length() < playing.prompt) {
      const int tokens = std::min(kChunk, sequence.pass_tokens_max());
      const auto pass =
          prompts_->TryPass({{&sequence, &playing.model, sequence.length() + tokens, tokens}});
      if (!pass.ok()) return pass.status().ToString();
    }
    std::ofstream file(outputs_ + std::to_string(seed), std::ios::binary | std::ios::trunc);
    for (int i = 0; i < count; ++i) {
      const auto pass = decode_->TryPass({{&sequence, &playing.model, sequence.length() + 1, 1}});
      if (!pass.ok()) return pass.status().ToString();
      const std::vector<float> out = (*pass)->Outputs(0);
      file.write(reinterpret_cast<const char*>(out.data()),
                 static_cast<std::streamsize>(out.size() * sizeof(float)));
    }
    return file.good() ? "ok" : "no file";
  }

  std::string Finish(uint32_t seed) {
    const absl::Status finished = decode_->batch().Finish(*sequences_.at(seed).sequence);
    sequences_.erase(seed);
    return finished.ok() ? "ok" : finished.ToString();
  }

  std::string Pool() const {
    const DevicePoolUse use = worker_->pool_use();
    return "handles " + std::to_string(use.handles) + " held " + std::to_string(use.held_slots) +
           " demoted " + std::to_string(use.pages_demoted) + " failed " +
           std::to_string(use.demotions_failed) + " out " + std::to_string(use.out_of_slots) +
           " reclaimed " + std::to_string(use.slots_reclaimed);
  }

  std::string Counters() const {
    const WorkerCounters counters = worker_->counters();
    return "pool " + std::to_string(counters.pool_pages) + " published " +
           std::to_string(counters.published_pages) + " verify " +
           std::to_string(counters.verify_failures) + " scrubbed " +
           std::to_string(counters.pages_scrubbed);
  }

  Device& device_;
  const std::unique_ptr<Client> client_;
  const std::unique_ptr<DeviceWorker> worker_;
  const std::string outputs_;
  const std::unique_ptr<DeviceRun> prompts_, decode_;
  std::map<uint32_t, Playing> sequences_;
};

std::string OutputsPath(const PlayerOptions& options) { return options.socket_dir + "/outputs-"; }

int Serve(const PlayerOptions& options, const std::string& outputs, int socket) {
  const std::shared_ptr<Device> device = Platform().open(options.device);
  if (device == nullptr) return 2;
  ClientOptions connection;
  connection.socket_dir = options.socket_dir;
  connection.staging_bytes = 8 << 20;
  connection.backoff_min = std::chrono::milliseconds(5);
  connection.backoff_max = std::chrono::milliseconds(50);
  auto client = Client::Open(connection);
  if (!client.ok()) return 3;
  DeviceWorkerOptions on_device;
  on_device.pages = options.private_pages;
  on_device.sequences = 8;
  on_device.load_pages = 64;
  on_device.pool_bytes = on_device.pool_sink_bytes = options.pool_bytes;
  on_device.pool_handle_bytes = kHandleBytes;
  on_device.pool_blank_pages = kBlankPages;
  on_device.pool_blank_sinks = kBlankSinks;
  on_device.pool_write_through = options.write_through;
  on_device.scrub_pages_per_second = options.scrub;
  WorkerOptions worker_options = Platform().options;
  worker_options.verify_every = static_cast<uint32_t>(options.verify_every);
  if (options.peer >= 0) on_device.pool_peers = {options.peer};
  auto worker = DeviceWorker::Open(worker_options, on_device, client->get(), *device);
  if (!worker.ok()) {
    std::fprintf(stderr, "player: %s\n", worker.status().ToString().c_str());
    return 4;
  }
  {
    Player player(*device, *std::move(client), *std::move(worker), outputs);
    std::string line(4096, '\0');
    while (true) {
      const ssize_t size = ::recv(socket, line.data(), line.size(), 0);
      if (size <= 0) break;
      const std::string response = player.Do(line.substr(0, static_cast<size_t>(size)));
      if (::send(socket, response.data(), response.size(), MSG_NOSIGNAL) < 0) break;
    }
  }
  return testing::UnitTest::GetInstance()->ad_hoc_test_result().Failed() ? 1 : 0;
}

}  // namespace

std::vector<int32_t> PlayerTokens(uint32_t seed) { return RandomTokens(kTokens, 1000 + seed); }

int64_t NumberIn(const std::string& response, const std::string& word) {
  std::istringstream in(response);
  std::string next;
  int64_t number = -1;
  while (in >> next) {
    if (next == word && in >> number) return number;
  }
  return -1;
}

PoolPlayer::PoolPlayer(const PlayerOptions& options)
    : outputs_(OutputsPath(options) + std::to_string(reinterpret_cast<uint64_t>(this)) + "-") {
  int sockets[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) != 0) return;
  socket_ = sockets[0];
  const std::string fd = std::to_string(::dup(sockets[1]));  // has no close-on-exec
  ::close(sockets[1]);
  const std::string device = std::to_string(options.device), peer = std::to_string(options.peer);
  const std::string bytes = std::to_string(options.pool_bytes);
  const std::string pages = std::to_string(options.private_pages);
  const std::string scrub = std::to_string(options.scrub);
  const std::string every = std::to_string(options.verify_every);
  const char* arguments[] = {"pool_player",    "--pool-player",
                             fd.c_str(),       options.socket_dir.c_str(),
                             outputs_.c_str(), device.c_str(),
                             peer.c_str(),     bytes.c_str(),
                             pages.c_str(),    options.write_through ? "1" : "0",
                             scrub.c_str(),    every.c_str(),
                             nullptr};
  ::posix_spawn(&pid_, "/proc/self/exe", nullptr, nullptr, const_cast<char**>(arguments), environ);
  ::close(std::stoi(fd));
}

PoolPlayer::~PoolPlayer() { Kill(); }

std::string PoolPlayer::Do(const std::string& command) {
  std::string response(4096, '\0');
  if (::send(socket_, command.data(), command.size(), MSG_NOSIGNAL) < 0) return "";
  const ssize_t size = ::recv(socket_, response.data(), response.size(), 0);
  response.resize(size > 0 ? static_cast<size_t>(size) : 0);
  return response;
}

std::vector<float> PoolPlayer::OutputsOf(uint32_t seed) const {
  std::ifstream file(outputs_ + std::to_string(seed), std::ios::binary | std::ios::ate);
  std::vector<float> outputs(file ? static_cast<size_t>(file.tellg()) / sizeof(float) : 0);
  file.seekg(0);
  file.read(reinterpret_cast<char*>(outputs.data()),
            static_cast<std::streamsize>(outputs.size() * sizeof(float)));
  return outputs;
}

void PoolPlayer::Kill() {
  if (socket_ >= 0) ::close(std::exchange(socket_, -1));
  if (pid_ < 0) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(std::exchange(pid_, -1), nullptr, 0);
}

int PoolPlayer::Stop() {
  ::close(std::exchange(socket_, -1));
  int status = 0;
  ::waitpid(std::exchange(pid_, -1), &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

int RunPoolPlayer(int argc, char** argv) {
  if (argc != 12 || std::strcmp(argv[1], "--pool-player") != 0) return -1;
  PlayerOptions options;
  options.socket_dir = argv[3];
  options.device = std::stoi(argv[5]);
  options.peer = std::stoi(argv[6]);
  options.pool_bytes = std::stoull(argv[7]);
  options.private_pages = std::stoi(argv[8]);
  options.write_through = std::strcmp(argv[9], "1") == 0;
  options.scrub = std::stoi(argv[10]);
  options.verify_every = std::stoi(argv[11]);
  return Serve(options, argv[4], std::stoi(argv[2]));
}

}  // namespace crumb::client
