// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "client/worker/keyspace_binding.h"
#include "common/mutex.h"
#include "crumb/client.h"
#include "crumb/worker_options.h"

namespace crumb::client {

// Keeps the keyspace in which a worker's new sequences and transfers work.
//
// States of a binding:
//   private     crumbd has not opened the keyspace yet: pages are shared inside this process only.
//   known       crumbd has opened it: pages are fetched and published.
//   known BF16  an operator or the quality watch has switched INT2 pages off: BF16 pages, in a
//               keyspace of their own.
// A sequence keeps the binding that it began with. Current() returns another one when crumbd was
// restarted, dropped the keyspace (a higher generation), or changed its state. Thread-safe.
class KeyspaceBinder {
 public:
  using Binding = std::shared_ptr<const KeyspaceBinding>;

  // Validates `options`. `options` and `client` are borrowed; `client` may be null, and then every
  // binding is private. `run_soon` runs a task on a thread that may wait for crumbd; it may drop
  // the task. kInvalidArgument: an option.
  static absl::StatusOr<std::unique_ptr<KeyspaceBinder>> Create(
      const WorkerOptions& options, Client* client,
      std::function<void(std::function<void()>)> run_soon);

  // The binding for a sequence that begins now. Opens the keyspace if the last binding is stale,
  // which takes `timeout` at most; if that fails, or another thread is doing it, the last binding
  // is returned.
  Binding Current(Duration timeout);

  // Makes the next Current() open the keyspace again: crumbd refused a page or a request.
  void Invalidate() { stale_.store(true); }

  // New sequences store BF16 from now on, for `reason`. The decision is this process's own until
  // crumbd has recorded it; from then on the keyspace's state counts, which a command can set back.
  void GiveUpInt2(std::string reason);

  // The id of a private binding of this format. It is equal for all ranks of a replica.
  const KeyspaceId& PrivateId(kernels::PageFormat format) const;

 private:
  KeyspaceBinder(const WorkerOptions& options, Client* client, const KeyspaceId& keyspace,
                 const KeyspaceId& bf16_keyspace,
                 std::function<void(std::function<void()>)> run_soon);
  bool Stale(const KeyspaceBinding& binding) const;
  absl::StatusOr<Binding> Bind(Duration timeout);
  absl::StatusOr<KeyspaceInfo> Open(kernels::PageFormat format, Duration timeout);
  void ReportBadQuality();

  const WorkerOptions& options_;
  Client* const client_;
  const Binding private_binding_;
  const Binding private_bf16_binding_;
  const std::function<void(std::function<void()>)> run_soon_;
  std::atomic<bool> stale_{false};
  std::atomic<bool> binding_now_{false};  // a thread is opening the keyspace

  Mutex mutex_;
  Binding binding_ ABSL_GUARDED_BY(mutex_);
  // Why INT2 pages were given up; not empty until crumbd has recorded it.
  std::string bad_quality_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::client
