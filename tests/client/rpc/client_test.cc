// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "crumb/client.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <functional>

#include "common/crc32c.h"
#include "common/fd_channel.h"
#include "crumbd_test.h"
#include "tests/common/eventually.h"

namespace crumb::client {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

KeyspaceSpec SmallSpec() {
  KeyspaceSpec spec;
  spec.fields = {{"model", "test"}, {"format", "int2"}};
  spec.layers = 1;
  spec.kv_heads = 1;
  spec.head_dim = 64;
  spec.group_size = 64;
  return spec;
}

// Returns a fragment of one tile of `fill`.
FragmentBytes SmallFragment(const KeyspaceInfo& keyspace, const PageKey& key, char fill) {
  FragmentBytes fragment;
  fragment.tiles = std::string(keyspace.int2_tile_bytes, fill);
  fragment.header.tile_bytes = keyspace.int2_tile_bytes;
  fragment.header.generation = keyspace.generation;
  fragment.header.keyspace = keyspace.id;
  fragment.header.key = key;
  fragment.header.range = {{0, 1}, {0, 1}};
  fragment.header.tile_sums = {Crc32c(std::as_bytes(std::span(fragment.tiles)))};
  return fragment;
}

size_t OpenDescriptors() {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    ++count;
  }
  return count;
}

// Counts this process's mappings of the fake's memory files.
size_t SharedMappings() {
  std::ifstream maps("/proc/self/maps");
  size_t count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += line.find("memfd:fake-") != std::string::npos;
  }
  return count;
}

size_t Threads() {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry :
       std::filesystem::directory_iterator("/proc/self/task")) {
    ++count;
  }
  return count;
}

class ClientTest : public CrumbdTest {
 protected:
  // Commits one fragment through staging memory.
  static absl::StatusOr<CommitOutcome> CommitOne(Client& client, const KeyspaceInfo& keyspace,
                                                 const FragmentBytes& fragment) {
    auto slots = client.Reserve(1, FragmentBytes_(fragment), seconds(5));
    if (!slots.ok()) return slots.status();
    const std::span<std::byte> room = slots->at(0).bytes();
    std::memcpy(room.data(), fragment.tiles.data(), fragment.tiles.size());
    EncodeFragmentHeader(fragment.header, room.subspan(fragment.tiles.size()));
    auto outcomes =
        client.Commit(keyspace.id, *std::move(slots), fragment.tiles.size(), seconds(5));
    if (!outcomes.ok()) return outcomes.status();
    return outcomes->at(0);
  }
  // Returns a request for all of SmallFragment's tiles of `keys`, which are borrowed.
  static AcquireRequest RequestOf(const KeyspaceInfo& keyspace, std::span<const PageKey> keys) {
    AcquireRequest request;
    request.keyspace = keyspace.id;
    request.generation = keyspace.generation;
    request.keys = keys;
    request.range = TileRange{{0, 1}, {0, 1}};
    request.timeout = seconds(20);
    return request;
  }
  static size_t FragmentBytes_(const FragmentBytes& fragment) {
    return crumb::FragmentBytes(fragment.header.range.tiles(), fragment.header.tile_bytes);
  }
};

TEST_F(ClientTest, AnotherCrumbdMayCountGenerationsFromALowerOne) {
  StartCrumbd(7);
  crumbd_->generation = 5;
  const auto client = OpenClient();
  const KeyspaceId id = client->OpenKeyspace(SmallSpec(), seconds(5)).value().id;
  EXPECT_EQ(client->GenerationOf(id), 5u);
  crumbd_.reset();
  StartCrumbd(8);
  ASSERT_TRUE(Eventually([&] { return client->epoch() == 8; }));
  EXPECT_EQ(client->OpenKeyspace(SmallSpec(), seconds(5)).value().generation, 1u);
  EXPECT_EQ(client->GenerationOf(id), 1u);
}

