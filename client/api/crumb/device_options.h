// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"

namespace crumb::client {

// An ordered queue of work on a device: a cudaStream_t, passed on as it is.
using DeviceStream = struct DeviceStreamHandle*;

// What a DeviceWorker keeps in device memory. All of it but bf16_pages is allocated when the worker
// is opened: docs/device_worker.md has the bytes.
struct DeviceWorkerOptions {
  int pages = 4096;  // INT2 pages
  // BF16 history pages, of seven times their size: allocated when the first sequence with BF16
  // history begins, because INT2 was given up, and kept from then on. 0: none, such sequences
  // cannot begin.
  int bf16_pages = 512;
  int sequences = 64;     // that hold tokens at once, forks included
  int prompts = 2;        // of those, inside their prompt: each has the rows of a prefill block
  int loads = 4;          // fetched prefixes that are on their way to the device at once
  int load_pages = 2048;  // pages of one of them; what is longer is cut
  // Layers of a fetched prefix, the first ones, that a kernel reads and sums on the way: each is
  // there sooner, but it takes multiprocessors from other work. The copy engines bring the others
  // in larger and larger groups, and what is not pinned.
  int load_kernel_layers = 1;
  int passes_in_flight = 4;  // of a batch, queued on its stream
  int evict_results = 8;     // evict launches whose results the host has not looked at yet

  // crumbd's memory is pinned in the background, once for each connection, in pieces of so many
  // bytes, a multiple of the huge pages' size; 0: not at all, and copies are slower.
  size_t pin_piece_bytes = size_t{256} << 20;

  // Pages that are attended where they lie are summed again, so many a second at most, by a thread
  // and on a stream of their own: one of WorkerOptions::verify_every of each prefix soon after it
  // begins, and all that the worker holds, one after the other. 0: none.
  int scrub_pages_per_second = 64;

  // Device pools, which workers of a tenant on one device share under crumbd's account: pages are
  // made and loaded there as long as there are blank slots, else in the private `pages`; others'
  // pages are attended where they lie. 0: none, and all slots are private. docs/device_worker.md.
  uint64_t pool_bytes = 0;                           // of INT2 pages, whoever gave the memory
  uint64_t pool_sink_bytes = uint64_t{256} << 20;    // of sinks, the first pages of sequences
  uint64_t pool_handle_bytes = uint64_t{256} << 20;  // of one piece of device memory
  int pool_blank_pages = 256;                        // slots kept ready for windows that leave
  int pool_blank_sinks = 4;
  // Pages that are made here are also copied to crumbd's memory at once, from where they reach its
  // SSD and other nodes. False: only when their slots are needed.
  bool pool_write_through = true;
  // Other devices of this host, by ordinal, whose pools are looked into, too: what is there is
  // copied from device to device.
  std::vector<int> pool_peers = {};

  // kInvalidArgument naming the field that is wrong.
  absl::Status Validate() const;
};

// What a DeviceWorker has of its device's pools now, and has done there.
struct DevicePoolUse {
  bool joined = false;
  uint64_t handles = 0;           // mapped
  uint64_t blank_slots = 0;       // ready
  uint64_t held_slots = 0;        // of live sequences, blank ones included
  uint64_t pages_demoted = 0;     // copied to staging memory because crumbd needed their slots
  uint64_t demotions_failed = 0;  // of those asked for
  uint64_t out_of_slots = 0;      // times a private slot was taken because none was ready
  uint64_t slots_reclaimed = 0;   // held slots that a crumbd that was restarted knows again
};

// What the passes of a batch are: kPrompt brings chunks of prompts, kDecode the next tokens behind
// them, drafts included.
enum class PassKind { kPrompt, kDecode };

// Elements of attention's output.
enum class DeviceOutput { kBf16, kF32 };

// A batch's fixed sizes: they decide grids and workspaces, so that one captured graph serves every
// decode pass.
struct DeviceBatchOptions {
  DeviceStream stream = nullptr;  // the engine's, borrowed; null is the default stream
  PassKind kind = PassKind::kDecode;
  int sequences = 1;  // places
  // kDecode: of every sequence in every pass, 1 to 8; kPrompt: of one sequence in one pass at most.
  int tokens = 1;
  int pages = 2048;  // of one sequence
  DeviceOutput output = DeviceOutput::kBf16;
};

}  // namespace crumb::client
