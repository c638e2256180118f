// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "absl/status/status.h"
#include "google/protobuf/message.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/proto_buffer_reader.h"

namespace crumb::server {

// Frees the bytes of a message that gRPC received, which it would keep until the call's caller has
// read its status. gRPC gives its buffer as constant, but nothing else uses it.
inline void FreeBytes(const grpc::ByteBuffer& bytes) {
  const_cast<grpc::ByteBuffer&>(bytes).Clear();
}

// Decodes a message that gRPC received, and frees its bytes. kInvalidArgument: it is none; then
// `message` may have a part of it.
inline absl::Status Decode(const grpc::ByteBuffer& bytes, google::protobuf::Message& message) {
  bool decoded = false;
  {
    grpc::ProtoBufferReader reader(&const_cast<grpc::ByteBuffer&>(bytes));
    decoded = reader.status().ok() && message.ParseFromZeroCopyStream(&reader);
  }
  FreeBytes(bytes);
  if (decoded) return absl::OkStatus();
  return absl::InvalidArgumentError("the request is not a " +
                                    std::string(message.GetDescriptor()->name()));
}

}  // namespace crumb::server
