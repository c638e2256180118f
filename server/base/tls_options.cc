// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/base/tls_options.h"

namespace crumb::server {

void TlsOptions::Visit(ConfigVisitor& visitor) {
  visitor.Field("cert_file", cert_file,
                "PEM: this node's certificate and intermediates. Empty: TCP without TLS.");
  visitor.Field("key_file", key_file, "PEM: the private key of it.");
  visitor.Field("client_ca_file", client_ca_file,
                "PEM: callers over TCP, and other nodes, need a certificate that these signed. "
                "Empty: callers need none.");
  visitor.Field("peer_name", peer_name,
                "DNS name that only the certificates of crumbds have: only callers with it may "
                "make the calls between crumbds. Empty: certificates are checked against "
                "addresses, and every caller may make these calls.");
  visitor.Field("reload_interval", reload_interval,
                {.least = std::chrono::seconds(1), .most = std::chrono::hours(24)},
                "Time between looks at the files; new ones serve the next connections. Whole "
                "seconds.");
  visitor.Field("expiry_warning", expiry_warning, {.most = std::chrono::hours(24 * 3650)},
                "A certificate that ends sooner is logged, once a day.");
}

absl::Status TlsOptions::Validate() const {
  const auto wrong = [](const char* text) { return absl::InvalidArgumentError(text); };
  if (cert_file.empty() != key_file.empty()) {
    return wrong("listen.tls.cert_file and listen.tls.key_file belong together: set both or none");
  }
  if (!client_ca_file.empty() && cert_file.empty()) {
    return wrong("listen.tls.client_ca_file needs listen.tls.cert_file and listen.tls.key_file");
  }
  if (!peer_name.empty() && client_ca_file.empty()) {
    return wrong("listen.tls.peer_name needs listen.tls.client_ca_file");
  }
  return CheckValues("listen.tls", *this);
}

std::vector<CertificateWatch::Certificate> TlsOptions::Certificates() const {
  return {{{"listen.tls.cert_file", cert_file}, TlsRole::kChain},
          {{"listen.tls.client_ca_file", client_ca_file}, TlsRole::kAuthorities}};
}

absl::Status TlsOptions::CheckFiles(std::chrono::system_clock::time_point now) const {
  return CheckTlsFiles({{"listen.tls.cert_file", cert_file},
                        {"listen.tls.key_file", key_file},
                        {"listen.tls.client_ca_file", client_ca_file}},
                       now);
}

}  // namespace crumb::server
