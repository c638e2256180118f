// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// The slabs of host memory that tenants' sessions map with tenants.shared_memory own.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <deque>
#include <fstream>
#include <thread>
#include <utility>

#include "common/hex.h"
#include "common/sha256.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/daemon/daemon.h"
#include "tests/common/temporary_folder.h"
#include "tests/server/latency.h"
#include "tests/server/series.h"
#include "tests/server/test_client.h"

namespace crumb::server {
namespace {

using testing::HasSubstr;

constexpr uint64_t kSlabBytes = uint64_t{1} << 20;
constexpr int kSlabs = 4;
constexpr uint8_t kOfA = 0xa7, kOfB = 0xb9;  // bytes that fill the tenants' pages
constexpr int kRun = 64;                     // so many of them in a row are one tenant's

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

TEST_F(ServerTenantSlabsTest, ATenantMapsNothingOfAnother) {
  EXPECT_TRUE(a_->welcome().slab_grants());
  EXPECT_EQ(a_->welcome().slab_count(), 0u);
  EXPECT_TRUE(a_->Slabs().empty());  // before it leases anything
  for (int page = 0; page < 8; ++page) {
    ASSERT_EQ(Store(*a_, page, kOfA), v1::COMMIT_OUTCOME_STORED);
    ASSERT_EQ(Store(*b_, page, kOfB), v1::COMMIT_OUTCOME_STORED);
  }
  EXPECT_EQ(ReadAll(*a_, 8, kOfA), 8);
  EXPECT_EQ(ReadAll(*b_, 8, kOfB), 8);
  EXPECT_FALSE(a_->Slabs().empty());
  EXPECT_FALSE(b_->Slabs().empty());
  EXPECT_GT(Runs(*a_, kOfA), 0);  // the search finds the tenant's bytes
  EXPECT_GT(Runs(*b_, kOfB), 0);
  EXPECT_EQ(Runs(*a_, kOfB), 0);
  EXPECT_EQ(Runs(*b_, kOfA), 0);
  for (const auto& [slab, mapping] : a_->Slabs()) EXPECT_FALSE(b_->Slabs().contains(slab));
}

TEST_F(ServerTenantSlabsTest, MemoryGoesFromOneToTheOtherWhenItIsLetGo) {
  grpc::ClientContext* const context = a_->Context().release();
  const std::unique_ptr<grpc::ClientContext> owner(context);
  context->set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(120));
  const auto stream = a_->stub().Session(context);
  ASSERT_TRUE(stream->Write({}));
  std::atomic<bool> received{false};
  std::atomic<uint32_t> gone{UINT32_MAX};
  std::thread listener([&] {
    v1::SessionResponse message;
    while (gone == UINT32_MAX && stream->Read(&message)) {
      received = true;
      if (message.has_slab_gone()) gone = message.slab_gone().slab();
    }
  });
  Fill(*a_, kOfA);
  // The stream is open: it has reported durable pages.
  for (int i = 0; i < 60'000 && !received; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_TRUE(received);
  const int pages = static_cast<int>(2 * kSlabs * kSlabBytes / a_->fragment_bytes());
  EXPECT_GT(ReadAll(*a_, pages, kOfA), 0);  // the SSD has the others
  EXPECT_EQ(a_->Slabs().size(), static_cast<size_t>(kSlabs));

  // The other tenant needs room; slabs that the first one maps are not given away.
  const double moves = Series("crumb_slab_moves_total");
  int refused = 0;
  for (int i = 0; i < 60'000 && Series("crumb_slabs{state=\"gone\"}") < 1; ++i) {
    // Pages that wait for the SSD keep their slab a little.
    refused += Store(*b_, 0, kOfB) == v1::COMMIT_OUTCOME_NO_ROOM ? 1 : 0;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_GT(refused, 0);
  EXPECT_EQ(Store(*b_, 0, kOfB), v1::COMMIT_OUTCOME_NO_ROOM);
  EXPECT_EQ(Series("crumb_slab_moves_total"), moves);

  listener.join();
  ASSERT_TRUE(a_->Slabs().contains(gone));
  a_->ForgetSlab(gone);
  EXPECT_EQ(Store(*b_, 0, kOfB), v1::COMMIT_OUTCOME_STORED);
  EXPECT_EQ(Series("crumb_slab_moves_total"), moves + 1);
  EXPECT_EQ(ReadAll(*b_, 1, kOfB), 1);
  EXPECT_FALSE(b_->Slabs().contains(gone));  // another number, since it is another file
  EXPECT_GT(Runs(*b_, kOfB), 0);
  EXPECT_EQ(Runs(*b_, kOfA), 0);
  EXPECT_EQ(Runs(*a_, kOfB), 0);
  context->TryCancel();
}

constexpr size_t kPage = 4096;

bool HasRunOfB(const std::vector<std::byte>& bytes) {
  const std::vector<std::byte> run(kRun, std::byte{kOfB});
  return std::search(bytes.begin(), bytes.end(), run.begin(), run.end()) != bytes.end();
}

UniqueFd OpenAgain(int fd, int flags) {
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

// A process that has the descriptors and reads the slabs when the test says so.
class Accomplice {
 public:
  explicit Accomplice(const std::vector<UniqueFd>& slabs) {
    int ends[2];
    EXPECT_EQ(::pipe(ends), 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      char byte;
      ::close(ends[1]);
      if (::read(ends[0], &byte, 1) != 0) ::_exit(2);
      for (const UniqueFd& slab : slabs) {
        static std::array<unsigned char, kPage> page;
        for (off_t at = 0; ::pread(slab.get(), page.data(), kPage, at) > 0; at += kPage) {
          int run = 0;
          for (const unsigned char value : page) {
            run = value == kOfB ? run + 1 : 0;
            if (run == kRun) ::_exit(1);
          }
        }
      }
      ::_exit(0);
    }
    ::close(ends[0]);
    go_ = UniqueFd(ends[1]);
  }
  ~Accomplice() { Wait(); }
  // 0: it saw nothing of B.
  int Wait() {
    go_.Reset();
    if (pid_ > 0) ::waitpid(std::exchange(pid_, -1), &status_, 0);
    return WIFEXITED(status_) ? WEXITSTATUS(status_) : 128;
  }

 private:
  pid_t pid_ = -1;
  int status_ = 0;
  UniqueFd go_;
};

class KeptSlabsTest : public ServerTenantSlabsTest {
 protected:
  KeptSlabsTest() {
    a_.reset();
    b_.reset();
    daemon_.reset();
    options_.store.host.let_go_timeout = std::chrono::milliseconds(50);
    options_.store.host.revoked_slabs_max = kSlabs;
    options_.store.host.revoked_slabs_per_tenant = kSlabs;
    daemon_ = Daemon::Start(options_).value();
    a_ = Open("token of a");
    b_ = Open("token of b");
    a_->KeepDescriptors();
    Fill(*a_, kOfA);
    ReadAll(*a_, static_cast<int>(2 * kSlabs * kSlabBytes / a_->fragment_bytes()), kOfA);
    for (const UniqueFd& fd : a_->KeepDescriptors()) kept_.emplace_back(fd.get());
  }
  // B takes memory that was A's, and fills it.
  bool FillB() {
    const int pages = static_cast<int>(2 * kSlabs * kSlabBytes / b_->fragment_bytes());
    for (int i = 0; i < 2'000; ++i) {
      Fill(*b_, kOfB);
      if (ReadAll(*b_, pages, kOfB) > 0 && b_->Slabs().size() >= kSlabs / 2) return true;
    }
    return false;
  }

  std::deque<KeptSlab> kept_;
};

TEST_F(KeptSlabsTest, PathsAndPinnedPagesShowNothingOfTheNextTenant) {
  ASSERT_EQ(kept_.size(), static_cast<size_t>(kSlabs));
  for (KeptSlab& slab : kept_) slab.Unmap();
  a_->KeepDescriptors().clear();
  a_->ForgetSlabs();
  ASSERT_TRUE(FillB());
  EXPECT_GT(Runs(*b_, kOfB), 0);
  for (KeptSlab& slab : kept_) EXPECT_FALSE(slab.ShowsB());
}

TEST_F(KeptSlabsTest, MappingsAndDescriptorsShowNothingOfTheNextTenant) {
  ASSERT_EQ(kept_.size(), static_cast<size_t>(kSlabs));
  Accomplice other(a_->KeepDescriptors());
  ASSERT_TRUE(FillB());
  EXPECT_GT(Runs(*b_, kOfB), 0);
  for (KeptSlab& slab : kept_) EXPECT_FALSE(slab.ShowsB());
  EXPECT_EQ(other.Wait(), 0);
  EXPECT_GE(Series("crumb_slabs_revoked_total"), kSlabs / 2);
}

// Tenant a keeps all it can of more slabs than may be revoked. The slabs that are left for b are
// enough: those that a keeps count as a's.
class RevokedSlabsTest : public ServerTenantSlabsTest {
 protected:
  static constexpr int kManySlabs = 16;
  static constexpr int kRevokedMax = 2, kRevokedPerTenant = 1;

  RevokedSlabsTest() {
    a_.reset();
    b_.reset();
    daemon_.reset();
    options_.store.host.bytes_max = ByteSize{kManySlabs * kSlabBytes};
    options_.store.host.let_go_timeout = std::chrono::milliseconds(50);
    options_.store.host.revoked_slabs_max = kRevokedMax;
    options_.store.host.revoked_slabs_per_tenant = kRevokedPerTenant;
    daemon_ = Daemon::Start(options_).value();
    a_ = Open("token of a");
    b_ = Open("token of b");
    EXPECT_EQ(Store(*b_, 0, kOfB), v1::COMMIT_OUTCOME_STORED);
  }

  // a stores pages, reads them, and keeps a reference to each slab that it got.
  void KeepAll() {
    a_->KeepDescriptors();
    const int pages = static_cast<int>(kManySlabs * kSlabBytes / a_->fragment_bytes());
    for (int page = 0; page < pages; ++page) Store(*a_, page, kOfA);
    ReadAll(*a_, pages, kOfA);
    for (const UniqueFd& fd : a_->KeepDescriptors()) kept_.emplace_back(fd.get());
  }
  double P99OfB() {
    std::vector<double> seconds;
    for (int i = 0; i < 500; ++i) {
      seconds.push_back(SecondsOf([&] {
        v1::AcquireResponse response;
        EXPECT_TRUE(b_->Acquire(TestClient::Keys(0, 1), &response).ok());
        if (response.lease() != 0) {
          EXPECT_TRUE(b_->Release(response.lease()).ok());
        }
      }));
    }
    return P99(seconds);
  }

  std::deque<KeptSlab> kept_;
};

TEST_F(RevokedSlabsTest, WhoKeepsSlabsTakesNoneFromTheOtherTenant) {
  const double alone = P99OfB();
  KeepAll();
  EXPECT_GE(kept_.size(), static_cast<size_t>(kManySlabs / 2));
  int refused = 0;
  // So many pages fill b's slabs several times, for longer than slabs are waited for.
  for (int page = 0; page < 1'000; ++page) {
    if (Store(*b_, page, kOfB) != v1::COMMIT_OUTCOME_STORED) ++refused;
    if (page % 50 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  EXPECT_LE(refused, 1) << "page 0 is there already";
  double attacked = P99OfB();
  for (int i = 0; i < 3 && attacked > 3 * alone + 0.02; ++i) attacked = P99OfB();
  EXPECT_LE(attacked, 3 * alone + 0.02) << "p99 in seconds; alone " << alone;
  EXPECT_EQ(Series("crumb_slabs_revoked_total"), kRevokedPerTenant) << "the tenant's part";
  EXPECT_GE(Series("crumb_slabs{state=\"gone\"}"), 1) << "further ones stay out of use";
  EXPECT_FALSE(b_->Slabs().empty() && ReadAll(*b_, 1'000, kOfB) == 0);
  for (KeptSlab& slab : kept_) EXPECT_FALSE(slab.ShowsB());
}

TEST_F(KeptSlabsTest, AnotherUserCannotOpenASlabAgain) {
  const int fd = a_->KeepDescriptors().at(0).get();
  struct stat status {};
  ASSERT_EQ(::fstat(fd, &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0400u);
  if (::geteuid() != 0) return;  // this process can become no other user
  const pid_t child = ::fork();
  if (child == 0) {
    constexpr uid_t kOtherUser = 65534;
    char link[64];
    std::snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    // Without being dumpable its own links in /proc would be closed to it.
    if (::setresuid(kOtherUser, kOtherUser, kOtherUser) != 0 || ::prctl(PR_SET_DUMPABLE, 1) != 0)
      ::_exit(2);
    char path[64];
    if (::readlink(link, path, sizeof(path)) <= 0) ::_exit(3);
    for (const int flags : {O_RDONLY, O_RDWR}) {
      if (::open(link, flags | O_NONBLOCK) >= 0) ::_exit(1);
    }
    ::_exit(0);
  }
  int ended = 0;
  ASSERT_EQ(::waitpid(child, &ended, 0), child);
  EXPECT_TRUE(WIFEXITED(ended));
  EXPECT_EQ(WEXITSTATUS(ended), 0);
}

TEST_F(ServerTenantSlabsTest, ASessionThatEndsLetsItsMemoryGo) {
  Fill(*a_, kOfA);
  ReadAll(*a_, 200, kOfA);
  ASSERT_FALSE(a_->Slabs().empty());
  a_.reset();  // the process is still there: its mappings count, not its life
  bool stored = false;
  for (int i = 0; i < 60'000 && !stored; ++i) {
    stored = Store(*b_, 0, kOfB) == v1::COMMIT_OUTCOME_STORED;
    if (!stored) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_TRUE(stored);
  EXPECT_EQ(ReadAll(*b_, 1, kOfB), 1);
  EXPECT_EQ(Runs(*b_, kOfA), 0);
}

TEST_F(ServerTenantSlabsTest, AProcessThatReadsNoGrantsGetsMissesAndNoOtherWaits) {
  // It leases repeatedly and never reads the grants from its socket.
  for (int page = 0; page < 4; ++page) ASSERT_EQ(Store(*a_, page, kOfA), v1::COMMIT_OUTCOME_STORED);
  a_->CloseSocket();
  v1::AcquireResponse response;
  const grpc::Status acquired = a_->Acquire(TestClient::Keys(0, 1), &response);
  EXPECT_TRUE(!acquired.ok() || response.hit_pages() == 0);
  ASSERT_EQ(Store(*b_, 0, kOfB), v1::COMMIT_OUTCOME_STORED);
  EXPECT_EQ(ReadAll(*b_, 1, kOfB), 1);
}

TEST_F(ServerTenantSlabsTest, AnAdministratorReadsEveryTenantsPages) {
  ASSERT_EQ(Store(*a_, 1, kOfA), v1::COMMIT_OUTCOME_STORED);
  const auto administrator = Open("");
  v1::AcquireRequest request;
  request.set_keyspace(a_->keyspace().keyspace());
  request.set_keys(TestClient::Keys(1, 1));
  v1::AcquireResponse response;
  ASSERT_TRUE(
      administrator->stub().Acquire(administrator->Context().get(), request, &response).ok());
  ASSERT_EQ(response.hit_pages(), 1u);
  administrator->Slabs();
  EXPECT_EQ(administrator->Mapped(response.fragments(), 0)[0], std::byte{kOfA});
}

// Says hello as an older client, or as one that takes a socket for pools.
FdMessage SayHello(int socket, bool pool_socket, v1::SessionWelcome* welcome) {
  v1::SessionHello hello;
  hello.set_protocol_version(1);
  hello.set_tenant_token("token of a");
  hello.set_slab_grants(true);
  hello.set_pool_socket(pool_socket);
  const UniqueFd pidfd = OwnPidfd();
  const int fds[] = {pidfd.get()};
  EXPECT_TRUE(SendFdMessage(socket, hello.SerializeAsString(), fds).ok());
  FdMessage message = ReceiveFdMessage(socket).value();
  EXPECT_TRUE(welcome->ParseFromString(message.bytes));
  return message;
}

TEST_F(ServerTenantSlabsTest, AnOlderClientHasNoPools) {
  const UniqueFd socket = ConnectFdChannel(daemon_->endpoints().fd_socket).value();
  v1::SessionWelcome welcome;
  const FdMessage message = SayHello(socket.get(), false, &welcome);
  EXPECT_TRUE(welcome.slab_grants());
  EXPECT_FALSE(welcome.device_pools());
  EXPECT_FALSE(welcome.pool_socket());
  EXPECT_TRUE(message.fds.empty());
}

TEST_F(ServerTenantSlabsTest, NonsenseAtTheSocketForPoolsEndsIt) {
  const UniqueFd socket = ConnectFdChannel(daemon_->endpoints().fd_socket).value();
  v1::SessionWelcome welcome;
  const FdMessage message = SayHello(socket.get(), true, &welcome);
  EXPECT_TRUE(welcome.device_pools());
  ASSERT_TRUE(welcome.pool_socket());
  ASSERT_EQ(message.fds.size(), 1u);
  const int pools = message.fds[0].get();
  v1::PoolRequest request;
  request.mutable_fetch()->set_pool("of no tenant");
  ASSERT_TRUE(SendFdMessage(pools, request.SerializeAsString(), {}).ok());
  v1::PoolResponse reply;
  ASSERT_TRUE(reply.ParseFromString(ReceiveFdMessage(pools).value().bytes));
  EXPECT_NE(reply.code(), 0u);
  ASSERT_TRUE(SendFdMessage(pools, "\xff\xff\xff", {}).ok());
  EXPECT_FALSE(ReceiveFdMessage(pools).ok());  // crumbd closed its end
  // Nothing else of the session has changed: another pool request there would be its end.
  grpc::ClientContext context;
  context.AddMetadata("authorization", "Bearer token of a");
  context.AddMetadata("crumb-session",
                      HexEncode({reinterpret_cast<const uint8_t*>(welcome.token().data()),
                                 welcome.token().size()}));
  v1::AcquireRequest wanted;
  wanted.set_keyspace(a_->keyspace().keyspace());
  wanted.set_keys(TestClient::Keys(0, 1));
  v1::AcquireResponse response;
  EXPECT_TRUE(a_->stub().Acquire(&context, wanted, &response).ok());
}

TEST_F(ServerTenantSlabsTest, AClientThatKnowsNoGrantsIsRefused) {
  const UniqueFd socket = ConnectFdChannel(daemon_->endpoints().fd_socket).value();
  v1::SessionHello hello;
  hello.set_protocol_version(1);
  hello.set_tenant_token("token of a");
  const UniqueFd pidfd = OwnPidfd();
  const int fds[] = {pidfd.get()};
  ASSERT_TRUE(SendFdMessage(socket.get(), hello.SerializeAsString(), fds).ok());
  v1::SessionWelcome welcome;
  ASSERT_TRUE(welcome.ParseFromString(ReceiveFdMessage(socket.get()).value().bytes));
  EXPECT_THAT(welcome.error(), HasSubstr("tenants.shared_memory is own"));
}

}  // namespace
}  // namespace crumb::server
