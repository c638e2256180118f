// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"

namespace crumb::client {

// DeviceStream is an ordered queue of work on a device: a cudaStream_t, which is passed on
// unchanged.
using DeviceStream = struct DeviceStreamHandle*;

// DeviceWorkerOptions size the memory that a DeviceWorker keeps on its device. All of it except
// bf16_pages is allocated when the worker is opened; docs/device_worker.md lists the bytes.
struct DeviceWorkerOptions {
  int pages = 4096;  // INT2 pages in private slots
  // BF16 history pages, which are seven times as large as INT2 pages. They are allocated when the
  // first sequence with BF16 history begins, that is, after INT2 was given up, and kept from then
  // on. 0: there are none, and such sequences cannot begin.
  int bf16_pages = 512;
  int sequences = 64;  // sequences that hold tokens at once, forks included
  int prompts = 2;  // sequences inside their prompt at once; each has the rows of a prefill block
  int loads = 4;    // fetched prefixes that are copied to the device at once
  int load_pages = 2048;  // pages of one fetched prefix; a longer prefix is cut
  // Number of leading layers of a fetched prefix that a kernel reads and verifies during the copy.
  // These layers arrive sooner, but the kernel takes SMs from other work. The copy engines bring
  // the other layers, in growing groups, and all memory that is not pinned.
  int load_kernel_layers = 1;
  int passes_in_flight = 4;  // passes of a batch that may be queued on its stream
  int evict_results = 8;     // evict launches whose results the host has not read yet

  // Bytes of one step in which crumbd's memory is pinned in the background, once per connection; a
  // multiple of the huge page size. 0: it is not pinned, and copies are slower.
  size_t pin_piece_bytes = size_t{256} << 20;

  // Upper bound on the pages per second whose checksums are verified again in device memory, by a
  // thread and on a stream of its own: one of WorkerOptions::verify_every pages of each prefix soon
  // after it begins, and all pages of the worker in turn. 0: none.
  int scrub_pages_per_second = 64;

  // Device pools, which all workers of a tenant on one device have in common and crumbd accounts
  // for. Pages are made and loaded in a pool as long as it has blank slots, otherwise in the
  // private `pages`. Pages of other workers are attended in place. 0: there are no pools, and all
  // slots are private. See docs/device_worker.md.
  // size of the pool of INT2 pages, by whichever process its memory was allocated
  uint64_t pool_bytes = 0;
  // size of the pool of sinks, the first pages of sequences
  uint64_t pool_sink_bytes = uint64_t{256} << 20;
  uint64_t pool_handle_bytes = uint64_t{256} << 20;  // size of one allocation of device memory
  int pool_blank_pages = 256;                        // blank slots kept ready for evicted windows
  int pool_blank_sinks = 4;
  // Pages made by this worker are also copied to crumbd's memory at once, from where they reach its
  // SSD and other nodes. False: they are copied only if their slots are needed.
  bool pool_write_through = true;
  // Ordinals of other devices of this host whose pools are searched as well. Their pages are copied
  // from device to device.
  std::vector<int> pool_peers = {};

  // kInvalidArgument names the field that is wrong.
  absl::Status Validate() const;
};

// DevicePoolUse has the present use of the device's pools by a DeviceWorker, and counts its events
// there.
//
// `joined` to `held_slots` are the present state, the other fields count events since the worker
// was opened. A growing out_of_slots means that pool_blank_pages is too small for the windows that
// are evicted at once, or that the pool is full.
struct DevicePoolUse {
  bool joined = false;
  uint64_t handles = 0;        // allocations of device memory that are mapped
  uint64_t blank_slots = 0;    // blank slots that are ready
  uint64_t held_slots = 0;     // slots held by live sequences, blank ones included
  uint64_t pages_demoted = 0;  // pages copied to staging memory because crumbd needed their slots
  uint64_t demotions_failed = 0;  // requested demotions that failed
  uint64_t out_of_slots = 0;      // times a private slot was taken because no pool slot was ready
  uint64_t slots_reclaimed = 0;   // held slots that a restarted crumbd has accepted again
};

// PassKind says which tokens the passes of a batch bring: chunks of prompts, or the next tokens of
// decoding sequences, including drafts.
enum class PassKind { kPrompt, kDecode };

// DeviceOutput is the element type of attention's output.
enum class DeviceOutput { kBf16, kF32 };

// DeviceBatchOptions are a batch's fixed sizes. They determine grids and workspaces, so that one
// captured graph serves every decode pass.
struct DeviceBatchOptions {
  DeviceStream stream = nullptr;  // the engine's stream, borrowed; null is the default stream
  PassKind kind = PassKind::kDecode;
  int sequences = 1;  // capacity of a pass
  // Tokens per sequence of a pass: exactly this number, 1 to 8, for kDecode; at most this number
  // for kPrompt.
  int tokens = 1;
  int pages = 2048;  // maximum of one sequence
  DeviceOutput output = DeviceOutput::kBf16;
};

}  // namespace crumb::client
