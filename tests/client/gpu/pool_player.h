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

// What the tests of device pools run on. Each program defines one.
struct PlayerPlatform {
  // Device `ordinal`, which reads the memory of the others; null: there is none.
  std::function<std::shared_ptr<Device>(int ordinal)> open;
  WorkerOptions options;
  // Bytes of device 0 that nobody has, this process or another; none: not known.
  std::function<uint64_t()> free_bytes = nullptr;
  double error_max = 0.0;  // ||got - expected|| / ||expected|| of outputs against the CPU worker's
};
const PlayerPlatform& Platform();

// What a player is made with.
struct PlayerOptions {
  std::string socket_dir;
  int device = 0;
  int peer = -1;                  // a device whose pools it looks into; -1: none
  uint64_t pool_bytes = 8 << 20;  // of pages, and of sinks
  bool write_through = false;     // pages go to crumbd's memory at once, too
  int private_pages = 64;         // slots beside the pool
  int scrub = 0;                  // pages a second that are looked at again
  int verify_every = 64;          // pages of a prefix, one of which is
};

// The tokens of all sequences with number `seed`.
std::vector<int32_t> PlayerTokens(uint32_t seed);

// A device worker that plays sequences of a made-up model, in a process of its own: this program
// again. It does what it is told, one line at a time.
class PoolPlayer {
 public:
  explicit PoolPlayer(const PlayerOptions& options);
  ~PoolPlayer();
  PoolPlayer(const PoolPlayer&) = delete;
  PoolPlayer& operator=(const PoolPlayer&) = delete;

  // Sends a command and returns the answer; empty when the player is gone. Commands:
  //   joined            waits until its pools are joined and have blank slots: "ok" or "late"
  //   begin S N         begins sequence S over its first N tokens:
  //                     "cached C device D host H loaded L": hit tokens by tier, copied bytes
  //   play S N          reads what is left of the prompt, then decodes N tokens; "ok". The outputs
  //   of
  //                     the decode passes are in OutputsOf(S)
  //   finish S          publishes what is left of it and drops it: "ok"
  //   drop S            drops it: "ok"
  //   flip S P          flips a bit of page P of sequence S where it lies: "ok"
  //   published         waits until all is published: "ok"
  //   pool              "handles H held D demoted M failed F out O reclaimed R"
  //   counters          "pool P published N verify V scrubbed S"
  std::string Do(const std::string& command);
  std::vector<float> OutputsOf(uint32_t seed) const;

  void Kill();
  // Asks it to end, when it has let go of everything; its exit code: 0, when nothing went wrong.
  int Stop();
  pid_t pid() const { return pid_; }

 private:
  const std::string outputs_;
  pid_t pid_ = -1;
  int socket_ = -1;
};

// The number behind a word of an answer.
int64_t NumberIn(const std::string& answer, const std::string& word);

// The player's main function, when the arguments say that this is one; else -1.
int RunPoolPlayer(int argc, char** argv);

}  // namespace crumb::client
