// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

namespace crumb::fault {

// Writes a file of tenants into `folder` and returns the configuration that gives each slabs of its
// own. A tenant's token is TokenOf its name.
std::string TenantsWithOwnSlabs(const std::string& folder, const std::vector<std::string>& names);

std::string TokenOf(const std::string& tenant);

}  // namespace crumb::fault
