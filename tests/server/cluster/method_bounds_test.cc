// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Every method of every service refuses a request of which a field is longer than its bound, over
// real gRPC, so that no method is without the check.
#include "gmock/gmock.h"
#include "google/protobuf/message.h"
#include "server/calls/field_bounds.h"
#include "tests/server/cluster/test_nodes.h"
#include "tests/server/generic_call.h"

namespace crumb::server {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

// A field of a request, or of a message within it, that a caller can make too long.
struct Path {
  std::vector<const FieldDescriptor*> outer;  // messages on the way
  const FieldDescriptor* field = nullptr;
};

void Collect(const Descriptor& message, std::vector<const FieldDescriptor*>& outer,
             std::vector<Path>& paths) {
  for (int i = 0; i < message.field_count(); ++i) {
    const FieldDescriptor& field = *message.field(i);
    const bool is_message = field.cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE;
    if (field.is_repeated() || field.cpp_type() == FieldDescriptor::CPPTYPE_STRING) {
      paths.push_back({outer, &field});
    } else if (is_message) {
      outer.push_back(&field);
      Collect(*field.message_type(), outer, paths);
      outer.pop_back();
    }
  }
}

// Puts one element, or one byte, more into a field than its bound allows.
void Overfill(Message& message, const FieldDescriptor& field, const FieldBound& bound) {
  const auto& reflection = *message.GetReflection();
  if (!field.is_repeated()) {
    return reflection.SetString(&message, &field, std::string(bound.bytes + 1, 'x'));
  }
  for (uint64_t i = 0; i <= bound.count; ++i) {
    switch (field.cpp_type()) {
      case FieldDescriptor::CPPTYPE_STRING:
        reflection.AddString(&message, &field, "");
        break;
      case FieldDescriptor::CPPTYPE_MESSAGE: {
        Message* added = reflection.AddMessage(&message, &field);
        if (!field.is_map()) break;
        // Entries of a map count once for each name.
        const FieldDescriptor& key = *field.message_type()->FindFieldByNumber(1);
        added->GetReflection()->SetString(added, &key, std::to_string(i));
        break;
      }
      case FieldDescriptor::CPPTYPE_UINT32:
        reflection.AddUInt32(&message, &field, 0);
        break;
      default:
        reflection.AddUInt64(&message, &field, 0);
    }
  }
}

class MethodBoundsTest : public testing::Test {
 protected:
  MethodBoundsTest() {
    channel_ = grpc::CreateChannel("unix:" + nodes_.options(0).listen.unix_socket,
                                   grpc::InsecureChannelCredentials());
    client_ = nodes_.Connect(0);
  }

  static TestNodes::Settings Settings() {
    TestNodes::Settings settings;
    settings.count = 1;
    settings.ucx = false;
    settings.change = [](int, Options& options) {
      // More than this in one Put fits into a message.
      options.limits.fragment_bytes_max = ByteSize{1 << 20};
    };
    return settings;
  }

  TestNodes nodes_{Settings()};
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<TestClient> client_;
};

TEST_F(MethodBoundsTest, OneMoreThanTheBoundIsRefusedByEveryMethod) {
  const Limits& limits = nodes_.options(0).limits;
  int methods = 0;
  int fields = 0;
  for (const auto* service : AllServices()) {
    ASSERT_NE(service, nullptr);
    for (int i = 0; i < service->method_count(); ++i, ++methods) {
      const auto& method = *service->method(i);
      std::vector<const FieldDescriptor*> outer;
      std::vector<Path> paths;
      Collect(*method.input_type(), outer, paths);
      for (const Path& path : paths) {
        SCOPED_TRACE(PathOf(method) + " " + std::string(path.field->full_name()));
        const auto bound = BoundOf(std::string(path.field->full_name()), limits);
        ASSERT_TRUE(bound.has_value()) << "it has no row in field_bounds.cc";
        // The record of a keyspace is checked as a whole, by the registry.
        if (bound->bytes >= static_cast<uint64_t>(kMessageBytesMax)) continue;
        std::unique_ptr<Message> request(google::protobuf::MessageFactory::generated_factory()
                                             ->GetPrototype(method.input_type())
                                             ->New());
        Message* within = request.get();
        for (const FieldDescriptor* field : path.outer) {
          within = within->GetReflection()->MutableMessage(within, field);
        }
        Overfill(*within, *path.field, *bound);
        ASSERT_LT(request->ByteSizeLong(), static_cast<size_t>(kMessageBytesMax));
        const auto context = client_->Context();
        const grpc::Status status =
            Call(channel_, *context, PathOf(method), {request->SerializeAsString()});
        EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
        EXPECT_THAT(status.error_message(),
                    testing::StartsWith(std::string(path.field->name()) + " has "));
        ++fields;
      }
    }
  }
  EXPECT_GE(methods, 31) << "of CacheService and PeerService";
  EXPECT_GE(fields, 80);
}

}  // namespace
}  // namespace crumb::server
