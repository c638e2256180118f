// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/worker/keyspace_binding.h"

#include <utility>

#include "common/hex.h"
#include "common/keyspace.h"
#include "common/status_macros.h"
#include "fmt/format.h"

namespace crumb::client {
namespace {

std::string RotationField(const RotationSet& rotations) {
  const bool named = rotations.name() == "identity" || rotations.name() == "hadamard";
  return named ? rotations.name() : HexEncode(rotations.digest());
}

// Sets the fields of the quantizer, on which BF16 pages do not depend.
absl::Status SetQuantizer(const WorkerOptions& options, KeyspaceDescription& description) {
  CRUMB_RETURN_IF_ERROR(
      description.Set("method", std::string(kernels::MethodName(options.method))));
  CRUMB_RETURN_IF_ERROR(description.Set("clip_k", fmt::format("{}", options.clip_k)));
  CRUMB_RETURN_IF_ERROR(description.Set("clip_v", fmt::format("{}", options.clip_v)));
  return description.Set("rotation", RotationField(options.rotations));
}

absl::StatusOr<KeyspaceDescription> Describe(const WorkerOptions& options,
                                             kernels::PageFormat format) {
  const bool int2 = format == kernels::PageFormat::kInt2;
  KeyspaceDescription description;
  const std::pair<const char*, std::string> fields[] = {
      {"model", options.model},
      {"weights", options.weights},
      {"format", int2 ? "int2" : "bf16"},
      {"rope", options.rope},
      {"v_basis", options.v_basis},
      {"prefill_block", std::to_string(options.prefill_block)},
      {"page_tokens", std::to_string(kPageTokens)},
      {"layout", std::to_string(kernels::kTileLayoutId)},
  };
  for (const auto& [name, value] : fields) CRUMB_RETURN_IF_ERROR(description.Set(name, value));
  if (int2) CRUMB_RETURN_IF_ERROR(SetQuantizer(options, description));
  for (const auto& [name, value] : options.fields) {
    CRUMB_RETURN_IF_ERROR(description.Set(name, value));
  }
  return description;
}

}  // namespace

absl::StatusOr<std::map<std::string, std::string>> KeyspaceFields(const WorkerOptions& options,
                                                                  kernels::PageFormat format) {
  CRUMB_ASSIGN_OR_RETURN(const KeyspaceDescription description, Describe(options, format));
  return description.fields();
}

absl::StatusOr<KeyspaceId> PrivateKeyspace(const WorkerOptions& options,
                                           kernels::PageFormat format) {
  CRUMB_ASSIGN_OR_RETURN(KeyspaceDescription description, Describe(options, format));
  const std::pair<const char*, int> geometry[] = {{"layers", options.layers},
                                                  {"kv_heads", options.kv_heads},
                                                  {"head_dim", options.head_dim},
                                                  {"group_size", options.group_size}};
  for (const auto& [name, value] : geometry) {
    CRUMB_RETURN_IF_ERROR(description.Set(name, std::to_string(value)));
  }
  return description.Id();
}

}  // namespace crumb::client
