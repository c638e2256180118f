// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/keyspaces/keyspace.h"

#include "common/status_macros.h"
#include "fmt/format.h"

namespace crumb::server {
namespace {

constexpr uint32_t kLayersMax = 1024;
constexpr uint32_t kKvHeadsMax = 1024;

bool IsOneOf(uint32_t value, uint32_t a, uint32_t b, uint32_t c) {
  return value == a || value == b || value == c;
}

}  // namespace

absl::Status Geometry::Validate() const {
  const auto wrong = [](const char* field, uint32_t value, const std::string& bound) {
    return absl::InvalidArgumentError(fmt::format("{} is {}, must be {}", field, value, bound));
  };
  if (layers < 1 || layers > kLayersMax) {
    return wrong("layers", layers, fmt::format("from 1 to {}", kLayersMax));
  }
  if (kv_heads < 1 || kv_heads > kKvHeadsMax) {
    return wrong("kv_heads", kv_heads, fmt::format("from 1 to {}", kKvHeadsMax));
  }
  if (layers * kv_heads > static_cast<uint32_t>(kFragmentTilesMax)) {
    return wrong("layers * kv_heads", layers * kv_heads,
                 fmt::format("at most {}", kFragmentTilesMax));
  }
  if (!IsOneOf(head_dim, 64, 128, 256)) return wrong("head_dim", head_dim, "64, 128 or 256");
  if (!IsOneOf(group_size, 32, 64, 128) || group_size > head_dim) {
    return wrong("group_size", group_size, "32, 64 or 128 and at most head_dim");
  }
  return absl::OkStatus();
}

// Two bits per element of K and of V; a scale and a minimum of two bytes per row and group, of
// both.
uint32_t Geometry::int2_tile_bytes() const {
  constexpr uint32_t kTokens = kPageTokens;
  return kTokens * head_dim / 2 + 8 * kTokens * (head_dim / group_size);
}

uint32_t Geometry::bf16_tile_bytes() const { return 4 * kPageTokens * head_dim; }

absl::Status Keyspace::CheckHeader(const FragmentHeader& header) const {
  if (header.keyspace != id) {
    return absl::InvalidArgumentError("the header names keyspace " + header.keyspace.ToHex() +
                                      ", not " + id.ToHex());
  }
  if (header.generation != generation.load()) {
    return absl::InvalidArgumentError(fmt::format(
        "the header's generation is {}, the keyspace's {}", header.generation, generation.load()));
  }
  if (header.page_tokens != kPageTokens) {
    return absl::InvalidArgumentError(
        fmt::format("the header's page has {} tokens, not {}", header.page_tokens, kPageTokens));
  }
  if (header.format == PageFormat::kInt2 && !int2_history) {
    return absl::InvalidArgumentError("an INT2 page in a keyspace of BF16 pages");
  }
  if (header.tile_bytes != geometry.tile_bytes(header.format)) {
    return absl::InvalidArgumentError(fmt::format("tiles have {} bytes, the keyspace's {}",
                                                  header.tile_bytes,
                                                  geometry.tile_bytes(header.format)));
  }
  const TileRange all = geometry.all_tiles();
  if (header.range.tiles() == 0 || !all.layers.Contains(header.range.layers) ||
      !all.heads.Contains(header.range.heads)) {
    return absl::InvalidArgumentError("the header's layers or heads are not the keyspace's");
  }
  return absl::OkStatus();
}

absl::StatusOr<TileRange> Keyspace::CheckRange(uint32_t layer_begin, uint32_t layer_end,
                                               uint32_t head_begin, uint32_t head_end) const {
  const auto check = [](const char* what, uint32_t begin, uint32_t end, uint32_t count) {
    if (begin < end && end <= count) return absl::OkStatus();
    return absl::InvalidArgumentError(
        fmt::format("range.{}_begin and range.{}_end are {} and {}, must be a range within 0 to {}",
                    what, what, begin, end, count));
  };
  CRUMB_RETURN_IF_ERROR(check("layer", layer_begin, layer_end, geometry.layers));
  CRUMB_RETURN_IF_ERROR(check("head", head_begin, head_end, geometry.kv_heads));
  return TileRange{{static_cast<uint16_t>(layer_begin), static_cast<uint16_t>(layer_end)},
                   {static_cast<uint16_t>(head_begin), static_cast<uint16_t>(head_end)}};
}

}  // namespace crumb::server
