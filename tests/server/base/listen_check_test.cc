// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/base/listen_check.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

#include "common/fd_channel.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/common/temporary_folder.h"

namespace crumb::server {
namespace {

using testing::HasSubstr;

TEST(ListenCheckTest, UnixSockets) {
  const TemporaryFolder folder;
  const std::string path = folder.path() + "/a.sock";
  EXPECT_TRUE(CheckUnixSocketFree(path).ok());
  {
    const UniqueFd living = ListenFdChannel(path).value();
    EXPECT_EQ(CheckUnixSocketFree(path).code(), absl::StatusCode::kAlreadyExists);
  }
  EXPECT_TRUE(CheckUnixSocketFree(path).ok());  // no process listens there
  std::ofstream(folder.path() + "/file") << "x";
  EXPECT_EQ(CheckUnixSocketFree(folder.path() + "/file").code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(CheckUnixSocketFree(folder.path() + "/none/a.sock").code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(CheckUnixSocketFree(folder.path() + "/file/a.sock").code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(CheckUnixSocketFree(folder.path() + "/" + std::string(200, 'a')).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(CheckUnixSocketFree("").code(), absl::StatusCode::kInvalidArgument);
}

TEST(ListenCheckTest, TcpPorts) {
  const UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  ASSERT_EQ(::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(::listen(socket.get(), 1), 0);
  ASSERT_EQ(::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
  const absl::Status taken = CheckTcpFree("some.key", {"127.0.0.1", ntohs(address.sin_port)});
  EXPECT_EQ(taken.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(taken.message()), HasSubstr("some.key 127.0.0.1:"));
  EXPECT_TRUE(CheckTcpFree("some.key", {"127.0.0.1", 0}).ok());
  EXPECT_FALSE(CheckTcpFree("some.key", {"192.0.2.1", 0}).ok());  // not ours
}

}  // namespace
}  // namespace crumb::server
