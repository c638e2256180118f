// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "common/clock.h"

namespace crumb::server {

// Runs tasks that another process can make block, such as system calls on a descriptor that it
// sent: opening a file with a lease on it, or closing a file of a file system in user space, waits
// for as long as that process likes. Every task has an owner, the user or tenant that can make it
// block. The tasks of one owner run in order, on one thread at a time; an owner whose task blocks
// delays its own tasks only.
//
// A thread is started for every owner with tasks, up to Options::owners_max; one idle thread is
// kept. Thread-safe.
class OwnerTasks {
 public:
  struct Options {
    std::string name = "owner-tasks";  // name of the threads
    size_t tasks_max = 1024;           // waiting tasks of one owner; Submit refuses more
    // Owners with tasks at once. Beyond it an owner gets no thread until another's tasks are done.
    size_t owners_max = 512;
    // The destructor runs the submitted tasks, but waits no longer than this for tasks that block:
    // these keep their threads, and tasks queued behind them never run.
    Duration stop_wait = std::chrono::seconds(5);
  };

  explicit OwnerTasks(const Options& options);
  ~OwnerTasks();
  OwnerTasks(const OwnerTasks&) = delete;
  OwnerTasks& operator=(const OwnerTasks&) = delete;

  // Queues `task` behind the owner's others. Returns false if Options::tasks_max wait; `task` is
  // destroyed by the caller then. `descriptors`: how many it keeps open until it ends.
  bool Submit(const std::string& owner, std::function<void()> task, size_t descriptors = 0);
  // Queues `task` without a limit: the caller bounds how many such tasks one owner can have.
  void SubmitAlways(const std::string& owner, std::function<void()> task, size_t descriptors = 0);

  // Gives up a reference to `object` behind the owner's tasks: its destructor may block, because it
  // closes that many descriptors. Never refused: the caller bounds descriptors(owner).
  void Destroy(const std::string& owner, std::shared_ptr<const void> object,
               size_t descriptors = 1);

  // Tasks and objects of the owner that are waiting or in progress.
  size_t pending(const std::string& owner) const;
  // Descriptors that these keep open, and those of all owners.
  size_t descriptors(const std::string& owner) const;
  size_t descriptors() const;

 private:
  struct State;
  const std::shared_ptr<State> state_;
};

}  // namespace crumb::server
