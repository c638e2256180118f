// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "crumb/device_stream.h"

namespace crumb::client {

// What a DeviceWorker keeps in device memory. All of it is allocated when the worker is opened:
// docs/client.md has the bytes.
struct DeviceWorkerOptions {
  int pages = 4096;          // INT2 pages
  int sequences = 64;        // that hold tokens at once, forks included
  int prompts = 2;           // of those, inside their prompt: each has the rows of a prefill block
  int loads = 4;             // fetched prefixes that are on their way to the device at once
  int load_pages = 2048;     // pages of one of them; what is longer is cut
  int passes_in_flight = 4;  // of a batch, queued on its stream
  int evict_results = 8;     // evict launches whose results the host has not looked at yet

  // crumbd's memory is pinned in the background, once for each connection, in pieces of so many
  // bytes, a multiple of the huge pages' size; 0: not at all, and copies are slower.
  size_t pin_piece_bytes = size_t{256} << 20;

  // kInvalidArgument naming the field that is wrong.
  absl::Status Validate() const;
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