TEST_F(ClientTest, CommitsAndAcquiresInSharedMemory) {
  StartCrumbd(7);
  const auto client = OpenClient();
  ASSERT_TRUE(client->connected());
  EXPECT_EQ(client->epoch(), 7);
  const KeyspaceInfo keyspace = client->OpenKeyspace(SmallSpec(), seconds(5)).value();
  const std::vector<PageKey> keys = PageKeysOf(keyspace.id, RandomTokens(192, 1));
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(*CommitOne(*client, keyspace, SmallFragment(keyspace, keys[i], char('a' + i))),
              CommitOutcome::kStored);
  }
  EXPECT_EQ(*CommitOne(*client, keyspace, SmallFragment(keyspace, keys[0], 'a')),
            CommitOutcome::kDeduplicated);
  AcquireRequest request = RequestOf(keyspace, keys);
  AcquireResult result = client->Acquire(request).value();
  EXPECT_EQ(result.hit_pages, 2);
  EXPECT_EQ(result.miss_reason, MissReason::kAbsent);
  ASSERT_EQ(result.lease->fragments().size(), 2);
  EXPECT_EQ(result.lease->fragments()[1].tiles[0], std::byte{'b'});
  EXPECT_TRUE(result.lease->fragments()[1].VerifyTiles().ok());
  EXPECT_EQ(crumbd_->leases(), 1);
  // More than there is: every tile must be covered.
  request.range = TileRange{{0, 2}, {0, 1}};
  for (const bool claimed : {false, true}) {
    crumbd_->claim_coverage = claimed;
    const AcquireResult wider = client->Acquire(request).value();
    EXPECT_EQ(wider.hit_pages, 0);
    EXPECT_EQ(wider.miss_reason, MissReason::kNotCovered);
  }
  result.lease.reset();
  EXPECT_TRUE(Eventually([&] { return crumbd_->leases() == 0; }));
  EXPECT_TRUE(Eventually([&] { return crumbd_->counters().verify_failures() == 1; }));
}

TEST_F(ClientTest, CallsOverASocketOfItsOwn) {
  StartCrumbd(7);
  crumbd_->call_sockets = true;
  const auto client = OpenClient();
  const KeyspaceInfo keyspace = client->OpenKeyspace(SmallSpec(), seconds(5)).value();
  const std::vector<PageKey> keys = PageKeysOf(keyspace.id, RandomTokens(192, 1));
  for (int i = 0; i < 2; ++i) {
    CommitOne(*client, keyspace, SmallFragment(keyspace, keys[i], char('a' + i))).value();
  }
  AcquireRequest request = RequestOf(keyspace, keys);
  for (const bool apart : {false, true}) {
    crumbd_->fragments_apart = apart;
    AcquireResult result = client->Acquire(request).value();
    EXPECT_EQ(result.hit_pages, 2);
    EXPECT_EQ(result.miss_reason, MissReason::kAbsent);
    ASSERT_EQ(result.lease->fragments().size(), 2);
    EXPECT_EQ(result.lease->fragments()[1].tiles[0], std::byte{'b'});
    EXPECT_EQ(crumbd_->joins(), apart ? 1u : 0u);
    EXPECT_EQ(crumbd_->leases(), 1u);
    result.lease.reset();
    EXPECT_TRUE(Eventually([&] { return crumbd_->leases() == 0; }));
  }
  EXPECT_EQ(crumbd_->socket_calls(), 2u);
  EXPECT_EQ(crumbd_->acquires(), 3u);
  // A second request meanwhile, and one that names peers, use gRPC.
  crumbd_->fragments_apart = false;
  auto first = client->StartAcquire(request);
  auto second = client->StartAcquire(request);
  EXPECT_EQ(second->Finish()->hit_pages, 2);
  EXPECT_EQ(first->Finish()->hit_pages, 2);
  EXPECT_EQ(crumbd_->socket_calls(), 3u);
  request.peers = {PoolId::FromBytes(std::string(16, 'p'))};
  EXPECT_EQ(client->Acquire(request)->hit_pages, 2);
  EXPECT_EQ(crumbd_->socket_calls(), 3u);
  EXPECT_TRUE(Eventually([&] { return crumbd_->leases() == 0; }));
}

