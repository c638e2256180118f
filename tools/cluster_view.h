// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "crumb/cluster_info.h"
#include "nlohmann/json.hpp"

// What `crumb nodes` and `crumb where` show.
namespace crumb::tools {

std::string NodesText(const client::NodeList& list);
nlohmann::json NodesJson(const client::NodeList& list);

std::string PlaceText(const client::PagePlace& place);
nlohmann::json PlaceJson(const client::PagePlace& place);

}  // namespace crumb::tools
