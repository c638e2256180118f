// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ucs/type/status.h>

#include <string>

#include "absl/status/status.h"

namespace crumb::transport {

// The one mapping of UCX's codes to ours; the message is `what` and UCX's text.
absl::Status FromUcs(ucs_status_t status, const std::string& what);

}  // namespace crumb::transport
