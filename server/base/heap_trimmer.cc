// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/base/heap_trimmer.h"

#include <malloc.h>

#include <algorithm>

namespace crumb::server {

HeapBytes ReadHeapBytes() {
  const struct mallinfo2 info = ::mallinfo2();
  return {info.uordblks + info.hblkhd, info.fordblks};
}

void HeapTrimmer::TrimIfWorthwhile() {
  const uint64_t free = ReadHeapBytes().free;
  trimmed_bytes_ = std::min(trimmed_bytes_, free);
  if (free - trimmed_bytes_ < freed_bytes_min_) return;
  ::malloc_trim(/*pad=*/0);
  trimmed_bytes_ = free;
}

}  // namespace crumb::server
