// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace crumb::server {

// The value of an unlabelled or labelled series in a scrape of an admin port; -1 when it is not
// there.
double SeriesOf(const std::string& admin, const std::string& series);

}  // namespace crumb::server
