// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace crumb::server {

// The project's version, as the build sets it.
inline constexpr char kVersion[] = CRUMB_VERSION;

}  // namespace crumb::server
