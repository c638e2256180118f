// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "transport/transport_options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>

namespace crumb::transport {
namespace {

using ::testing::HasSubstr;

class NameCollector final : public ConfigVisitor {
 public:
  void Field(const char* name, std::string&, const char*) override { names.push_back(name); }
  void Field(const char* name, bool&, const char*) override { names.push_back(name); }
  void Field(const char* name, int64_t&, const char*) override { names.push_back(name); }
  void Field(const char* name, double&, const char*) override { names.push_back(name); }
  void Field(const char* name, ByteSize&, const char*) override { names.push_back(name); }
  void Field(const char* name, Duration&, const char*) override { names.push_back(name); }
  void Field(const char* name, std::vector<std::string>&, const char*) override {
    names.push_back(name);
  }
  void Section(const char*, const std::function<void()>& fields) override { fields(); }

  std::vector<std::string> names;
};

std::string Invalid(const std::function<void(TransportOptions&)>& change) {
  TransportOptions options;
  change(options);
  const absl::Status status = options.Validate();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  return std::string(status.message());
}

TEST(TransportOptionsTest, DefaultsAreValid) {
  EXPECT_TRUE(TransportOptions().Validate().ok());
  EXPECT_LT(TransportOptions().FrameBytes(), TransportOptions().segment_bytes.value);
  TransportOptions all;
  all.ucx_tls.clear();
  EXPECT_EQ(all.FrameBytes(), size_t{1} << 20);
}

TEST(TransportOptionsTest, ErrorsNameTheKey) {
  EXPECT_THAT(Invalid([](auto& o) { o.fetches_max = 0; }), HasSubstr("transport.fetches_max"));
  EXPECT_THAT(Invalid([](auto& o) { o.serves_max = -1; }), HasSubstr("transport.serves_max"));
  EXPECT_THAT(Invalid([](auto& o) { o.fetch_pages_max = 9000; }), HasSubstr("fetch_pages_max"));
  EXPECT_THAT(Invalid([](auto& o) { o.segment_bytes.value = 1; }), HasSubstr("segment_bytes"));
  EXPECT_THAT(Invalid([](auto& o) { o.frame_bytes.value = 1 << 30; }), HasSubstr("frame_bytes"));
  EXPECT_THAT(Invalid([](auto& o) { o.serve_bytes_max.value = 0; }), HasSubstr("serve_bytes_max"));
  EXPECT_THAT(Invalid([](auto& o) { o.quarantine_for = {}; }), HasSubstr("quarantine_for"));
  EXPECT_THAT(Invalid([](auto& o) { o.reconnect_after_max = {}; }), HasSubstr("reconnect_after"));
  EXPECT_THAT(Invalid([](auto& o) { o.poll_for = std::chrono::seconds(1); }),
              HasSubstr("poll_for"));
}

TEST(TransportOptionsTest, TheDocumentNamesEveryKey) {
  NameCollector collector;
  TransportOptions options;
  options.Visit(collector);
  EXPECT_GE(collector.names.size(), 15u);
  std::ifstream file("docs/transport.md");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  for (const std::string& name : collector.names) EXPECT_THAT(text, HasSubstr("`" + name + "`"));
}

}  // namespace
}  // namespace crumb::transport
