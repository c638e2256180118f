// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// crumbd's configuration, and the file of tenants. The first byte says which.
#include "common/config.h"
#include "server/daemon/options.h"
#include "server/tenants/tenant_file.h"
#include "tests/fuzz/fuzz_target.h"

namespace crumb::fuzz {
namespace {

constexpr size_t kTenantsMax = 8;

void RunConfig(const std::string& text) {
  server::Options options;
  const auto visit = [](server::Options& of) {
    return [&of](ConfigVisitor& visitor) { of.Visit(visitor); };
  };
  if (!ReadConfig("fuzz", text, visit(options)).ok()) return;
  // A configuration that is printed is read as the same.
  const std::string printed = PrintConfig(visit(options), /*comments=*/true);
  server::Options again;
  Check(ReadConfig("printed", printed, visit(again)).ok());
  Check(PrintConfig(visit(again), /*comments=*/true) == printed);
  options.Complete();
  options.Validate().IgnoreError();
}

void RunTenants(const std::string& text) {
  const auto tenants = server::ParseTenants(text, "fuzz", kTenantsMax);
  Check(!tenants.ok() || tenants->size() <= kTenantsMax);
}

void Run(std::span<const std::byte> input) {
  if (input.empty()) return;
  const std::string text = TextOf(input.subspan(1));
  if ((static_cast<unsigned>(input[0]) & 1) == 0) return RunConfig(text);
  RunTenants(text);
}

std::vector<std::string> Seeds() {
  server::Options options;
  const std::string whole =
      PrintConfig([&](ConfigVisitor& visitor) { options.Visit(visitor); }, /*comments=*/false);
  return {std::string("\0", 1) + whole,
          std::string("\0", 1) +
              "listen: {socket_dir: /run/crumb}\nstore:\n  ssd:\n    path: /x\n"
              "    bytes_max: 64GiB\nstop_grace: 5ms\n",
          "\1{\"tenants\": [{\"name\": \"a\", \"token_sha256\": [\"" + std::string(64, 'a') +
              "\"], \"quota\": \"1GiB\", \"expires\": \"2030-01-01T00:00:00Z\"}]}"};
}

}  // namespace

const FuzzTarget kConfigTarget = {"config", Run, Seeds};

}  // namespace crumb::fuzz
