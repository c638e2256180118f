// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/c_api/core_table.h"
#include "client/c_api/handles.h"

namespace crumb::c_api {

static_assert(CRUMB_OK == static_cast<int>(absl::StatusCode::kOk));
static_assert(CRUMB_INVALID_ARGUMENT == static_cast<int>(absl::StatusCode::kInvalidArgument));
static_assert(CRUMB_DEADLINE_EXCEEDED == static_cast<int>(absl::StatusCode::kDeadlineExceeded));
static_assert(CRUMB_NOT_FOUND == static_cast<int>(absl::StatusCode::kNotFound));
static_assert(CRUMB_RESOURCE_EXHAUSTED == static_cast<int>(absl::StatusCode::kResourceExhausted));
static_assert(CRUMB_FAILED_PRECONDITION == static_cast<int>(absl::StatusCode::kFailedPrecondition));
static_assert(CRUMB_ABORTED == static_cast<int>(absl::StatusCode::kAborted));
static_assert(CRUMB_OUT_OF_RANGE == static_cast<int>(absl::StatusCode::kOutOfRange));
static_assert(CRUMB_UNIMPLEMENTED == static_cast<int>(absl::StatusCode::kUnimplemented));
static_assert(CRUMB_INTERNAL == static_cast<int>(absl::StatusCode::kInternal));
static_assert(CRUMB_UNAVAILABLE == static_cast<int>(absl::StatusCode::kUnavailable));
static_assert(CRUMB_DATA_LOSS == static_cast<int>(absl::StatusCode::kDataLoss));

std::string& MessageOfThread() {
  thread_local std::string message;
  return message;
}

crumb_code Finish(const absl::Status& status) {
  if (status.ok()) return CRUMB_OK;
  MessageOfThread() = std::string(status.message());
  return static_cast<crumb_code>(status.code());
}

const char* Message() { return MessageOfThread().c_str(); }

}  // namespace crumb::c_api

const crumb_core_table* crumb_core() {
  using namespace crumb::c_api;
#define CRUMB_ENTRY(name, function) .name = function,
  static const crumb_core_table table = {CRUMB_CORE_FUNCTIONS(CRUMB_ENTRY)};
#undef CRUMB_ENTRY
  return &table;
}
