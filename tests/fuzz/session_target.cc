// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Messages that processes of a host send over crumbd's session sockets, and the calls about device
// pools that follow: hellos, PoolRequests with descriptors, and Reserve, Commit, Claim and Release
// of device slots. Two sessions of different tenants send against one crumbd, below gRPC and
// without sockets. The input is a sequence of messages: a byte with the kind and which session
// sends it, a byte with the descriptor that comes along and whether the message names the session's
// own pool, the size in two bytes, the message.
#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <memory>
#include <string>

#include "common/mapping.h"
#include "common/roster.h"
#include "server/calls/device_calls.h"
#include "server/calls/lease_calls.h"
#include "server/calls/staging_calls.h"
#include "server/device/device_pools.h"
#include "server/session/hello.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/server/call_fixture.h"

namespace crumb::fuzz {
namespace {

using namespace server;

enum class Kind : unsigned char { kHello, kPool, kReserve, kCommit, kClaim, kRelease, kKinds };
enum class File : unsigned char { kNone, kRoster, kMemory, kPipe, kEvent, kTwo, kKinds };
constexpr unsigned kSecondSession = 1u << 7;
constexpr unsigned kOwnPool = 1u << 7;
constexpr size_t kMessagesMax = 32;
constexpr uint64_t kSlotBytes = 18'432;
constexpr uint64_t kHandleBytes = 16 * kSlotBytes;

PoolOptions SmallPools() {
  PoolOptions options;
  options.pools_max = 3;
  options.handles_max = 4;
  options.slots_max = 256;
  options.descriptors_max = 12;
  return options;
}

std::vector<UniqueFd> Files(File file) {
  std::vector<UniqueFd> fds;
  switch (file) {
    case File::kTwo:
      fds.push_back(CreateRoster().value());
      [[fallthrough]];
    case File::kRoster:
      fds.push_back(CreateRoster().value());
      break;
    case File::kMemory:
      fds.push_back(CreateMemfd("fuzz", 64).value());
      break;
    case File::kPipe: {
      std::array<int, 2> ends;
      Check(::pipe2(ends.data(), O_CLOEXEC) == 0);
      fds.emplace_back(ends[0]);
      ::close(ends[1]);
      break;
    }
    case File::kEvent:
      fds.emplace_back(::eventfd(0, EFD_CLOEXEC));
      break;
    default:
      break;
  }
  return fds;
}

class Host final : public CallFixture {
 public:
  Host()
      : tier_({.device = {}, .is_below = [](const storage::FragmentMeta&) { return false; }},
              Clock::Real(), {}),
        pools_(SmallPools(), &tier_, Clock::Real(), metrics_) {
    sessions_.SetMemory(&pools_);
    context_.pools = &pools_;
    for (size_t i = 0; i < sent_by_.size(); ++i) {
      SessionTable::OpenRequest request;
      request.process_name = "fuzz";
      request.tenant = std::to_string(i);
      sent_by_[i].session = sessions_.Open(request).value();
    }
  }
  void TestBody() override {}

  void Send(Kind kind, size_t sender, File file, bool own_pool, const std::string& bytes);
  void CheckBounds() const;
  void CheckEnd();

  std::string keyspace() const { return std::string(keyspace_->id.view()); }
  std::string HeaderOf(int page) const {
    const std::vector<std::byte> fragment = Fragment(Key(page));
    return TextOf(std::span(fragment).subspan(tiles_bytes()));
  }

 private:
  struct Sender {
    std::shared_ptr<Session> session;
    std::string pool;
  };
  template <typename Request>
  bool Read(const std::string& bytes, const Sender& sender, bool own_pool, Request& request) const {
    if (!request.ParseFromString(bytes)) return false;
    if (!own_pool) return true;
    request.set_pool(sender.pool);
    if constexpr (requires { request.set_keyspace(""); }) request.set_keyspace(keyspace());
    return true;
  }
  void SendHello(File file, const std::string& bytes) const;
  void SendPool(Sender& sender, File file, bool own_pool, const std::string& bytes);

