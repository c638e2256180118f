// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "common/clock.h"
#include "crumb/client.h"
#include "tools/command_line.h"
#include "tools/command_result.h"

namespace crumb::tools {

// Runs a command once against the crumbd that `crumbd` is connected to. Calls that take a timeout
// get `timeout`.
CommandResult RunOnCrumbd(const Command& command, Duration timeout, client::Client& crumbd);

}  // namespace crumb::tools
