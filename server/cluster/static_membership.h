// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common/clock.h"
#include "common/mutex.h"
#include "common/thread.h"
#include "crumb/v1/peer_service.grpc.pb.h"
#include "server/cluster/membership.h"
#include "server/cluster/outgoing_calls.h"
#include "server/tls_credentials.h"

namespace crumb::server {

// A list of addresses: every node says hello to every other one now and then; those that answer are
// alive. What nodes know of keyspaces travels the same way.
class StaticMembership final : public Membership {
 public:
  struct Options {
    std::vector<std::string> addresses;
    Duration heartbeat = std::chrono::seconds(1);
    Duration node_ttl = std::chrono::seconds(10);
    Duration rpc_deadline = std::chrono::seconds(2);
    PeerChannel channel;
  };

  // Starts at once. `clock` must outlive this.
  StaticMembership(const Options& options, const v1::NodeRecord& self, Events events,
                   std::shared_ptr<OutgoingCalls> calls, const Clock& clock);
  ~StaticMembership() override { Stop(); }

  void Publish(const v1::NodeRecord& self) override;
  void KeyspacesChanged() override { Wake(); }
  void AskKeyspaces() override;
  bool WaitSynced(Duration most) override;
  void Stop() override;

 private:
  struct Entry {
    std::shared_ptr<v1::PeerService::Stub> stub;
    v1::NodeRecord record;  // without id: has not answered yet
    TimePoint heard;
    TimePoint next_hello;
    bool under_way = false;      // a hello
    bool answered = false;       // or failed, once
    bool exchanging = false;     // keyspaces
    uint64_t their_version = 0;  // of keyspaces, as told
    uint64_t their_seen = 0;     // as merged here
    uint64_t own_told = 0;       // our version that they know
  };

  void Run();
  void Wake();
  void SayHellos();
  void Heard(const std::string& address, const absl::StatusOr<v1::PeerHelloResponse>& answer);
  void ExchangeKeyspaces();
  void TellNodes();

  const Options options_;
  const Events events_;
  const std::shared_ptr<OutgoingCalls> calls_;
  const Clock& clock_;

  Mutex mutex_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool woken_ ABSL_GUARDED_BY(mutex_) = false;
  bool synced_ ABSL_GUARDED_BY(mutex_) = false;
  v1::NodeRecord self_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, Entry> entries_ ABSL_GUARDED_BY(mutex_);
  std::vector<Keyspaces> arrived_ ABSL_GUARDED_BY(mutex_);
  uint64_t epoch_ = 0;  // thread_'s
  std::string told_;    // thread_'s: what was told last
  Thread thread_;
};

}  // namespace crumb::server
