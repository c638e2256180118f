// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/server/series.h"

#include "gtest/gtest.h"
#include "httplib.h"

namespace crumb::server {

double SeriesOf(const std::string& admin, const std::string& series) {
  httplib::Client client("http://" + admin);
  const auto result = client.Get("/metrics");
  if (!result) return -1;
  const size_t at = result->body.find("\n" + series + " ");
  EXPECT_NE(at, std::string::npos) << "there is no series " << series;
  return at == std::string::npos ? -1 : std::stod(result->body.substr(at + series.size() + 2));
}

}  // namespace crumb::server
