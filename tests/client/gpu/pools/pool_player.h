// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "client/gpu/device/device.h"
#include "crumb/worker_options.h"

namespace crumb::client {

// The devices on which the tests of device pools run. Each program defines its own.
struct PlayerPlatform {
  // Opens device `ordinal`, which can read the memory of the others; null: there is no such device.
  std::function<std::shared_ptr<Device>(int ordinal)> open;
  WorkerOptions options;
  // Returns the free bytes of device 0; not set if they cannot be determined.
  std::function<uint64_t()> free_bytes = nullptr;
  // bound on ||got - expected|| / ||expected|| against the CPU worker's outputs
  double error_max = 0.0;
};
const PlayerPlatform& Platform();

// Options of a player.
struct PlayerOptions {
  std::string socket_dir;
  int device = 0;
  int peer = -1;                  // a device whose pools it reads; -1: none
  uint64_t pool_bytes = 8 << 20;  // size of the pool of pages, and of that of sinks
  bool write_through = false;     // pages are copied to crumbd's memory at once
  int private_pages = 64;         // slots besides the pool
  int scrub = 0;                  // pages that are scrubbed per second
  int verify_every = 64;          // one of so many pages of a prefix is verified
};

// Returns the tokens of all sequences with number `seed`.
std::vector<int32_t> PlayerTokens(uint32_t seed);

// PoolPlayer is a GPU worker that plays sequences of a synthetic model, in a process of its own
// that runs this program again. It executes commands, one per line.
class PoolPlayer {
 public:
  explicit PoolPlayer(const PlayerOptions& options);
  ~PoolPlayer();
  PoolPlayer(const PoolPlayer&) = delete;
  PoolPlayer& operator=(const PoolPlayer&) = delete;

  // Sends a command and returns the response; empty if the player has died. Commands:
  //   joined            waits until its pools are joined and have blank slots: "ok" or "late"
  //   begin S N         begins sequence S over its first N tokens:
  //                     "cached C device D host H loaded L": hit tokens by tier, copied bytes
  //   play S N          reads the rest of the prompt, then decodes N tokens: "ok". OutputsOf(S)
  //                     returns the outputs of the decode passes
  //   finish S          publishes the sequence's pages and drops it: "ok"
  //   drop S            drops it: "ok"
  //   flip S P          flips a bit of page P of sequence S in device memory: "ok"
  //   published         waits until all pages are published: "ok"
  //   pool              "handles H held D demoted M failed F out O reclaimed R"
  //   counters          "pool P published N verify V scrubbed S"
  std::string Do(const std::string& command);
  std::vector<float> OutputsOf(uint32_t seed) const;

  void Kill();
  // Makes it release everything and end. Returns its exit code, which is 0 if nothing went wrong.
  int Stop();
  pid_t pid() const { return pid_; }

 private:
  const std::string outputs_;
  pid_t pid_ = -1;
  int socket_ = -1;
};

// Returns the number behind a word of a response.
int64_t NumberIn(const std::string& response, const std::string& word);

// Runs a player's main function if the arguments say that this process is one; otherwise returns
// -1.
int RunPoolPlayer(int argc, char** argv);

}  // namespace crumb::client
