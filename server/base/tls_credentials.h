// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include "grpcpp/security/credentials.h"
#include "grpcpp/security/server_credentials.h"
#include "grpcpp/server_context.h"
#include "server/base/tls_options.h"

// gRPC's credentials for a TlsOptions. The files are looked at again by a thread of gRPC.
namespace crumb::server {

// Returns the TCP listener's credentials; plaintext without TLS. The files have been checked.
std::shared_ptr<grpc::ServerCredentials> TcpServerCredentials(const TlsOptions& options);

// How one crumbd calls others: with its own certificate, and theirs checked.
struct PeerChannel {
  std::shared_ptr<grpc::ChannelCredentials> credentials = grpc::InsecureChannelCredentials();
  std::string name;  // the name in their certificates; empty: the host of their address
};
PeerChannel MakePeerChannel(const TlsOptions& options);

// kPermissionDenied: the caller's certificate does not carry `peer_name`.
absl::Status CheckPeerName(const grpc::CallbackServerContext& call, const std::string& peer_name);

}  // namespace crumb::server
