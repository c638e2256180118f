// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/tenants/tenant_file.h"

#include <ctime>
#include <set>

#include "common/config.h"
#include "common/hex.h"
#include "common/json_file.h"
#include "common/status_macros.h"
#include "fmt/format.h"

namespace crumb::server {
namespace {

constexpr size_t kNameBytesMax = 64;  // the name is a metric's label
constexpr size_t kTokensMax = 8;

absl::Status Wrong(const std::string& where, const std::string& what) {
  return absl::InvalidArgumentError(where + ": " + what);
}

bool IsName(const std::string& name) {
  const bool known =
      name.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") ==
      std::string::npos;
  return known && !name.empty() && name.size() <= kNameBytesMax;
}

absl::Status CheckFields(const nlohmann::json& object, const std::set<std::string>& known,
                         const std::string& where) {
  for (const auto& [field, value] : object.items()) {
    if (!known.contains(field)) return Wrong(where, "unknown field '" + field + "'");
  }
  return absl::OkStatus();
}

absl::Status AddToken(const nlohmann::json& value, const std::string& where, Tenant& tenant) {
  Digest digest{};
  if (!value.is_string() || !HexDecode(value.get<std::string>(), digest)) {
    return Wrong(where, "token_sha256 must be 64 hexadecimal digits, or a list of such");
  }
  tenant.tokens.push_back(digest);
  return absl::OkStatus();
}

absl::Status ReadTokens(const nlohmann::json& object, const std::string& where, Tenant& tenant) {
  const auto found = object.find("token_sha256");
  if (found == object.end()) return Wrong(where, "token_sha256 is missing");
  if (!found->is_array()) return AddToken(*found, where, tenant);
  if (found->empty() || found->size() > kTokensMax) {
    return Wrong(where, fmt::format("token_sha256 must list from 1 to {} digests", kTokensMax));
  }
  for (const nlohmann::json& token : *found) {
    CRUMB_RETURN_IF_ERROR(AddToken(token, where, tenant));
  }
  return absl::OkStatus();
}

absl::Status ReadQuota(const nlohmann::json& object, const std::string& where, Tenant& tenant) {
  const auto found = object.find("quota_bytes");
  if (found == object.end()) return absl::OkStatus();
  if (found->is_number_unsigned()) {
    tenant.quota_bytes = found->get<uint64_t>();
  } else if (found->is_string()) {
    const auto size = ParseByteSize(found->get<std::string>());
    if (size.ok()) tenant.quota_bytes = size->value;
  }
  if (tenant.quota_bytes > 0) return absl::OkStatus();
  return Wrong(where, "quota_bytes must be a number above 0, or text such as \"64GiB\"");
}

// "2026-12-31T00:00:00Z", and nothing that is spelt otherwise.
absl::Status ReadExpiry(const nlohmann::json& object, const std::string& where, Tenant& tenant) {
  const auto found = object.find("expires");
  if (found == object.end()) return absl::OkStatus();
  const std::string text = found->is_string() ? found->get<std::string>() : "";
  std::tm parts{};
  const char* const end = ::strptime(text.c_str(), "%Y-%m-%dT%H:%M:%SZ", &parts);
  char again[32] = "";
  if (end != nullptr) {
    const std::time_t seconds = ::timegm(&parts);
    std::strftime(again, sizeof(again), "%Y-%m-%dT%H:%M:%SZ", &parts);  // timegm moves 31 June
    if (text == again) {
      tenant.expires = std::chrono::system_clock::from_time_t(seconds);
      return absl::OkStatus();
    }
  }
  return Wrong(where, "expires must be an instant in UTC such as \"2026-12-31T00:00:00Z\"");
}

absl::StatusOr<Tenant> ReadTenant(const nlohmann::json& object, const std::string& list) {
  if (!object.is_object()) return Wrong(list, "a tenant must be an object");
  Tenant tenant;
  CRUMB_ASSIGN_OR_RETURN(tenant.name, StringField(object, "name", list));
  if (!IsName(tenant.name)) {
    return Wrong(list, fmt::format("name must have from 1 to {} of the characters "
                                   "A-Z a-z 0-9 . _ -",
                                   kNameBytesMax));
  }
  const std::string where = list + ": tenant '" + tenant.name + "'";
  CRUMB_RETURN_IF_ERROR(
      CheckFields(object, {"name", "token_sha256", "quota_bytes", "expires"}, where));
  CRUMB_RETURN_IF_ERROR(ReadTokens(object, where, tenant));
  CRUMB_RETURN_IF_ERROR(ReadQuota(object, where, tenant));
  CRUMB_RETURN_IF_ERROR(ReadExpiry(object, where, tenant));
  return tenant;
}

}  // namespace

absl::StatusOr<std::vector<Tenant>> ParseTenants(std::string_view text, const std::string& where,
                                                 size_t tenants_max) {
  CRUMB_ASSIGN_OR_RETURN(const nlohmann::json file, ParseJsonObject(text, where));
  CRUMB_RETURN_IF_ERROR(CheckFields(file, {"tenants"}, where));
  CRUMB_ASSIGN_OR_RETURN(const nlohmann::json* list, ArrayField(file, "tenants", where));
  if (list->size() > tenants_max) {
    return Wrong(
        where, fmt::format("{} tenants, tenants.tenants_max allows {}", list->size(), tenants_max));
  }
  std::vector<Tenant> tenants;
  std::set<std::string> names;
  std::set<Digest> digests;
  for (const nlohmann::json& object : *list) {
    CRUMB_ASSIGN_OR_RETURN(Tenant tenant, ReadTenant(object, where));
    if (!names.insert(tenant.name).second) {
      return Wrong(where, "two tenants are called '" + tenant.name + "'");
    }
    for (const Digest& token : tenant.tokens) {
      if (!digests.insert(token).second) {
        return Wrong(where, "tenant '" + tenant.name + "' has a token that is there already");
      }
    }
    tenants.push_back(std::move(tenant));
  }
  return tenants;
}

}  // namespace crumb::server
