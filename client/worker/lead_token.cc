// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/worker/lead_token.h"

#include <cstring>
#include <span>

#include "common/crc32c.h"
#include "common/little_endian.h"

namespace crumb::client {
namespace {

// A token has magic, version, the fields below, a tier per page, and a CRC-32C over all of it.
constexpr std::string_view kMagic = "crumlead";
constexpr uint16_t kVersion = 1;
constexpr size_t kVersionAt = 8;
constexpr size_t kFormatAt = 10;
constexpr size_t kKnownAt = 11;
constexpr size_t kPagesAt = 12;
constexpr size_t kLeaseAt = 16;
constexpr size_t kGenerationAt = 24;
constexpr size_t kEpochAt = 32;
constexpr size_t kModelAt = 40;
constexpr size_t kKeyspaceAt = 72;
constexpr size_t kWatchedAt = 104;
constexpr size_t kLastKeyAt = 136;
constexpr size_t kTiersAt = 168;
constexpr size_t kSumBytes = 4;
constexpr uint32_t kPagesMax = 16384;

uint32_t SumOf(std::string_view bytes) { return Crc32c(std::as_bytes(std::span(bytes))); }

template <typename Id>
void StoreId(std::string& out, size_t at, const Id& id) {
  std::memcpy(out.data() + at, id.bytes.data(), id.bytes.size());
}

template <typename Id>
void LoadId(std::string_view bytes, size_t at, Id& id) {
  std::memcpy(id.bytes.data(), bytes.data() + at, id.bytes.size());
}

bool KnownTier(uint8_t tier) { return tier <= static_cast<uint8_t>(Tier::kRemote); }

}  // namespace

std::string EncodeLeadToken(const LeadToken& token) {
  std::string out(kTiersAt + token.tiers.size() + kSumBytes, '\0');
  auto* bytes = reinterpret_cast<std::byte*>(out.data());
  std::memcpy(bytes, kMagic.data(), kMagic.size());
  StoreLittle(bytes + kVersionAt, kVersion);
  out[kFormatAt] = static_cast<char>(token.keyspace.history_format);
  out[kKnownAt] = token.keyspace.known_to_crumbd ? 1 : 0;
  StoreLittle(bytes + kPagesAt, static_cast<uint32_t>(token.tiers.size()));
  StoreLittle(bytes + kLeaseAt, token.lease);
  StoreLittle(bytes + kGenerationAt, token.keyspace.generation);
  StoreLittle(bytes + kEpochAt, token.keyspace.epoch);
  StoreId(out, kModelAt, token.model);
  StoreId(out, kKeyspaceAt, token.keyspace.id);
  StoreId(out, kWatchedAt, token.keyspace.watched);
  StoreId(out, kLastKeyAt, token.last_key);
  for (size_t i = 0; i < token.tiers.size(); ++i) {
    out[kTiersAt + i] = static_cast<char>(token.tiers[i]);
  }
  const size_t end = out.size() - kSumBytes;
  StoreLittle(bytes + end, SumOf(std::string_view(out).substr(0, end)));
  return out;
}

absl::StatusOr<LeadToken> DecodeLeadToken(std::string_view bytes) {
  const auto* data = reinterpret_cast<const std::byte*>(bytes.data());
  if (bytes.size() < kTiersAt + kSumBytes || bytes.substr(0, kMagic.size()) != kMagic) {
    return absl::DataLossError("not a token of Worker::Lead");
  }
  if (LoadLittle<uint16_t>(data + kVersionAt) != kVersion) {
    return absl::FailedPreconditionError("a token of another version: use one for all ranks");
  }
  const auto pages = LoadLittle<uint32_t>(data + kPagesAt);
  const size_t end = bytes.size() - kSumBytes;
  if (pages > kPagesMax || end != kTiersAt + pages ||
      LoadLittle<uint32_t>(data + end) != SumOf(bytes.substr(0, end))) {
    return absl::DataLossError("a token of Worker::Lead is damaged");
  }
  LeadToken token;
  const auto format = static_cast<uint8_t>(bytes[kFormatAt]);
  token.keyspace.history_format = static_cast<kernels::PageFormat>(format);
  token.keyspace.known_to_crumbd = bytes[kKnownAt] != 0;
  token.lease = LoadLittle<uint64_t>(data + kLeaseAt);
  token.keyspace.generation = LoadLittle<uint64_t>(data + kGenerationAt);
  token.keyspace.epoch = LoadLittle<uint64_t>(data + kEpochAt);
  LoadId(bytes, kModelAt, token.model);
  LoadId(bytes, kKeyspaceAt, token.keyspace.id);
  LoadId(bytes, kWatchedAt, token.keyspace.watched);
  LoadId(bytes, kLastKeyAt, token.last_key);
  for (uint32_t i = 0; i < pages; ++i) {
    const auto tier = static_cast<uint8_t>(bytes[kTiersAt + i]);
    if (!KnownTier(tier)) return absl::DataLossError("a token names an unknown tier");
    token.tiers.push_back(static_cast<Tier>(tier));
  }
  if (token.keyspace.history_format != kernels::PageFormat::kInt2 &&
      token.keyspace.history_format != kernels::PageFormat::kBf16) {
    return absl::DataLossError("a token names an unknown page format");
  }
  return token;
}

}  // namespace crumb::client
