// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace crumb::server {

// Returns the value of a series, with its labels, in a scrape of an admin port. -1 when the port
// does not serve the page; a page without the series fails the test.
double SeriesOf(const std::string& admin, const std::string& series);

}  // namespace crumb::server
