// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// The slabs of host memory that tenants' sessions map with tenants.shared_memory own.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <deque>
#include <thread>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/server/tenants/tenant_slabs_fixture.h"

namespace crumb::server {
namespace {

using testing::HasSubstr;

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
