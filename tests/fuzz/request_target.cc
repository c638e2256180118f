// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Requests as they come over gRPC, below gRPC: keys, ranges, offsets, headers and tiles of anybody.
// The first byte says which call; the keyspace is set to one that is open when its next bit says
// so.
#include <memory>
#include <string>

#include "crumb/v1/cache_service.pb.h"
#include "server/calls/get_reader.h"
#include "server/calls/keyspace_calls.h"
#include "server/calls/lease_calls.h"
#include "server/calls/page_calls.h"
#include "server/calls/put_assembler.h"
#include "server/calls/staging_calls.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/server/call_fixture.h"

namespace crumb::fuzz {
namespace {

using namespace server;

enum class Kind : unsigned char {
  kOpenKeyspace,
  kAcquire,
  kLookup,
  kPin,
  kUnpin,
  kDelete,
  kGet,
  kPut,
  kStaging,
  kRelease,
  kPrefetch,
  kKinds
};
constexpr unsigned kOpenKeyspaceBit = 1u << 7;

// One keyspace with one page, a session, and the responses of calls.
class Calls final : public CallFixture {
 public:
  Calls() { Store(Key(1)); }
  void TestBody() override {}

  void Call(Kind kind, bool open_keyspace, const std::string& bytes);
  std::string keyspace() const { return std::string(keyspace_->id.view()); }
  static PageKey SeedKey() { return Key(1); }
  std::vector<std::byte> SeedFragment() const { return Fragment(Key(2), 5); }
  using CallFixture::tiles_bytes;

 private:
  template <typename Request>
  bool Read(const std::string& bytes, Request& request) const {
    if (!request.ParseFromString(bytes)) return false;
    if constexpr (requires { request.set_wait_ms(0); }) request.set_wait_ms(0);
    if constexpr (requires { request.set_keyspace(""); }) {
      if (open_) request.set_keyspace(keyspace());
    }
    return true;
  }
  void CallAcquire(const std::string& bytes);
  void CallGet(const std::string& bytes);
  void CallPut(const std::string& bytes);
  void CallStaging(const std::string& bytes);

  static Done Ignored() {
    return [](absl::Status status) { status.IgnoreError(); };
  }

