// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "crumb/transfer.h"
#include "kernels/bf16.h"

namespace crumb::client {

// Checks the shape of a cache for `layers` layers. kInvalidArgument names the wrong field.
absl::Status CheckCache(const PagedCache& cache, int layers);

// Checks that `blocks` covers pages [first_page, end_page) and that every block of them lies in the
// cache. kInvalidArgument.
absl::Status CheckBlocks(const PagedCache& cache, std::span<const int64_t> blocks, int first_page,
                         int end_page);

// Copies the rows of page `page` of one KV head to rows [64, head_dim].
// REQUIRES: CheckCache has passed for the cache, and CheckBlocks for the page.
//
// Rows of a page are BF16: FP8 elements are multiplied by PagedRows::scale and rounded once. A page
// may begin inside a block and span several.
void GatherPage(const PagedRows& rows, RowElement element, int block_tokens,
                std::span<const int64_t> blocks, int page, int head, int head_dim,
                kernels::Bf16* to);

// The inverse of GatherPage.
void ScatterPage(const kernels::Bf16* from, RowElement element, int block_tokens,
                 std::span<const int64_t> blocks, int page, int head, int head_dim,
                 const PagedRows& rows);

}  // namespace crumb::client
