// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/base/tls_credentials.h"

#include <algorithm>

#include "grpc/grpc_security_constants.h"
#include "grpcpp/security/auth_context.h"
#include "grpcpp/security/tls_certificate_provider.h"
#include "grpcpp/security/tls_credentials_options.h"

namespace crumb::server {
namespace {

namespace tls = grpc::experimental;

std::shared_ptr<tls::FileWatcherCertificateProvider> Watch(const TlsOptions& options) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(options.reload_interval);
  return std::make_shared<tls::FileWatcherCertificateProvider>(
      options.key_file, options.cert_file, options.client_ca_file,
      static_cast<unsigned>(seconds.count()));
}

}  // namespace

std::shared_ptr<grpc::ServerCredentials> TcpServerCredentials(const TlsOptions& options) {
  if (!options.enabled()) return grpc::InsecureServerCredentials();
  tls::TlsServerCredentialsOptions credentials(Watch(options));
  credentials.watch_identity_key_cert_pairs();
  if (options.client_ca_file.empty()) {
    credentials.set_cert_request_type(GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE);
  } else {
    credentials.watch_root_certs();
    credentials.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  }
  return tls::TlsServerCredentials(credentials);
}

PeerChannel MakePeerChannel(const TlsOptions& options) {
  PeerChannel channel;
  if (!options.enabled()) return channel;
  tls::TlsChannelCredentialsOptions credentials;
  credentials.set_certificate_provider(Watch(options));
  credentials.watch_identity_key_cert_pairs();
  if (!options.client_ca_file.empty()) credentials.watch_root_certs();  // else the system's
  channel.credentials = tls::TlsCredentials(credentials);
  channel.name = options.peer_name;
  return channel;
}

absl::Status CheckPeerName(const grpc::CallbackServerContext& call, const std::string& peer_name) {
  if (peer_name.empty()) return absl::OkStatus();
  const auto auth = call.auth_context();
  if (auth != nullptr) {
    const auto names = auth->FindPropertyValues(GRPC_X509_SAN_PROPERTY_NAME);
    if (std::find(names.begin(), names.end(), peer_name) != names.end()) return absl::OkStatus();
  }
  return absl::PermissionDeniedError(
      "only crumbds may call this: the caller's certificate does not carry listen.tls.peer_name, " +
      peer_name);
}

}  // namespace crumb::server
