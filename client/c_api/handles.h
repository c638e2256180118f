// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstring>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "crumb.h"
#include "crumb/block_attention.h"
#include "crumb/client.h"
#include "crumb/device_block_attention.h"
#include "crumb/device_worker.h"
#include "crumb/transfer.h"
#include "crumb/worker.h"
#include "crumb_blocks.h"
#include "crumb_device.h"
#include "crumb_transfer.h"

// The objects behind the opaque handles of the C interface. A handle owns its object and, by
// shared_ptr, everything that the object uses, so that a caller may close handles in any order.
// Members are destroyed in reverse order, a worker before its client.
struct crumb_client {
  std::shared_ptr<crumb::client::Client> client;
};

struct crumb_worker {
  std::shared_ptr<crumb::client::Client> client;  // null: none
  std::shared_ptr<crumb::client::Worker> worker;
};

struct crumb_sequence {
  crumb_worker parts;
  std::unique_ptr<crumb::client::Sequence> sequence;
};

struct crumb_transfer {
  std::shared_ptr<crumb::client::Client> client;
  std::shared_ptr<crumb::client::Transfer> transfer;
};

struct crumb_transfer_lease {
  crumb_transfer parts;
  std::shared_ptr<const crumb::client::Lease> lease;
};

struct crumb_page_load {
  crumb_transfer parts;
  std::unique_ptr<crumb::client::PageLoad> load;
};

struct crumb_page_store {
  crumb_transfer parts;
  std::unique_ptr<crumb::client::PageStore> store;
};

struct crumb_block_attention {
  std::unique_ptr<crumb::client::BlockAttention> attention;
};

struct crumb_device {
  std::shared_ptr<crumb::client::Device> device;
};

struct crumb_device_blocks {
  std::shared_ptr<crumb::client::Device> device;
  std::unique_ptr<crumb::client::DeviceBlockAttention> attention;
};

struct crumb_device_worker {
  std::shared_ptr<crumb::client::Client> client;  // null: none
  std::shared_ptr<crumb::client::Device> device;
  std::shared_ptr<crumb::client::DeviceWorker> worker;
};

struct crumb_device_sequence {
  crumb_device_worker parts;
  std::unique_ptr<crumb::client::DeviceSequence> sequence;
};

struct crumb_device_batch {
  crumb_device_worker parts;
  std::unique_ptr<crumb::client::DeviceBatch> batch;
};

namespace crumb::c_api {

// Keeps the status for crumb_message and returns its code.
//
// OK leaves the thread's text as it is.
crumb_code Finish(const absl::Status& status);
// Returns the text of crumb_message on this thread.
std::string& MessageOfThread();

inline std::string Text(const char* text, const char* absent = "") {
  return text == nullptr ? absent : text;
}

// Returns a caller's struct as this library knows it, with zeros for members that the caller's
// header does not have. A null struct, or one without size, becomes all zeros.
template <typename Options>
Options Known(const Options* given) {
  Options options{};
  if (given != nullptr) std::memcpy(&options, given, std::min(given->size, sizeof(Options)));
  return options;
}

// Runs `body`, which returns an absl::Status, and lets no exception leave the library.
template <typename Body>
crumb_code Guarded(const Body& body) {
  try {
    return Finish(body());
  } catch (const std::exception& error) {
    return Finish(absl::InternalError(error.what()));
  } catch (...) {
    return Finish(absl::InternalError("an exception that is none of std's"));
  }
}

}  // namespace crumb::c_api
