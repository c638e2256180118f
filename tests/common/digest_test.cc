// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "common/errno_status.h"
#include "common/hex.h"
#include "common/logging.h"
#include "common/sha256.h"

namespace crumb {
namespace {

// FIPS 180-4 example and RFC 4231, case 2.
TEST(Sha256Test, PublishedVectors) {
  EXPECT_EQ(HexEncode(Sha256("abc")),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(HexEncode(HmacSha256("Jefe", "what do ya want for nothing?")),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
}

TEST(HexTest, DecodesOnlyWholeDigits) {
  uint8_t bytes[2];
  EXPECT_TRUE(HexDecode("00fF", bytes));
  EXPECT_EQ(bytes[1], 255);
  EXPECT_FALSE(HexDecode("00f", bytes));
  EXPECT_FALSE(HexDecode("00fff", bytes));
  EXPECT_FALSE(HexDecode("00 f", bytes));
}

TEST(ErrnoStatusTest, CodesSayWhatToDo) {
  EXPECT_EQ(ErrnoStatus(ENOSPC, "x").code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ErrnoStatus(EROFS, "x").code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ErrnoStatus(EADDRINUSE, "x").code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(ErrnoStatus(ENOENT, "opening f").message(), "opening f: No such file or directory");
}

TEST(LoggingTest, SeverityByName) {
  EXPECT_TRUE(SetLogSeverity("warning").ok());
  EXPECT_FALSE(LogEnabled(Severity::kInfo));
  EXPECT_TRUE(LogEnabled(Severity::kError));
  EXPECT_EQ(SetLogSeverity("loud").code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(SetLogSeverity("info").ok());
}

}  // namespace
}  // namespace crumb
