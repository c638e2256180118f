// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/calls/field_bounds.h"

#include <functional>
#include <map>
#include <set>
#include <string>

#include "crumb/v1/peer_service.pb.h"
#include "gmock/gmock.h"
#include "server/calls/device_calls.h"
#include "server/calls/get_reader.h"
#include "server/calls/keyspace_calls.h"
#include "server/calls/lease_calls.h"
#include "server/calls/page_calls.h"
#include "server/calls/put_assembler.h"
#include "server/calls/staging_calls.h"
#include "tests/server/call_fixture.h"

namespace crumb::server {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

// Fields of the message, and of those within it, whose size is up to the caller.
void CollectGrowing(const Descriptor& message, std::set<std::string>& fields) {
  for (int i = 0; i < message.field_count(); ++i) {
    const FieldDescriptor& field = *message.field(i);
    const bool is_message = field.cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE;
    if (field.is_repeated() || field.cpp_type() == FieldDescriptor::CPPTYPE_STRING) {
      fields.insert(std::string(field.full_name()));
    }
    if (is_message) CollectGrowing(*field.message_type(), fields);
  }
}

TEST(FieldBoundsTest, EveryFieldOfARequestThatCanGrowHasABound) {
  std::set<std::string> fields;
  const auto* file = v1::AcquireRequest::descriptor()->file();
  const auto* peers = v1::PeerAcquireRequest::descriptor()->file();
  for (const auto* service :
       {file->FindServiceByName("CacheService"), peers->FindServiceByName("PeerService")}) {
    for (int i = 0; i < service->method_count(); ++i) {
      CollectGrowing(*service->method(i)->input_type(), fields);
    }
  }
  EXPECT_GT(fields.size(), 80u);
  for (const std::string& field : fields) {
    const auto bound = BoundOf(field, Limits());
    ASSERT_TRUE(bound.has_value()) << field << " has no row in field_bounds.cc";
    EXPECT_GT(bound->count, 0u) << field;
  }
}

// Puts one element, or one byte, more into `field` than its bound allows.
void Overfill(Message& message, const FieldDescriptor& field, const FieldBound& bound) {
  const auto& reflection = *message.GetReflection();
  const std::string text(bound.bytes + (field.is_repeated() ? 0 : 1), 'x');
  if (!field.is_repeated()) return reflection.SetString(&message, &field, text);
  for (uint64_t i = 0; i <= bound.count; ++i) {
    switch (field.cpp_type()) {
      case FieldDescriptor::CPPTYPE_STRING:
        reflection.AddString(&message, &field, "");
        break;
      case FieldDescriptor::CPPTYPE_MESSAGE:
        reflection.AddMessage(&message, &field);
        break;
      case FieldDescriptor::CPPTYPE_UINT32:
        reflection.AddUInt32(&message, &field, 0);
        break;
      default:
        reflection.AddUInt64(&message, &field, 0);
    }
  }
}

class RequestBoundsTest : public CallFixture {
 protected:
  static Limits Small() {
    Limits limits;
    limits.fragment_bytes_max = ByteSize{1 << 20};
    return limits;
  }
  RequestBoundsTest() : CallFixture(Small()) {
    const auto status_of = [](const std::function<void(Done)>& call) {
      Completion completion;
      call(completion.done());
      return completion.status;
    };
    Add<v1::AbortRequest>([this](const auto& r) { return Abort(context_, *session_, r); });
    Add<v1::AcquireRequest>([=, this](const auto& r) {
      return status_of([&](const Done& done) {
        Acquire(context_, session_, TimePoint::max(), r, &acquired_, done);
      });
    });
    Add<v1::ClaimSlotsRequest>([this](const auto& r) {
      v1::ClaimSlotsResponse response;
      return ClaimSlots(context_, *session_, r, &response);
    });
    Add<v1::ScrubSlotsRequest>([this](const auto& r) {
      v1::ScrubSlotsResponse response;
      return ScrubSlots(context_, *session_, r, &response);
    });
    Add<v1::CommitRequest>([=, this](const auto& r) {
      v1::CommitResponse response;
      return status_of([&](const Done& done) { Commit(context_, *session_, r, &response, done); });
    });
    Add<v1::ReserveRequest>([this](const auto& r) {
      v1::ReserveResponse response;
      return Reserve(context_, *session_, r, &response);
    });
    Add<v1::ReleaseRequest>([this](const auto& r) {
      v1::ReleaseResponse response;
      return Release(context_, *session_, r, &response);
    });
    Add<v1::LookupRequest>([=, this](const auto& r) {
      v1::LookupResponse response;
      return status_of(
          [&](const Done& done) { Lookup(context_, TimePoint::max(), r, &response, done); });
    });
    Add<v1::PrefetchRequest>([this](const auto& r) {
      v1::PrefetchResponse response;
      return Prefetch(context_, r, &response);
    });
    Add<v1::PinRequest>([=, this](const auto& r) {
      v1::PinResponse response;
      return status_of(
          [&](const Done& done) { Pin(context_, TimePoint::max(), r, &response, done); });
    });
    Add<v1::UnpinRequest>([this](const auto& r) {
      v1::UnpinResponse response;
      return Unpin(context_, r, &response);
    });
    Add<v1::DeleteRequest>([=, this](const auto& r) {
      v1::DeleteResponse response;
      return status_of([&](const Done& done) { Delete(context_, r, &response, done); });
    });
    Add<v1::OpenKeyspaceRequest>([=, this](const auto& r) {
      v1::OpenKeyspaceResponse response;
      return status_of([&](const Done& done) { OpenKeyspace(context_, r, &response, done); });
    });
    Add<v1::SetKeyspaceStateRequest>([=, this](const auto& r) {
      return status_of([&](const Done& done) { SetKeyspaceState(context_, r, done); });
    });
    Add<v1::DropKeyspaceRequest>([=, this](const auto& r) {
      v1::DropKeyspaceResponse response;
      return status_of([&](const Done& done) { DropKeyspace(context_, r, &response, done); });
    });
    Add<v1::GetRequest>([this](const auto& r) {
      absl::Status status = absl::UnknownError("not opened");
      GetReader::Open(context_, r, TimePoint::max(),
                      [&](const auto& reader) { status = reader.status(); });
      return status;
    });
    Add<v1::PutRequest>([this](const auto& r) {
      PutAssembler put(context_);
      return put.Add(r).status();
    });
  }

