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

// Returns the TCP listener's credentials; plaintext without TLS. With a client_ca_file every caller
// must present a certificate that it signed. REQUIRES: the files have been checked
// (TlsOptions::CheckFiles).
std::shared_ptr<grpc::ServerCredentials> TcpServerCredentials(const TlsOptions& options);

// How one crumbd calls others: with its own certificate, and theirs checked.
struct PeerChannel {
  std::shared_ptr<grpc::ChannelCredentials> credentials = grpc::InsecureChannelCredentials();
  std::string name;  // the name in their certificates; empty: the host of their address
};
// Returns the credentials for calls to other crumbds; plaintext without TLS. Without a
// client_ca_file their certificates are checked against the system's authorities.
PeerChannel MakePeerChannel(const TlsOptions& options);

// Checks that the call comes from another crumbd. kPermissionDenied: the caller's certificate does
// not carry `peer_name`. Always succeeds if `peer_name` is empty.
absl::Status CheckPeerName(const grpc::CallbackServerContext& call, const std::string& peer_name);

}  // namespace crumb::server
