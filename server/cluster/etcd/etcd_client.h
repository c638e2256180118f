// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/clock.h"
#include "server/cluster/etcd/etcd_access.h"

namespace crumb::server {

// An entry of etcd.
struct EtcdEntry {
  std::string key;
  std::string value;
  int64_t mod_revision = 0;
  bool deleted = false;  // the watch saw its deletion, and `value` is empty
};

// The few calls of etcd that crumbd makes. Calls block until their deadline at most; after a
// failure the next call goes to the next member. Thread-safe. Codes are those of gRPC:
// kUnavailable and kDeadlineExceeded no member responds; kResourceExhausted etcd's space is used
// up.
class EtcdClient {
 public:
  // `endpoints`: HOST:PORT each. Connects at the first call, logs in at the first that needs it,
  // and again when etcd has forgotten that.
  static std::unique_ptr<EtcdClient> Make(const std::vector<std::string>& endpoints,
                                          Duration call_deadline, const EtcdAccess& access = {});
  virtual ~EtcdClient() = default;

  // All entries whose keys begin with `prefix`, as of `*revision`.
  virtual absl::StatusOr<std::vector<EtcdEntry>> Range(const std::string& prefix,
                                                       int64_t* revision) = 0;

  // Writes when the entry's revision of last change is `mod_revision`, 0 for one that is not there.
  // False: it is not. `lease` 0: for good.
  virtual absl::StatusOr<bool> PutIf(const std::string& key, const std::string& value,
                                     int64_t lease, int64_t mod_revision) = 0;
  virtual absl::Status Put(const std::string& key, const std::string& value, int64_t lease) = 0;
  virtual absl::Status Delete(const std::string& key) = 0;

  virtual absl::StatusOr<int64_t> GrantLease(Duration ttl) = 0;
  // Ends the lease, and with it all that was written on it.
  virtual absl::Status RevokeLease(int64_t lease) = 0;
  // kNotFound: the lease has ended.
  virtual absl::Status KeepAlive(int64_t lease) = 0;

  // Calls `changed` with the changes of entries under `prefix` after `revision`, batch by batch,
  // until the connection breaks, Cancel is called, `changed` returns false (kAborted), or the
  // history is gone (kDataLoss); then the range must be read again.
  using Changed = std::function<bool(std::vector<EtcdEntry>)>;
  virtual absl::Status Watch(const std::string& prefix, int64_t revision,
                             const Changed& changed) = 0;
  // Ends calls in progress, and all later ones at once.
  virtual void Cancel() = 0;
};

// The first key behind all that begin with `prefix`.
std::string EndOfPrefix(std::string prefix);

}  // namespace crumb::server