  template <typename Request, typename Call>
  void Add(const Call& call) {
    calls_[std::string(Request::descriptor()->full_name())] = {
        [] { return std::make_unique<Request>(); },
        [call](const Message& message) { return call(static_cast<const Request&>(message)); }};
  }

  struct Callable {
    std::function<std::unique_ptr<Message>()> make;
    std::function<absl::Status(const Message&)> call;
  };
  const std::shared_ptr<Session> session_ = OpenSession();
  v1::AcquireResponse acquired_;
  std::map<std::string, Callable> calls_;
};

TEST_F(RequestBoundsTest, OneMoreThanTheBoundIsRefusedByNameAndBound) {
  for (const auto& [name, callable] : calls_) {
    const auto empty = callable.make();
    const Descriptor& descriptor = *empty->GetDescriptor();
    for (int i = 0; i < descriptor.field_count(); ++i) {
      const FieldDescriptor& field = *descriptor.field(i);
      const auto bound = BoundOf(std::string(field.full_name()), limits_);
      if (!bound.has_value()) continue;
      SCOPED_TRACE(field.full_name());
      const auto request = callable.make();
      Overfill(*request, field, *bound);
      const absl::Status status = callable.call(*request);
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
      EXPECT_THAT(std::string(status.message()), testing::HasSubstr(std::string(field.name())));
      EXPECT_THAT(std::string(status.message()),
                  testing::HasSubstr(std::to_string(
                      field.is_repeated() ? bound->count : bound->bytes / bound->item_bytes)));
    }
  }
}

}  // namespace
}  // namespace crumb::server
