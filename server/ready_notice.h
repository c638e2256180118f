// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "absl/status/status.h"

namespace crumb::server {

// Tells the service manager a state such as "READY=1": one datagram to the socket that `socket`
// names, a path or "@name" of an abstract one, as systemd passes in NOTIFY_SOCKET. kOk when
// `socket` is empty: no service manager waits.
absl::Status SendNotice(const std::string& socket, const std::string& state);

}  // namespace crumb::server
