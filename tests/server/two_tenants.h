// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "crumb/v1/cache_service.grpc.pb.h"
#include "grpcpp/grpcpp.h"
#include "server/daemon/daemon.h"
#include "tests/common/temporary_folder.h"
#include "tests/server/test_client.h"

namespace crumb::server {

// One crumbd with the tenants a and b. Sessions belong to both: shared memory is "all".
class TwoTenants {
 public:
  using Stub = v1::CacheService::Stub;

  explicit TwoTenants(const std::function<void(Options&)>& change);

  std::string Target() const { return "unix:" + options_.listen.unix_socket; }
  std::string Admin() const { return daemon_->endpoints().admin; }
  std::string Tcp() const { return daemon_->endpoints().tcp; }
  // A session of the tenant.
  std::unique_ptr<TestClient> Open(const std::string& tenant,
                                   uint64_t staging_bytes = 1 << 20) const;
  // A connection of its own, so that tenants share nothing but crumbd.
  std::unique_ptr<Stub> NewStub() const;
  static std::unique_ptr<grpc::ClientContext> Context(const std::string& tenant);
  static std::string Token(const std::string& tenant) { return "token of " + tenant; }
  const Options& options() const { return options_; }

 private:
  TemporaryFolder folder_;
  Options options_;
  std::unique_ptr<Daemon> daemon_;
};

// Resources that an attack keeps until its round is over.
struct Attack {
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::shared_ptr<void>> kept;

  ~Attack() {
    for (const auto& context : contexts) context->TryCancel();
  }
};

// Tenant a with one session, in which its keyspace is open.
struct Attacker {
  const TwoTenants& crumbd;
  TestClient& session;
  TwoTenants::Stub& stub;
  Attack& attack;

  grpc::ClientContext* Context() const {
    attack.contexts.push_back(TwoTenants::Context("a"));
    return attack.contexts.back().get();
  }
};

// Pages that the attacker has stored: more than host memory has room for.
inline constexpr int kAttackerPages = 1'500;

// One row of the table in docs/security.md, "Budgets".
struct BudgetRow {
  std::string name;
  std::string limit_reached;  // the series that rises when the attack reaches its limit
  std::function<void(const Attacker&)> take;
  std::function<void(Options&)> change = [](Options&) {};
  // The SSD has room for every page, so that none of the other tenant's is ever missing.
  bool keeps_pages = false;
};
void PrintTo(const BudgetRow& row, std::ostream* out);

const std::vector<BudgetRow>& BudgetRows();
// Those among them of the processors, and of memory that calls take.
std::vector<BudgetRow> CallBudgetRows();
// Those among them of the queues in front of the SSD.
std::vector<BudgetRow> SsdBudgetRows();
// Those among them of the node's log, metrics and index.
std::vector<BudgetRow> NodeBudgetRows();

}  // namespace crumb::server