TEST_F(ClientTest, AResponseThatIsNotWaitedForOnItsSocketLeavesNoLease) {
  StartCrumbd(7);
  crumbd_->call_sockets = true;
  const auto client = OpenClient();
  const KeyspaceInfo keyspace = client->OpenKeyspace(SmallSpec(), seconds(5)).value();
  const std::vector<PageKey> keys = PageKeysOf(keyspace.id, RandomTokens(64, 1));
  CommitOne(*client, keyspace, SmallFragment(keyspace, keys[0], 'a')).value();
  AcquireRequest request = RequestOf(keyspace, keys);
  crumbd_->block_acquire = true;
  request.timeout = milliseconds(20);
  EXPECT_TRUE(absl::IsDeadlineExceeded(client->Acquire(request).status()));
  request.timeout = seconds(20);
  auto dropped = client->StartAcquire(request);
  EXPECT_FALSE(dropped->Ready());
  dropped.reset();
  crumbd_->block_acquire = false;
  // Two responses to abandoned requests precede this one.
  auto pending = client->StartAcquire(request);
  EXPECT_TRUE(Eventually([&] { return pending->Ready(); }));
  AcquireResult result = pending->Finish().value();
  EXPECT_EQ(result.hit_pages, 1);
  EXPECT_EQ(crumbd_->socket_calls(), 3u);
  EXPECT_TRUE(Eventually([&] { return crumbd_->leases() == 1; }));
  result.lease.reset();
  EXPECT_TRUE(Eventually([&] { return crumbd_->leases() == 0; }));
}

