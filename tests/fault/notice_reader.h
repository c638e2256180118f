// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <set>
#include <string>
#include <thread>

#include "common/mutex.h"
#include "tests/server/test_client.h"

namespace crumb::fault {

// A worker that commits pages and reads the notices of its session stream, from crumbd's sockets in
// `socket_dir`. Pages are named by their keys' 32 bytes.
class NoticeReader {
 public:
  explicit NoticeReader(const std::string& socket_dir);
  ~NoticeReader();
  NoticeReader(const NoticeReader&) = delete;

  // Commits pages [first, first + count), those that crumbd takes. Fails the test where one is
  // neither stored nor refused for want of room.
  void Commit(int first, int count);
  // The pages of which a notice has said that they are durable.
  std::set<std::string> Noticed();
  // How many of the pages are hits, in any tier.
  size_t CountThere(const std::set<std::string>& pages);

 private:
  void Read();

  server::TestClient client_;
  const std::unique_ptr<grpc::ClientContext> context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::SessionRequest, v1::SessionResponse>> stream_;
  Mutex mutex_;
  std::set<std::string> noticed_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace crumb::fault