  storage::DeviceTier tier_;
  DevicePools pools_;
  std::array<Sender, 2> sent_by_;
};

void Host::SendHello(File file, const std::string& bytes) const {
  std::array<int, 2> ends;
  Check(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()) == 0);
  const UniqueFd process(ends[0]);
  const UniqueFd crumbd(ends[1]);
  FdMessage message{bytes, Files(file)};
  const size_t descriptors = message.fds.size();
  const SessionLimits limits;
  const auto hello = ReadHello(crumbd.get(), message, limits);
  // No descriptor of these is a pidfd, so the hello takes none of them.
  Check(message.fds.size() == descriptors);
  if (!hello.ok()) return RefuseHello(crumbd.get(), hello.status());
  Check(descriptors == 0);
}

void Host::SendPool(Sender& sender, File file, bool own_pool, const std::string& bytes) {
  v1::PoolRequest request;
  if (!request.ParseFromString(bytes)) return;
  if (own_pool) {
    if (request.has_offer()) request.mutable_offer()->set_pool(sender.pool);
    if (request.has_fetch()) request.mutable_fetch()->set_pool(sender.pool);
    if (request.has_leave()) request.mutable_leave()->set_pool(sender.pool);
  }
  const PoolReply reply = pools_.Handle(sender.session, request, Files(file));
  const bool refused = reply.response.code() != 0;
  Check(!refused || (reply.fds.empty() && reply.response.pool().empty()));
  Check(reply.fds.size() <=
        static_cast<size_t>(reply.response.handles_size()) + (reply.response.roster() ? 1 : 0));
  if (!refused && request.has_join()) sender.pool = reply.response.pool();
}

void Host::Send(Kind kind, size_t sender_index, File file, bool own_pool,
                const std::string& bytes) {
  Sender& sender = sent_by_[sender_index];
  Session& session = *sender.session;
  const auto done = [](const absl::Status&) {};
  switch (kind) {
    case Kind::kHello:
      return SendHello(file, bytes);
    case Kind::kPool:
      return SendPool(sender, file, own_pool, bytes);
    case Kind::kReserve: {
      v1::ReserveRequest request;
      v1::ReserveResponse response;
      if (!Read(bytes, sender, own_pool, request)) return;
      server::Reserve(context_, session, request, &response).IgnoreError();
      return;
    }
    case Kind::kCommit: {
      v1::CommitRequest request;
      v1::CommitResponse response;
      if (!Read(bytes, sender, own_pool, request) || request.pool().empty()) return;
      server::Commit(context_, *sender.session, request, &response, done);
      return;
    }
    case Kind::kClaim: {
      v1::ClaimSlotsRequest request;
      v1::ClaimSlotsResponse response;
      if (!Read(bytes, sender, own_pool, request)) return;
      const absl::Status status = ClaimSlots(context_, session, request, &response);
      Check(!status.ok() || response.claimed_size() == request.slots_size());
      return;
    }
    default: {
      v1::ReleaseRequest request;
      v1::ReleaseResponse response;
      if (!Read(bytes, sender, own_pool, request)) return;
      server::Release(context_, session, request, &response).IgnoreError();
    }
  }
}

void Host::CheckBounds() const {
  const DevicePools::Totals totals = pools_.totals();
  const PoolOptions options = SmallPools();
  Check(totals.pools <= static_cast<size_t>(options.pools_max));
  Check(totals.descriptors <= static_cast<uint64_t>(options.descriptors_max));
  storage::StoreStats stats;
  tier_.AddStats(stats);
  Check(stats.device.resident_bytes <= stats.device.capacity_bytes);
}

// Nothing is held for processes that have ended.
void Host::CheckEnd() {
  for (const Sender& sender : sent_by_) sessions_.End(sender.session);
  storage::StoreStats stats;
  tier_.AddStats(stats);
  Check(stats.pools.held_slots == 0);
}

void Run(std::span<const std::byte> input) {
  const std::string bytes = TextOf(input);
  Host host;
  size_t messages = 0;
  for (size_t at = 0; at + 4 <= bytes.size() && messages < kMessagesMax; ++messages) {
    const auto kind = static_cast<unsigned char>(bytes[at]);
    const auto file = static_cast<unsigned char>(bytes[at + 1]);
    const size_t size = static_cast<uint8_t>(bytes[at + 2]) |
                        static_cast<size_t>(static_cast<uint8_t>(bytes[at + 3])) << 8;
    host.Send(static_cast<Kind>((kind & ~kSecondSession) % static_cast<unsigned>(Kind::kKinds)),
              (kind & kSecondSession) != 0 ? 1 : 0,
              static_cast<File>((file & ~kOwnPool) % static_cast<unsigned>(File::kKinds)),
              (file & kOwnPool) != 0, bytes.substr(at + 4, size));
    host.CheckBounds();
    at += 4 + size;
  }
  host.CheckEnd();
}

template <typename Request>
std::string Message(Kind kind, unsigned sender, File file, const Request& request) {
  const std::string bytes = request.SerializeAsString();
  return std::string{static_cast<char>(static_cast<unsigned>(kind) | sender),
                     static_cast<char>(static_cast<unsigned>(file) | kOwnPool),
                     static_cast<char>(bytes.size() & 255), static_cast<char>(bytes.size() >> 8)} +
         bytes;
}

std::vector<std::string> Seeds() {
  const Host host;
  v1::SessionHello hello;
  hello.set_protocol_version(kSessionProtocolVersion);
  hello.set_process_name("fuzz");
  hello.set_staging_bytes(4096);
  v1::PoolRequest join;
  join.mutable_join()->set_device(std::string(16, 'd'));
  join.mutable_join()->set_slot_bytes(kSlotBytes);
  join.mutable_join()->set_handle_bytes(kHandleBytes);
  v1::PoolRequest again = join;
  again.mutable_join()->set_pool(std::string(16, 'p'));
  v1::PoolRequest marked = again;
  marked.mutable_join()->set_roster_mark(1);
  v1::PoolRequest offer;
  offer.mutable_offer();
  v1::PoolRequest numbered;
  numbered.mutable_offer()->set_number(0);
  v1::PoolRequest fetch;
  fetch.mutable_fetch();
  v1::PoolRequest leave;
  leave.mutable_leave();
  v1::PoolRequest reclaim;
  reclaim.mutable_reclaim()->set_device(std::string(16, 'd'));
  reclaim.mutable_reclaim()->set_bytes(1);
  v1::ReserveRequest reserve;
  reserve.set_count(3);
  reserve.set_request(1);
  v1::CommitRequest commit;
  v1::ClaimSlotsRequest claim;
  v1::ReleaseRequest release;
  for (int slot = 0; slot < 2; ++slot) {
    commit.add_slots(static_cast<uint64_t>(slot));
    commit.add_headers(host.HeaderOf(slot));
    claim.add_slots(static_cast<uint64_t>(slot));
    claim.add_headers(host.HeaderOf(slot));
    release.add_slots(static_cast<uint64_t>(slot));
  }
  const auto pool = [](const v1::PoolRequest& request, File file, unsigned sender = 0) {
    return Message(Kind::kPool, sender, file, request);
  };
  const std::string used = pool(join, File::kNone) + pool(offer, File::kMemory) +
                           Message(Kind::kReserve, 0, File::kNone, reserve) +
                           Message(Kind::kCommit, 0, File::kNone, commit);
  const std::string released = Message(Kind::kRelease, 0, File::kNone, release);
  return {Message(Kind::kHello, 0, File::kNone, hello),
          used + released + pool(leave, File::kNone) + pool(reclaim, File::kNone),
          used + pool(join, File::kNone, kSecondSession) +
              pool(offer, File::kMemory, kSecondSession) +
              Message(Kind::kReserve, kSecondSession, File::kNone, reserve),
          pool(again, File::kRoster) + pool(numbered, File::kMemory) +
              Message(Kind::kClaim, 0, File::kNone, claim) + pool(marked, File::kNone) + released,
          used + pool(fetch, File::kNone) + pool(again, File::kPipe) + pool(again, File::kEvent)};
}

}  // namespace

const FuzzTarget kSessionTarget = {"session", Run, Seeds};

}  // namespace crumb::fuzz
