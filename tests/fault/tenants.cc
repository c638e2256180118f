// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/fault/tenants.h"

#include <fstream>

#include "common/hex.h"
#include "common/sha256.h"
#include "nlohmann/json.hpp"

namespace crumb::fault {

std::string TokenOf(const std::string& tenant) { return "token of " + tenant; }

std::string TenantsWithOwnSlabs(const std::string& folder, const std::vector<std::string>& names) {
  nlohmann::json tenants = nlohmann::json::array();
  for (const std::string& name : names) {
    tenants.push_back({{"name", name}, {"token_sha256", HexEncode(Sha256(TokenOf(name)))}});
  }
  const std::string path = folder + "/tenants.json";
  std::ofstream(path) << nlohmann::json({{"tenants", tenants}});
  return "tenants:\n  file: " + path + "\n  shared_memory: own\n";
}

}  // namespace crumb::fault
