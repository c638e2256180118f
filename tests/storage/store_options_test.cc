// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/store_options.h"

#include "gtest/gtest.h"

namespace crumb::storage {
namespace {

TEST(StoreOptions, TheDefaultsAreValid) {
  StoreOptions options;
  EXPECT_TRUE(options.Validate().ok());
  options.ssd.path = "/some/folder";
  EXPECT_TRUE(options.Validate().ok());
}

TEST(StoreOptions, ErrorsNameTheSetting) {
  const auto error_of = [](auto change) {
    StoreOptions options;
    options.ssd.path = "/some/folder";
    change(options);
    const absl::Status status = options.Validate();
    EXPECT_TRUE(absl::IsInvalidArgument(status));
    return std::string(status.message());
  };
  const auto names = [](const std::string& text, const char* setting) {
    return text.find(setting) != std::string::npos;
  };
  EXPECT_TRUE(names(error_of([](auto& o) { o.host.bytes_max.value = 1; }), "host.bytes_max"));
  EXPECT_TRUE(names(error_of([](auto& o) { o.host.policy = "best"; }), "best"));
  EXPECT_TRUE(names(error_of([](auto& o) { o.ssd.policy = "best"; }), "best"));
  EXPECT_TRUE(names(error_of([](auto& o) { o.ssd.bytes_max.value = 1 << 20; }), "ssd.bytes_max"));
  EXPECT_TRUE(names(error_of([](auto& o) { o.ssd.admission = "some"; }), "ssd.admission"));
  EXPECT_TRUE(names(error_of([](auto& o) { o.ssd.io_threads = 0; }), "ssd.io_threads"));
  EXPECT_TRUE(names(error_of([](auto& o) { o.ssd.write_queue_pages_max = 0; }), "write_queue"));
}

TEST(StoreOptions, ValuesOfTheSsdTierCountOnlyIfItHasAFolder) {
  StoreOptions options;
  options.ssd.io_threads = 0;
  EXPECT_TRUE(options.Validate().ok());
  options.ssd.path = "/some/folder";
  EXPECT_EQ(options.Validate().message(), "store.ssd.io_threads is 0, must be from 1 to 256");
}

}  // namespace
}  // namespace crumb::storage
