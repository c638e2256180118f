// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace crumb::bench {

// Makes SIGINT and SIGTERM ask for an end instead of ending the process.
void CatchInterrupts();

// One of them came. Loops look and return what they have.
bool Interrupted();

}  // namespace crumb::bench
