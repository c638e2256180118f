// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tools/command_line.h"
#include "tools/command_result.h"

namespace crumb::tools {

// Needs no crumbd.
CommandResult RunPageInspect(const PageInspectCommand& command);

}  // namespace crumb::tools
