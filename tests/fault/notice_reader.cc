// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/fault/notice_reader.h"

#include <chrono>

#include "common/page_key.h"
#include "gtest/gtest.h"

namespace crumb::fault {
namespace {

std::unique_ptr<grpc::ClientContext> StreamContext(const server::TestClient& client) {
  auto context = client.Context();
  context->set_deadline(std::chrono::system_clock::now() + std::chrono::hours(1));
  return context;
}

}  // namespace

NoticeReader::NoticeReader(const std::string& socket_dir)
    : client_(socket_dir + "/crumbd.fd.sock", "unix:" + socket_dir + "/crumbd.sock"),
      context_(StreamContext(client_)) {
  EXPECT_TRUE(client_.OpenKeyspace("notices").ok());
  stream_ = client_.stub().Session(context_.get());
  thread_ = std::thread([this] { Read(); });
}

NoticeReader::~NoticeReader() {
  context_->TryCancel();
  thread_.join();
  stream_->Finish();
}

void NoticeReader::Read() {
  v1::SessionResponse notice;
  while (stream_->Read(&notice)) {
    const std::string& keys = notice.durable().keys();
    MutexLock lock(&mutex_);
    for (size_t at = 0; at < keys.size(); at += sizeof(PageKey)) {
      noticed_.insert(keys.substr(at, sizeof(PageKey)));
    }
  }
}

void NoticeReader::Commit(int first, int count) {
  for (int number = first; number < first + count; ++number) {
    v1::CommitResponse response;
    const grpc::Status status =
        client_.Commit(client_.Fragment(server::TestClient::Key(number), 1), &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
  }
}

std::set<std::string> NoticeReader::Noticed() {
  MutexLock lock(&mutex_);
  return noticed_;
}

size_t NoticeReader::CountThere(const std::set<std::string>& pages) {
  size_t there = 0;
  for (const std::string& key : pages) {
    v1::LookupRequest request;
    request.set_keyspace(client_.keyspace().keyspace());
    request.set_keys(key);
    v1::LookupResponse response;
    const grpc::Status status = client_.stub().Lookup(client_.Context().get(), request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    there += response.hit_pages();
  }
  return there;
}

}  // namespace crumb::fault
