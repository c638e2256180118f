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

  // Returns all entries whose keys begin with `prefix`, as of `*revision`.
  virtual absl::StatusOr<std::vector<EtcdEntry>> Range(const std::string& prefix,
                                                       int64_t* revision) = 0;

  // Writes the entry if its revision of last change is `mod_revision`, or, with 0, if it is not
  // there. Returns false, and writes nothing, if it is not so. The entry ends with lease `lease`;
  // 0: it stays.
  virtual absl::StatusOr<bool> PutIf(const std::string& key, const std::string& value,
                                     int64_t lease, int64_t mod_revision) = 0;
  // Writes an entry, whatever is there.
  virtual absl::Status Put(const std::string& key, const std::string& value, int64_t lease) = 0;
  // Deletes an entry; one that is not there is no error.
  virtual absl::Status Delete(const std::string& key) = 0;

  // Makes a lease that ends unless KeepAlive renews it within `ttl`. Returns its id.
  virtual absl::StatusOr<int64_t> GrantLease(Duration ttl) = 0;
  // Ends the lease, and with it all that was written on it.
  virtual absl::Status RevokeLease(int64_t lease) = 0;
  // Renews a lease for its full time. kNotFound: it has ended.
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

// Returns the first key behind all that begin with `prefix`.
std::string EndOfPrefix(std::string prefix);

}  // namespace crumb::server
