// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

// The layout of blocks of an engine's own pool, which hold a request's INT2 history and BF16 rows.
// The CPU and the CUDA kernels both use this header: plain data and functions for host and device.
// It needs no CUDA header.
#if defined(__CUDACC__)
#define CRUMB_HOST_DEVICE __host__ __device__
#else
#define CRUMB_HOST_DEVICE
#endif

namespace crumb::kernels {

inline constexpr int kBlockTokens = 64;

// BlockGeometry says how the cache of one request fills an engine's blocks. All blocks have one
// size: per layer, an INT2 tile for each KV head, head by head.
//
// - A history block holds the tiles of 64 tokens. It is the fragment that crumbd stores.
// - Sink and recent blocks hold BF16 rows, `rows_per_block` for each KV head in the tile's place: a
//   row is K and behind it V of one token. The row of position p < 64 is row p of the request's
//   sink blocks. Row 0 of its recent blocks is a header; the row of position p >= 64 is row
//   recent_row(p).
struct BlockGeometry {
  int tile_bytes = 0;
  int rows_per_block = 0;
  int sink_blocks = 0;    // per request
  int recent_blocks = 0;  // per request
  int recent_tokens = 0;  // tokens that are attended in BF16 at least

  CRUMB_HOST_DEVICE constexpr int recent_capacity() const {
    return rows_per_block * recent_blocks - 1;
  }
  // REQUIRES: position >= 64.
  CRUMB_HOST_DEVICE constexpr int recent_row(int position) const {
    return 1 + (position - kBlockTokens) % recent_capacity();
  }
  // Returns the end of the history that the token at `position` attends. `hit` tokens of its
  // request were computed when the request began.
  CRUMB_HOST_DEVICE constexpr int HistoryEnd(int position, int hit) const {
    const int old = position + 1 > recent_tokens ? position + 1 - recent_tokens : 0;
    const int end = old / kBlockTokens * kBlockTokens;
    const int least = hit > kBlockTokens ? hit : kBlockTokens;
    return end > least ? end : least;
  }
};

// One group's block ids of every request: those of request r begin at blocks[r * stride].
struct BlockTable {
  const int32_t* blocks = nullptr;
  int64_t stride = 0;  // entries per request; ids behind the last are never read
};

inline constexpr uint32_t kBlockHeaderMagic = 0x314b4c42;  // "BLK1"

// Row 0 of a request's recent blocks, in the place of the first KV head.
struct BlockHeader {
  uint32_t magic;  // 0: the request is new
  int32_t hit;     // tokens that were computed when the request began
  int32_t length;  // tokens whose rows were stored
};

enum class BlockStart : uint8_t {
  kValid,
  kInsideWindow,  // a new request begins inside a window
  kRowsMissing,   // rows of earlier tokens are missing
};

// Checks that a request can continue with the fresh tokens at positions [begin, end), and advances
// its header. If it cannot, the header must not be stored.
CRUMB_HOST_DEVICE constexpr BlockStart StartTokens(const BlockGeometry& geometry, int begin,
                                                   int end, BlockHeader* header) {
  if (header->magic == 0) {
    if (begin % kBlockTokens != 0) return BlockStart::kInsideWindow;
    *header = {kBlockHeaderMagic, begin, begin};
  }
  // Rows that a later step wrote may have replaced rows that are needed again.
  const int oldest = header->length - geometry.recent_capacity();
  const bool rows_are_there =
      begin == header->length ||
      (begin < header->length && geometry.HistoryEnd(begin, header->hit) >= oldest);
  if (header->magic != kBlockHeaderMagic || header->hit > begin || !rows_are_there) {
    return BlockStart::kRowsMissing;
  }
  header->length = end;
  return BlockStart::kValid;
}

}  // namespace crumb::kernels