TEST_F(ClientTest, FragmentsOutsideTheSlabAreMisses) {
  StartCrumbd();
  const auto client = OpenClient();
  const KeyspaceInfo keyspace = client->OpenKeyspace(SmallSpec(), seconds(5)).value();
  const PageKey key = PageKeysOf(keyspace.id, RandomTokens(64, 1))[0];
  const FragmentBytes fragment = SmallFragment(keyspace, key, 'x');
  ASSERT_EQ(*CommitOne(*client, keyspace, fragment), CommitOutcome::kStored);
  AcquireRequest request = RequestOf(keyspace, std::span(&key, 1));
  request.range.reset();
  for (const FakeCrumbd::Page& bad :
       {FakeCrumbd::Page{uint64_t{64} << 20, 0, fragment.header},
        FakeCrumbd::Page{~uint64_t{0} - 511, 2560, fragment.header},
        FakeCrumbd::Page{(uint64_t{64} << 20) - 512, 4'000'000'000, fragment.header},
        FakeCrumbd::Page{64, 2560, fragment.header}}) {
    crumbd_->Place({keyspace.id, key}, bad);
    const AcquireResult result = client->Acquire(request).value();
    EXPECT_EQ(result.hit_pages, 0) << bad.offset;
    EXPECT_EQ(result.miss_reason, MissReason::kCorrupt) << bad.offset;
  }
}

// An intact page, with correct checksums, that is not the requested one.
TEST_F(ClientTest, PagesOfAnotherKeyOrKeyspaceAreRefusedAndCounted) {
  StartCrumbd();
  const auto client = OpenClient();
  const KeyspaceInfo keyspace = client->OpenKeyspace(SmallSpec(), seconds(5)).value();
  KeyspaceSpec other_spec = SmallSpec();
  other_spec.fields["model"] = "another";
  const KeyspaceInfo other = client->OpenKeyspace(other_spec, seconds(5)).value();
  const std::vector<PageKey> keys = PageKeysOf(keyspace.id, RandomTokens(128, 1));
  for (const auto& [of, key] :
       {std::pair(keyspace, keys[0]), std::pair(keyspace, keys[1]), std::pair(other, keys[0])}) {
    ASSERT_EQ(*CommitOne(*client, of, SmallFragment(of, key, 'x')), CommitOutcome::kStored);
  }
  AcquireRequest request = RequestOf(keyspace, std::span(keys).first(1));
  request.range.reset();
  ASSERT_EQ(client->Acquire(request)->hit_pages, 1);
  const auto pages = crumbd_->pages();
  uint32_t refused = 0;
  for (const FakeCrumbd::PageId& id :
       {FakeCrumbd::PageId(keyspace.id, keys[1]), FakeCrumbd::PageId(other.id, keys[0])}) {
    crumbd_->Place({keyspace.id, keys[0]}, pages.at(id));
    const AcquireResult result = client->Acquire(request).value();
    EXPECT_EQ(result.hit_pages, 0);
    EXPECT_EQ(result.lease, nullptr);
    EXPECT_EQ(result.miss_reason, MissReason::kCorrupt);
    ++refused;
    EXPECT_TRUE(Eventually([&] { return crumbd_->counters().verify_failures() == refused; }));
  }
  crumbd_->Place({keyspace.id, keys[0]}, pages.at({keyspace.id, keys[0]}));
  EXPECT_EQ(client->Acquire(request)->hit_pages, 1);
  EXPECT_TRUE(Eventually([&] { return crumbd_->leases() == 0; }));
}

std::string Encoded(const FragmentHeader& header) {
  std::string bytes(FragmentHeaderBytes(header.range.tiles()), '\0');
  EncodeFragmentHeader(header, std::as_writable_bytes(std::span(bytes.data(), bytes.size())));
  return bytes;
}

// Returns two pages of one shape on a device, with headers.
v1::DeviceFragments OnDevice(const KeyspaceInfo& keyspace, std::span<const PageKey> keys) {
  v1::DeviceFragments fragments;
  v1::DeviceFragments::Shape& shape = *fragments.add_shape();
  shape.mutable_range()->set_layer_end(1);
  shape.mutable_range()->set_head_end(1);
  shape.set_format(v1::PAGE_FORMAT_INT2);
  shape.set_tile_bytes(keyspace.int2_tile_bytes);
  shape.set_layout_id(1);
  shape.set_generation(keyspace.generation);
  for (uint32_t page = 0; page < 2; ++page) {
    fragments.add_pages(page);
    fragments.add_pools(0);
    fragments.add_slots(7 + page);
    fragments.add_shapes(0);
    fragments.add_headers(Encoded(SmallFragment(keyspace, keys[page], 'x').header));
  }
  return fragments;
}

TEST_F(ClientTest, FragmentsOnDevicesAreReadWithTheirSumsOrRefused) {
  StartCrumbd();
  const auto client = OpenClient();
  const KeyspaceInfo keyspace = client->OpenKeyspace(SmallSpec(), seconds(5)).value();
  const std::vector<PageKey> keys = PageKeysOf(keyspace.id, RandomTokens(128, 1));
  AcquireRequest request = RequestOf(keyspace, keys);
  request.pools = {PoolId::FromBytes("a pool of 16 b..")};
  const v1::DeviceFragments right = OnDevice(keyspace, keys);
  const FragmentHeader header = SmallFragment(keyspace, keys[1], 'x').header;
  crumbd_->PlaceOnDevices(2, right);
  const AcquireResult found = client->Acquire(request).value();
  ASSERT_EQ(found.hit_pages, 2);
  const std::span<const DeviceFragment> read = found.lease->device_fragments();
  ASSERT_EQ(read.size(), 2u);
  EXPECT_EQ(found.lease->epoch(), client->epoch());
  EXPECT_EQ(read[1].slot, 8u);
  EXPECT_EQ(read[1].pool, request.pools[0]);
  EXPECT_EQ(read[1].shape->range, header.range);
  EXPECT_EQ(read[0].shape, read[1].shape);
  EXPECT_TRUE(std::ranges::equal(read[1].tile_sums, header.tile_sums));
  EXPECT_EQ(DecodeFragmentHeader(read[1].header).value(), header);

  using Spoil = std::function<void(v1::DeviceFragments&)>;
  const auto second = [&](const std::function<void(FragmentHeader&)>& change) {
    return [&header, change](v1::DeviceFragments& all) {
      FragmentHeader changed = header;
      change(changed);
      all.set_headers(1, Encoded(changed));
    };
  };
  const std::pair<Spoil, MissReason> spoilt[] = {
      {[](auto& all) { all.mutable_headers(1)->at(60) ^= 1; }, MissReason::kCorrupt},
      {[](auto& all) { all.mutable_headers(1)->resize(100); }, MissReason::kCorrupt},
      {[](auto& all) { all.set_headers(1, "short"); }, MissReason::kCorrupt},
      {[](auto& all) { all.set_shapes(1, 1); }, MissReason::kCorrupt},
      {[](auto& all) { all.set_pools(1, 1); }, MissReason::kCorrupt},
      {second([&](FragmentHeader& of) { of.key = keys[0]; }), MissReason::kCorrupt},
      {second([](FragmentHeader& of) { of.keyspace.bytes[0] ^= 1; }), MissReason::kCorrupt},
      {second([](FragmentHeader& of) { of.generation += 1; }), MissReason::kCorrupt},
      {second([](FragmentHeader& of) { of.tile_bytes *= 2; }), MissReason::kCorrupt},
      {second([](FragmentHeader& of) { of.format = PageFormat::kBf16; }), MissReason::kCorrupt},
      {[](auto& all) {
         all.mutable_shape(0)->set_generation(99);
         all.clear_headers();
       },
       MissReason::kGeneration},
      {[](auto& all) { all.mutable_headers()->RemoveLast(); }, MissReason::kCorrupt},
      {[](auto& all) { all.set_pages(1, 5); }, MissReason::kNotCovered},
  };
  uint32_t refused = 0;
  for (size_t i = 0; i < std::size(spoilt); ++i) {
    v1::DeviceFragments wrong = right;
    spoilt[i].first(wrong);
    crumbd_->PlaceOnDevices(2, wrong);
    const AcquireResult result = client->Acquire(request).value();
    EXPECT_LT(result.hit_pages, 2) << i;
    EXPECT_EQ(result.miss_reason, spoilt[i].second) << i;
    if (spoilt[i].second != MissReason::kGeneration) ++refused;
  }
  EXPECT_TRUE(Eventually([&] { return crumbd_->counters().verify_failures() == refused; }));
  // Without headers there are slots and no checksums.
  v1::DeviceFragments bare = right;
  bare.clear_headers();
  crumbd_->PlaceOnDevices(2, bare);
  const AcquireResult placed = client->Acquire(request).value();
  ASSERT_EQ(placed.hit_pages, 2);
  EXPECT_TRUE(placed.lease->device_fragments()[1].tile_sums.empty());
  EXPECT_TRUE(placed.lease->device_fragments()[1].header.empty());
}

TEST_F(ClientTest, UnusedRoomIsGivenBack) {
  StartCrumbd();
  const auto client = OpenClient();
  {
    const auto slots = client->Reserve(5, 5000, seconds(5));
    ASSERT_EQ(slots->size(), 5);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(slots->at(1).bytes().data()) % 512, 0);
    EXPECT_EQ(crumbd_->reservations(), 5);
  }
  EXPECT_TRUE(Eventually([&] { return crumbd_->reservations() == 0; }));
  // More than there is: fewer are reserved.
  const auto slots = client->Reserve(1000, 1 << 20, seconds(5));
  EXPECT_EQ(slots->size(), 8);
}

