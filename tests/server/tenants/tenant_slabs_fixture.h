// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/hex.h"
#include "common/sha256.h"
#include "gtest/gtest.h"
#include "server/daemon/daemon.h"
#include "tests/common/temporary_folder.h"
#include "tests/server/series.h"
#include "tests/server/test_client.h"

namespace crumb::server {

inline constexpr uint64_t kSlabBytes = uint64_t{1} << 20;
inline constexpr int kSlabs = 4;
inline constexpr uint8_t kOfA = 0xa7, kOfB = 0xb9;  // bytes that fill the tenants' pages
inline constexpr int kRun = 64;                     // so many of them in a row are one tenant's

class ServerTenantSlabsTest : public testing::Test {
 protected:
  ServerTenantSlabsTest() {
    options_.listen.socket_dir = folder_.path();
    options_.admin.listen = "127.0.0.1:0";
    options_.store.host.bytes_max = ByteSize{kSlabs * kSlabBytes};
    options_.store.host.slab_bytes = ByteSize{kSlabBytes};
    options_.store.ssd.path = folder_.path() + "/data";
    options_.store.ssd.bytes_max = ByteSize{64 << 20};
    options_.tenants.file = folder_.path() + "/tenants.json";
    options_.tenants.shared_memory = "own";
    options_.log.severity = "off";
    options_.Complete();
    const auto entry = [](const std::string& name) {
      return "{\"name\": \"" + name + "\", \"token_sha256\": \"" +
             HexEncode(Sha256("token of " + name)) + "\"}";
    };
    std::ofstream(options_.tenants.file)
        << "{\"tenants\": [" << entry("a") << "," << entry("b") << "]}";
    daemon_ = Daemon::Start(options_).value();
    a_ = Open("token of a");
    b_ = Open("token of b");
  }

  std::unique_ptr<TestClient> Open(const std::string& token) const {
    const Daemon::Endpoints places = daemon_->endpoints();
    auto client = std::make_unique<TestClient>(places.fd_socket, "unix:" + places.unix_socket,
                                               1 << 20, token);
    EXPECT_EQ(client->welcome().error(), "");
    EXPECT_TRUE(client->OpenKeyspace().ok());
    return client;
  }

  static v1::CommitOutcome Store(TestClient& client, int page, uint8_t fill) {
    v1::CommitResponse response;
    const auto fragment = client.Fragment(TestClient::Key(page), fill);
    EXPECT_TRUE(client.Commit(fragment, &response).ok());
    return response.outcomes_size() == 1 ? response.outcomes(0) : v1::COMMIT_OUTCOME_UNSPECIFIED;
  }
  // Twice as many pages as fit into host memory.
  static void Fill(TestClient& client, uint8_t fill) {
    const int pages = static_cast<int>(2 * kSlabs * kSlabBytes / client.fragment_bytes());
    for (int page = 0; page < pages; ++page) Store(client, page, fill);
  }
  // Leases the cached ones of these one-page prefixes, reads and releases them. Returns their
  // number.
  static int ReadAll(TestClient& client, int pages, uint8_t fill) {
    int found = 0;
    for (int page = 0; page < pages; ++page) {
      v1::AcquireResponse response;
      EXPECT_TRUE(client.Acquire(TestClient::Keys(page, 1), &response).ok());
      if (response.hit_pages() == 0) continue;
      ++found;
      client.Slabs();
      const auto bytes = client.Mapped(response.fragments(), 0);
      EXPECT_EQ(bytes[0], std::byte{fill});
      EXPECT_EQ(bytes[client.tiles_bytes() - 1], std::byte{fill});
      EXPECT_TRUE(client.Release(response.lease()).ok());
    }
    return found;
  }
  // Runs of `fill` in everything that the client maps.
  static int Runs(TestClient& client, uint8_t fill) {
    const std::vector<std::byte> run(kRun, std::byte{fill});
    int runs = 0;
    for (const auto& [number, slab] : client.Slabs()) {
      const auto bytes = slab.bytes();
      for (auto at = bytes.begin();; at += kRun, ++runs) {
        at = std::search(at, bytes.end(), run.begin(), run.end());
        if (at == bytes.end()) break;
      }
    }
    return runs;
  }
  double Series(const std::string& name) const {
    return SeriesOf(daemon_->endpoints().admin, name);
  }

