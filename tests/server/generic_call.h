// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "google/protobuf/descriptor.h"
#include "google/protobuf/message.h"
#include "grpcpp/grpcpp.h"

namespace crumb::server {

// The services of proto/crumb/v1, as its files say. A service whose messages are not linked into
// the program fails the caller's test: it is null.
std::vector<const google::protobuf::ServiceDescriptor*> AllServices();

// "/crumb.v1.CacheService/Acquire".
std::string PathOf(const google::protobuf::MethodDescriptor& method);

// Makes one call of any kind: sends `requests` and the end of them, reads responses until there are
// no more, and returns the status. Stops sending when the call has ended.
grpc::Status Call(const std::shared_ptr<grpc::Channel>& channel, grpc::ClientContext& context,
                  const std::string& path, const std::vector<std::string>& requests);

}  // namespace crumb::server
