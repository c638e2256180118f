// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace crumb {

// PageFormat is the number format of a page's rows. The values are persisted in fragment headers
// and sent (PageFormat of proto/crumb/v1/page.proto), so they are frozen. The header includes
// nothing of ours, because the kernels include it, too.
enum class PageFormat : uint8_t { kBf16 = 1, kInt2 = 2 };

// Alignment of page tiles in memory, in bytes: kernels read them with vector loads and bulk copies.
inline constexpr size_t kTileAlignment = 128;

}  // namespace crumb
