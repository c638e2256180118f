// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/base/tcp_listener.h"

#include "gtest/gtest.h"

namespace crumb::server {
namespace {

TEST(TcpListener, HostAndPort) {
  EXPECT_EQ(ParseHostPort("k", "127.0.0.1:80")->port, 80);
  EXPECT_EQ(ParseHostPort("k", "[::1]:0")->host, "::1");
  EXPECT_EQ(ParseHostPort("k", "localhost:65535")->host, "localhost");
  for (const char* text : {"", ":", ":80", "host", "host:", "host:65536", "host:-1", "::1:80",
                           "[]:80", "[::1:80", "host:8x"}) {
    EXPECT_FALSE(ParseHostPort("k", text).ok()) << text;
  }
}

}  // namespace
}  // namespace crumb::server
