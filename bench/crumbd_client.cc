// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/crumbd_client.h"

#include "common/status_macros.h"

namespace crumb::bench {
namespace {

constexpr Duration kConnectWait = std::chrono::seconds(5);

}  // namespace

absl::StatusOr<std::unique_ptr<client::Client>> ConnectTo(const std::string& socket_dir,
                                                          uint64_t staging_bytes) {
  client::ClientOptions options;
  options.socket_dir = socket_dir;
  options.process_name = "crumb-bench";
  options.staging_bytes = staging_bytes;
  CRUMB_ASSIGN_OR_RETURN(auto client, client::Client::Open(options));
  if (client->WaitConnected(kConnectWait)) return client;
  return absl::UnavailableError("no crumbd answers in " + socket_dir);
}

absl::Status BindKeyspace(client::Client& client, FragmentSet& fragments) {
  CRUMB_ASSIGN_OR_RETURN(const client::KeyspaceInfo info,
                         client.OpenKeyspace(fragments.Spec(), kConnectWait));
  fragments.BindKeyspace(info.id, info.generation);
  return absl::OkStatus();
}

}  // namespace crumb::bench