  bool open_ = false;
  std::shared_ptr<Session> session_ = OpenSession();
  v1::OpenKeyspaceResponse opened_;
  v1::AcquireResponse acquired_;
  v1::LookupResponse found_;
  v1::PinResponse pinned_;
  v1::DeleteResponse deleted_;
  v1::CommitResponse committed_;
};

void Calls::CallAcquire(const std::string& bytes) {
  v1::AcquireRequest request;
  if (!Read(bytes, request)) return;
  Acquire(context_, session_, TimePoint::max(), request, &acquired_, [&](absl::Status status) {
    if (!status.ok()) return;
    Check(acquired_.hit_pages() * size_t{32} <= request.keys().size());
    Check((acquired_.lease() != 0) == (acquired_.hit_pages() > 0));
    v1::ReleaseRequest release;
    release.add_leases(acquired_.lease());
    v1::ReleaseResponse released;
    Release(context_, *session_, release, &released).IgnoreError();
  });
}

void Calls::CallGet(const std::string& bytes) {
  v1::GetRequest request;
  if (!Read(bytes, request)) return;
  GetReader::Open(context_, request, TimePoint::max(), [](auto reader) {
    GetReader::Part part;
    while (reader.ok() && (*reader)->Next(part)) Check(part.tiles.size() <= 1 << 20);
  });
}

// Messages behind each other, each after its size in two bytes.
void Calls::CallPut(const std::string& bytes) {
  PutAssembler put(context_);
  const uint64_t before = store_.Stats().host.pages;
  uint64_t commits = 0;
  for (size_t at = 0; at + 2 <= bytes.size();) {
    const size_t size = static_cast<uint8_t>(bytes[at]) | static_cast<uint8_t>(bytes[at + 1]) << 8;
    v1::PutRequest request;
    if (!request.ParseFromString(bytes.substr(at + 2, size))) return;
    if (open_ && !request.keyspace().empty()) request.set_keyspace(keyspace());
    at += 2 + size;
    const absl::StatusOr<bool> complete = put.Add(request);
    if (!complete.ok()) return;
    if (!*complete) continue;
    put.Commit();
    ++commits;
  }
  put.Finish();
  Check(store_.Stats().host.pages <= before + commits);
}

void Calls::CallStaging(const std::string& bytes) {
  v1::ReserveRequest reserve;
  reserve.set_count(2);
  reserve.set_fragment_bytes(fragment_bytes());
  v1::ReserveResponse reserved;
  Check(Reserve(context_, *session_, reserve, &reserved).ok());
  v1::CommitRequest commit;
  if (Read(bytes, commit)) {
    Commit(context_, *session_, commit, &committed_, Ignored());
  }
  v1::AbortRequest abort;
  if (Read(bytes, abort)) Abort(context_, *session_, abort).IgnoreError();
  if (Read(bytes, reserve)) Reserve(context_, *session_, reserve, &reserved).IgnoreError();
}

void Calls::Call(Kind kind, bool open_keyspace, const std::string& bytes) {
  open_ = open_keyspace;
  v1::OpenKeyspaceRequest open;
  v1::LookupRequest lookup;
  v1::PinRequest pin;
  v1::UnpinRequest unpin;
  v1::UnpinResponse unpinned;
  v1::DeleteRequest remove;
  v1::ReleaseRequest release;
  v1::ReleaseResponse released;
  v1::PrefetchRequest prefetch;
  v1::PrefetchResponse prefetched;
  switch (kind) {
    case Kind::kOpenKeyspace:
      if (Read(bytes, open)) OpenKeyspace(context_, open, &opened_, Ignored());
      break;
    case Kind::kAcquire:
      CallAcquire(bytes);
      break;
    case Kind::kLookup:
      if (Read(bytes, lookup)) Lookup(context_, TimePoint::max(), lookup, &found_, Ignored());
      break;
    case Kind::kPin:
      if (Read(bytes, pin)) Pin(context_, TimePoint::max(), pin, &pinned_, Ignored());
      break;
    case Kind::kUnpin:
      if (Read(bytes, unpin)) Unpin(context_, unpin, &unpinned).IgnoreError();
      break;
    case Kind::kDelete:
      if (Read(bytes, remove)) Delete(context_, remove, &deleted_, Ignored());
      break;
    case Kind::kGet:
      CallGet(bytes);
      break;
    case Kind::kPut:
      CallPut(bytes);
      break;
    case Kind::kStaging:
      CallStaging(bytes);
      break;
    case Kind::kRelease:
      if (Read(bytes, release)) Release(context_, *session_, release, &released).IgnoreError();
      break;
    default:
      if (Read(bytes, prefetch)) Prefetch(context_, prefetch, &prefetched).IgnoreError();
  }
  // Responses are written before they are destroyed.
  commits_.Stop();
  control_.Stop();
}

void Run(std::span<const std::byte> input) {
  if (input.empty()) return;
  const auto first = static_cast<unsigned>(input[0]);
  Calls calls;
  calls.Call(static_cast<Kind>((first & ~kOpenKeyspaceBit) % static_cast<unsigned>(Kind::kKinds)),
             (first & kOpenKeyspaceBit) != 0, TextOf(input.subspan(1)));
}

template <typename Request>
std::string Seed(Kind kind, const Request& request) {
  return std::string(1, static_cast<char>(static_cast<unsigned>(kind) | kOpenKeyspaceBit)) +
         request.SerializeAsString();
}

template <typename Request>
Request WithKeys() {
  Request request;
  request.set_keyspace(std::string(32, 'k'));
  request.set_keys(std::string(Calls::SeedKey().view()) + std::string(32, 'x'));
  return request;
}

std::string PutSeed() {
  const Calls calls;
  const std::vector<std::byte> fragment = calls.SeedFragment();
  v1::PutRequest header;
  header.set_keyspace(calls.keyspace());
  header.set_header(fragment.data() + calls.tiles_bytes(), fragment.size() - calls.tiles_bytes());
  v1::PutRequest tiles;
  tiles.set_tiles(fragment.data(), calls.tiles_bytes());
  std::string seed(1, static_cast<char>(static_cast<unsigned>(Kind::kPut) | kOpenKeyspaceBit));
  for (const v1::PutRequest* request : {&header, &tiles}) {
    const std::string bytes = request->SerializeAsString();
    seed += {static_cast<char>(bytes.size() & 255), static_cast<char>(bytes.size() >> 8)};
    seed += bytes;
  }
  return seed;
}

std::vector<std::string> Seeds() {
  v1::OpenKeyspaceRequest open;
  (*open.mutable_fields())["model"] = "m";
  open.set_layers(2);
  open.set_kv_heads(2);
  open.set_head_dim(64);
  open.set_group_size(32);
  auto acquire = WithKeys<v1::AcquireRequest>();
  acquire.mutable_range()->set_layer_end(2);
  acquire.mutable_range()->set_head_begin(1);
  acquire.mutable_range()->set_head_end(2);
  acquire.add_pools(std::string(16, 'p'));
  v1::CommitRequest commit;
  commit.set_keyspace(std::string(32, 'k'));
  commit.add_offsets(0);
  commit.add_header_offsets(4 * 2304);
  v1::ReleaseRequest release;
  release.add_leases(1);
  release.add_leases(UINT64_MAX);
  return {Seed(Kind::kOpenKeyspace, open),
          Seed(Kind::kAcquire, acquire),
          Seed(Kind::kLookup, WithKeys<v1::LookupRequest>()),
          Seed(Kind::kPin, WithKeys<v1::PinRequest>()),
          Seed(Kind::kUnpin, WithKeys<v1::UnpinRequest>()),
          Seed(Kind::kDelete, WithKeys<v1::DeleteRequest>()),
          Seed(Kind::kGet, WithKeys<v1::GetRequest>()),
          PutSeed(),
          Seed(Kind::kStaging, commit),
          Seed(Kind::kRelease, release),
          Seed(Kind::kPrefetch, WithKeys<v1::PrefetchRequest>())};
}

}  // namespace

const FuzzTarget kRequestTarget = {"request", Run, Seeds};

}  // namespace crumb::fuzz