  TemporaryFolder folder_;
  Options options_;
  std::unique_ptr<Daemon> daemon_;
  std::unique_ptr<TestClient> a_;
  std::unique_ptr<TestClient> b_;
};

inline constexpr size_t kPage = 4096;

inline bool HasRunOfB(const std::vector<std::byte>& bytes) {
  const std::vector<std::byte> run(kRun, std::byte{kOfB});
  return std::search(bytes.begin(), bytes.end(), run.begin(), run.end()) != bytes.end();
}

inline UniqueFd OpenAgain(int fd, int flags) {
  return UniqueFd(::open(("/proc/self/fd/" + std::to_string(fd)).c_str(), flags | O_CLOEXEC));
}

// The references to a slab that a hostile process keeps.
class KeptSlab {
 public:
  explicit KeptSlab(int fd) : path_(OpenAgain(fd, O_PATH)) {
    void* const mapped = ::mmap(nullptr, kSlabBytes, PROT_READ, MAP_SHARED, fd, 0);
    EXPECT_NE(mapped, MAP_FAILED);
    mapped_ = static_cast<std::byte*>(mapped);
    for (auto& pipe : pipes_) {
      int ends[2];
      EXPECT_EQ(::pipe2(ends, O_CLOEXEC | O_NONBLOCK), 0);
      pipe = {UniqueFd(ends[0]), UniqueFd(ends[1])};
    }
    const iovec part = {mapped_ + kPage, kPage};
    EXPECT_EQ(::vmsplice(pipes_[0][1].get(), &part, 1, 0), static_cast<ssize_t>(kPage));
    loff_t at = 2 * kPage;
    EXPECT_GT(::splice(fd, &at, pipes_[1][1].get(), nullptr, 8 * kPage, SPLICE_F_NONBLOCK), 0);
  }
  ~KeptSlab() { Unmap(); }

  void Unmap() {
    if (mapped_ != nullptr) ::munmap(std::exchange(mapped_, nullptr), kSlabBytes);
  }
  bool ShowsB() {
    bool shown = false;
    std::vector<std::byte> bytes(kSlabBytes);
    const UniqueFd again = OpenAgain(path_.get(), O_RDONLY | O_NONBLOCK);
    if (again.valid() && ::pread(again.get(), bytes.data(), bytes.size(), 0) > 0) {
      shown |= HasRunOfB(bytes);
    }
    for (const auto& pipe : pipes_) {
      std::fill(bytes.begin(), bytes.end(), std::byte{0});
      while (::read(pipe[0].get(), bytes.data(), bytes.size()) > 0) shown |= HasRunOfB(bytes);
    }
    // The kernel reports a fault to write(); an access would end this process.
    const UniqueFd file(::memfd_create("copy", MFD_CLOEXEC));
    for (size_t at = 0; mapped_ != nullptr && at < kSlabBytes; at += kPage) {
      if (::write(file.get(), mapped_ + at, kPage) <= 0) continue;
      bytes.resize(kPage);
      EXPECT_GT(::pread(file.get(), bytes.data(), kPage, 0), 0);
      EXPECT_EQ(::lseek(file.get(), 0, SEEK_SET), 0);
      shown |= HasRunOfB(bytes);
    }
    return shown;
  }

 private:
  UniqueFd path_;
  std::byte* mapped_ = nullptr;
  std::array<std::array<UniqueFd, 2>, 2> pipes_;
};

}  // namespace crumb::server
