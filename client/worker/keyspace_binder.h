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

// KeyspaceBinder determines the keyspace in which a worker's new sequences and transfers work.
//
// States of a binding:
//   private     crumbd has not opened the keyspace: pages are visible inside this process only.
//   known       crumbd has opened it: pages are fetched and published.
//   known BF16  an operator or the quality watch has switched INT2 pages off: pages are BF16, in a
//               keyspace of their own.
//
// A sequence keeps the binding that it began with. Current() returns another one after crumbd has
// restarted, dropped the keyspace (which raises its generation), or changed its state. Thread-safe.
//
//     private --crumbd opens the keyspace--> known --state kBf16--> known BF16 --kActive--> known
//     known, known BF16 --crumbd restarts or drops the keyspace--> opened again at the next Current
//     any --GiveUpInt2--> private BF16, until crumbd has recorded it --> known BF16
//
// Current is called for every sequence. While the binding is fresh it sends nothing.
class KeyspaceBinder {
 public:
  using Binding = std::shared_ptr<const KeyspaceBinding>;

  // `options` and `client` are borrowed; `client` may be null, and then every binding is private.
  // `run_soon` runs a task on a thread that may block on crumbd, or drops it. kInvalidArgument: an
  // option is wrong.
  static absl::StatusOr<std::unique_ptr<KeyspaceBinder>> Create(
      const WorkerOptions& options, Client* client,
      std::function<void(std::function<void()>)> run_soon);

  // Returns the binding for a sequence that begins now. Opens the keyspace if the last binding is
  // stale, which takes `timeout` at most; if that fails, or another thread is doing it, returns the
  // last binding.
  Binding Current(Duration timeout);

  // Makes the next Current() open the keyspace again, because crumbd refused a page or a request.
  void Invalidate() { stale_.store(true); }

  // Makes new sequences store BF16, for `reason`. The decision is local to this process until
  // crumbd has recorded it; from then on the keyspace's state counts, which an operator can reset.
  void GiveUpInt2(std::string reason);

  // Returns the id of a private binding of this format, which is equal for all ranks of a replica.
  const KeyspaceId& PrivateId(kernels::PageFormat format) const;

 private:
  KeyspaceBinder(const WorkerOptions& options, Client* client, const KeyspaceId& keyspace,
                 const KeyspaceId& bf16_keyspace,
                 std::function<void(std::function<void()>)> run_soon);
  // Returns whether crumbd has restarted, or the keyspace was dropped or changed its state, since
  // the binding was made. Sends nothing.
  bool Stale(const KeyspaceBinding& binding) const;
  // Opens the keyspace, and that of BF16 pages if its state says so.
  absl::StatusOr<Binding> Bind(Duration timeout);
  // Opens the keyspace of pages of this format. kFailedPrecondition: crumbd computes other tile
  // sizes, so client and crumbd differ in version.
  absl::StatusOr<KeyspaceInfo> Open(kernels::PageFormat format, Duration timeout);
  // Has crumbd record that INT2 pages were given up; without a connection, the next Current tries
  // again.
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
  // The reason why INT2 pages were given up; empty once crumbd has recorded it.
  std::string bad_quality_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::client
