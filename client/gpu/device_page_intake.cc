// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/gpu/device_page_intake.h"

#include <string>

namespace crumb::client {

void DevicePageIntake::NamePools(AcquireRequest* request) const {
  if (parts_.pools != nullptr) parts_.pools->NamePools(request);
}

HeldPages DevicePageIntake::Hold(std::span<const DeviceFragment* const> fragments,
                                 const std::shared_ptr<const Lease>& lease) {
  if (parts_.pools == nullptr) {
    return {{}, absl::NotFoundError("this worker takes part in no device pool")};
  }
  return parts_.pools->Hold(fragments, lease, parts_.pages, parts_.sinks);
}

absl::Status DevicePageIntake::ProvideFor(const KeyspaceBinding& keyspace) {
  if (keyspace.history_format != kernels::PageFormat::kBf16) return absl::OkStatus();
  const int count = parts_.device_options.bf16_pages;
  const size_t bytes = parts_.geometry.page_bytes(kernels::PageFormat::kBf16) * count;
  absl::Status provided = parts_.bf16_pages.Provide();
  if (count > 0 && !absl::IsResourceExhausted(provided)) return provided;
  return absl::ResourceExhaustedError("sequences of " + parts_.options.model +
                                      " store BF16 now, and there is no device memory for " +
                                      std::to_string(count) + " BF16 pages of " +
                                      std::to_string(bytes) +
                                      " bytes in all (bf16_pages of DeviceWorkerOptions)");
}

std::unique_ptr<PageIntake::Prefix> DevicePageIntake::NewPrefix(
    const std::shared_ptr<const KeyspaceBinding>& keyspace, int pages_max) {
  // If there is no memory for its pages, the sequence cannot begin either.
  return parts_.loader.NewPrefix(keyspace, ProvideFor(*keyspace).ok() ? pages_max : 0);
}

}  // namespace crumb::client
