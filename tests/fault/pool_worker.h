// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

namespace crumb::fault {

// Options of a worker of a device pool.
struct PoolWorkerOptions {
  std::string socket_dir;
  std::string name = "worker";
  std::string device = "host";
  std::string token;             // the tenant's token
  uint64_t bytes_max = 2 << 20;  // size of its pool
  int blank_slots = 4;
  bool demotes = true;  // false: it has no staging memory to copy pages to
};

// A worker over a device pool of host memory, in a process of its own: this program again. It runs
// the commands that it receives, one line at a time.
class PoolWorker {
 public:
  explicit PoolWorker(const PoolWorkerOptions& options);
  ~PoolWorker();
  PoolWorker(const PoolWorker&) = delete;
  PoolWorker& operator=(const PoolWorker&) = delete;

  // Sends a command and returns the response; empty when the worker is gone. Commands:
  //   wait N          waits until N blank slots are ready: "ok" or "late"
  //   write PAGE      takes a blank slot and writes the page: "slot S" or "none"
  //   commit PAGE     makes the page visible: the outcome's number or a status
  //   acquire A B     leases pages [A, B): "hits H device D right R", R of the pages on the device
  //   take A B        acquires without checksums: the worker cannot name pages to the next crumbd
  //   taken           pages that leased slots have now: "R of H"
  //   check PAGE      whether its slot has its bytes: "right" or "wrong"
  //   free PAGE       lets the slot of a written page go: "ok"
  //   release         lets all leases go: "ok"
  //   joined          waits until the pool is joined: "ok" or "late"
  //   handles         how many are mapped: "N"
  //   reclaimed       slots that a new crumbd knows again: "N"
  //   demoted         pages copied down: "N"
  //   open            opens the keyspace again: "ok" or a status
  //   fds             open descriptors: "N"
  //   maps            mappings of device memory: "N"
  std::string Do(const std::string& command);

  void Kill();
  // Requests the worker to end; returns its exit code.
  int Stop();
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = -1;
  int socket_ = -1;
};

// The worker's main function, when the arguments say that this is one; else -1.
int RunPoolWorker(int argc, char** argv);

}  // namespace crumb::fault
