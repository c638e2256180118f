// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/server/generic_call.h"

#include <filesystem>
#include <fstream>
#include <regex>
#include <sstream>

#include "grpcpp/generic/generic_stub.h"

namespace crumb::server {

std::vector<const google::protobuf::ServiceDescriptor*> AllServices() {
  std::vector<const google::protobuf::ServiceDescriptor*> services;
  const std::regex name("\\nservice (\\w+) \\{");
  for (const auto& entry : std::filesystem::directory_iterator("proto/crumb/v1")) {
    std::ifstream file(entry.path());
    std::stringstream text;
    text << file.rdbuf();
    const std::string content = text.str();
    for (std::sregex_iterator match(content.begin(), content.end(), name), end; match != end;
         ++match) {
      services.push_back(google::protobuf::DescriptorPool::generated_pool()->FindServiceByName(
          "crumb.v1." + (*match)[1].str()));
    }
  }
  return services;
}

std::string PathOf(const google::protobuf::MethodDescriptor& method) {
  return "/" + std::string(method.service()->full_name()) + "/" + std::string(method.name());
}

grpc::Status Call(const std::shared_ptr<grpc::Channel>& channel, grpc::ClientContext& context,
                  const std::string& path, const std::vector<std::string>& requests) {
  grpc::GenericStub stub(channel);
  grpc::CompletionQueue queue;
  int tag = 0;
  // One operation at a time.
  const auto done = [&] {
    void* got = nullptr;
    bool ok = false;
    return queue.Next(&got, &ok) && ok;
  };
  const auto stream = stub.PrepareCall(&context, path, &queue);
  stream->StartCall(&tag);
  bool open = done();
  for (size_t i = 0; open && i < requests.size(); ++i) {
    const grpc::Slice slice(requests[i]);
    stream->Write(grpc::ByteBuffer(&slice, 1), &tag);
    open = done();
  }
  if (open) {
    stream->WritesDone(&tag);
    done();
  }
  grpc::ByteBuffer response;
  do {
    stream->Read(&response, &tag);
  } while (done());
  grpc::Status status;
  stream->Finish(&status, &tag);
  done();
  queue.Shutdown();
  while (done()) {
  }
  return status;
}

}  // namespace crumb::server