TEST_F(ClientTest, RoomOfALostConnectionCannotBeCommitted) {
  StartCrumbd();
  const auto client = OpenClient();
  const KeyspaceInfo keyspace = client->OpenKeyspace(SmallSpec(), seconds(5)).value();
  auto slots = client->Reserve(1, 5000, seconds(5)).value();
  crumbd_->BreakStreams();
  ASSERT_TRUE(Eventually([&] { return crumbd_->sessions() == 2 && client->connected(); }));
  const auto outcome = client->Commit(keyspace.id, std::move(slots), 4000, seconds(5));
  EXPECT_EQ(outcome.status().code(), absl::StatusCode::kAborted);
}

TEST_F(ClientTest, GetsAndPutsBytes) {
  StartCrumbd();
  const auto client = OpenClient();
  const KeyspaceInfo keyspace = client->OpenKeyspace(SmallSpec(), seconds(5)).value();
  const std::vector<PageKey> keys = PageKeysOf(keyspace.id, RandomTokens(192, 2));
  const std::vector<FragmentBytes> fragments = {SmallFragment(keyspace, keys[0], 'p'),
                                                SmallFragment(keyspace, keys[1], 'q')};
  const auto outcomes = client->Put(keyspace.id, fragments, seconds(5));
  ASSERT_TRUE(outcomes.ok()) << outcomes.status();
  EXPECT_EQ(outcomes->size(), 2);
  std::vector<FragmentBytes> got;
  const auto receive = [&](FragmentBytes fragment) {
    got.push_back(std::move(fragment));
    return absl::OkStatus();
  };
  const auto miss = client->Get(keyspace.id, keys, seconds(5), receive);
  ASSERT_TRUE(miss.ok()) << miss.status();
  EXPECT_EQ(*miss, MissReason::kAbsent);
  ASSERT_EQ(got.size(), 2);
  EXPECT_EQ(got[1].tiles, fragments[1].tiles);
  EXPECT_EQ(got[1].page, 1);
  // A damaged fragment is not passed to the receiver.
  crumbd_->Bytes(crumbd_->pages().at({keyspace.id, keys[1]}))[3] ^= std::byte{4};
  got.clear();
  EXPECT_EQ(client->Get(keyspace.id, keys, seconds(5), receive).status().code(),
            absl::StatusCode::kDataLoss);
  EXPECT_EQ(got.size(), 1);
  // An error of the receiver ends the call.
  const auto enough = [](FragmentBytes) { return absl::CancelledError("enough"); };
  EXPECT_EQ(client->Get(keyspace.id, keys, seconds(5), enough).status().code(),
            absl::StatusCode::kCancelled);
  FragmentBytes broken = fragments[0];
  broken.tiles.pop_back();
  EXPECT_EQ(client->Put(keyspace.id, std::span(&broken, 1), seconds(5)).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(ClientTest, ReturnsAtOnceWithoutCrumbd) {
  ClientOptions options = Options();
  options.call_timeout = seconds(60);  // none of these calls waits that long
  const TimePoint start = Clock::Real().Now();
  const auto client = Client::Open(options).value();
  EXPECT_FALSE(client->connected());
  const KeyspaceId keyspace{};
  EXPECT_EQ(client->OpenKeyspace(SmallSpec(), seconds(60)).status().code(),
            absl::StatusCode::kUnavailable);
  EXPECT_EQ(client->Acquire({}).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(client->Lookup(keyspace, {}).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(client->Reserve(1, 1, seconds(60)).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(client->Flush(seconds(60)).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(client->Stats().status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(client->DropKeyspace(keyspace).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_LT(Clock::Real().Now() - start, seconds(30));
  StartCrumbd();
  EXPECT_TRUE(client->WaitConnected(seconds(20)));
}

// A crumbd that hangs accepts nothing, and its backlog fills.
TEST_F(ClientTest, OpensWithoutAConnectionIfCrumbdAcceptsNone) {
  const std::string path = dir_ + "/crumbd.fd.sock";
  auto listener = ListenFdChannel(path);
  ASSERT_TRUE(listener.ok()) << listener.status();
  std::vector<UniqueFd> waiting;
  for (auto socket = ConnectFdChannel(path, milliseconds(20)); socket.ok();
       socket = ConnectFdChannel(path, milliseconds(20))) {
    waiting.push_back(*std::move(socket));
  }
  ClientOptions options = Options();
  options.connect_timeout = milliseconds(50);
  const auto client = Client::Open(options).value();
  EXPECT_FALSE(client->connected());
  EXPECT_EQ(client->Acquire({}).status().code(), absl::StatusCode::kUnavailable);
  listener->Reset();
  waiting.clear();
  StartCrumbd();
  EXPECT_TRUE(client->WaitConnected(seconds(20)));
}

TEST_F(ClientTest, RefusedHelloIsNoConnection) {
  StartCrumbd();
  crumbd_->refuse_hello = true;
  const auto client = OpenClient();
  EXPECT_FALSE(client->connected());
  crumbd_->refuse_hello = false;
  EXPECT_TRUE(client->WaitConnected(seconds(20)));
}

TEST_F(ClientTest, WrongOptionsAreErrors) {
  ClientOptions options = Options();
  options.engine = "short";
  EXPECT_EQ(Client::Open(options).status().code(), absl::StatusCode::kInvalidArgument);
  options = Options();
  options.backoff_max = milliseconds(1);
  EXPECT_EQ(Client::Open(options).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(ClientTest, LeavesNothingBehind) {
  StartCrumbd();
  const auto open_and_close = [&] {
    const auto client = OpenClient();
    const auto slots = client->Reserve(2, 5000, seconds(5));
    EXPECT_EQ(slots->size(), 2);
  };
  open_and_close();  // the first channel opens gRPC's own descriptors
  const auto settled = [&] { return crumbd_->sessions() == 0; };
  ASSERT_TRUE(Eventually(settled));
  const size_t descriptors = OpenDescriptors();
  const size_t threads = Threads();
  const size_t mappings = SharedMappings();
  for (int i = 0; i < 200; ++i) open_and_close();
  ASSERT_TRUE(Eventually(settled));
  EXPECT_EQ(crumbd_->reservations(), 0);
  // The fake keeps one socket and one mapping for every session that it ever had; gRPC's server
  // keeps closed connections for a moment.
  EXPECT_EQ(SharedMappings() - mappings, 200);
  EXPECT_TRUE(Eventually([&] { return OpenDescriptors() <= descriptors + 200 + 4; }))
      << descriptors << " before, " << OpenDescriptors() << " after";
  EXPECT_LE(Threads(), threads + 16);
}

// Returns the result of `body` in a forked child; -1 if the child does not end by itself.
int InForkedChild(const std::function<int()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(20);
    ::_exit(body());
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST_F(ClientTest, AForkedChildLeavesItsParentsConnectionAlone) {
  StartCrumbd();
  auto client = OpenClient();
  auto slots = client->Reserve(1, 5000, seconds(5)).value();
  const int response = InForkedChild([&] {
    slots.clear();
    if (client->connected() || client->WaitConnected(seconds(10))) return 1;
    if (!absl::IsUnavailable(client->Reserve(1, 5000, seconds(5)).status())) return 2;
    client->Count({.used_tokens = 1});
    client.reset();
    return 0;
  });
  EXPECT_EQ(response, 0);
  EXPECT_TRUE(client->connected());
  EXPECT_EQ(crumbd_->reservations(), 1);
  EXPECT_TRUE(client->Reserve(1, 5000, seconds(5)).ok());
}

TEST_F(ClientTest, StartsNoThreadBeforeOpen) {
  const size_t threads = Threads();
  const WorkerOptions options = SmallWorkerOptions();
  const auto worker = OpenWorker(options, nullptr);
  const SequenceModel model(options, RandomTokens(700, 1));
  const auto sequence = worker->Begin(model.prompt(600)).value();
  model.Pass(*sequence, 600);
  EXPECT_TRUE(sequence->Finish().ok());
  EXPECT_LE(Threads(), threads);  // threads of earlier tests may just be ending
}

}  // namespace
}  // namespace crumb::client
