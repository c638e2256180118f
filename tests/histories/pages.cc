// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/fd_channel.h"
#include "server/calls/keyspace_calls.h"
#include "server/calls/lease_calls.h"
#include "server/calls/page_calls.h"
#include "server/calls/put_assembler.h"
#include "server/calls/staging_calls.h"
#include "storage/coverage.h"
#include "tests/histories/failure.h"
#include "tests/histories/world.h"

namespace crumb::histories {
namespace {

constexpr TileRange kParts[] = {{{0, 1}, {0, kHeads}},
                                {{1, kLayers}, {0, kHeads}},
                                {{0, kLayers}, {0, 1}},
                                {{0, kLayers}, {1, kHeads}}};
constexpr uint32_t kWaitsMs[] = {0, 0, 1, 50, 5000};
// Damage to a fragment, which 8 of 16 have: 0 to 7.
enum class Damage : uint32_t {
  kTile,        // a bit of a tile
  kHeader,      // a bit of the header
  kKeyspace,    // it is another tenant's, by its header
  kGeneration,  // it is of a dropped generation
  kPlace,       // the header is said to be elsewhere
  kNone,
};
Damage DamageOf(uint32_t choice) {
  return static_cast<Damage>(std::min(choice % 16, static_cast<uint32_t>(Damage::kNone)));
}

// All tiles, or one time in four half of them.
bool IsPart(uint32_t choice) { return choice % 4 == 0; }
TileRange PartOf(uint32_t choice) { return kParts[choice % std::size(kParts)]; }
TileRange RangeOf(uint32_t choice) { return IsPart(choice) ? PartOf(choice / 4) : kAllTiles; }

void SetRange(const TileRange& range, v1::TileRange* message) {
  message->set_layer_begin(range.layers.begin);
  message->set_layer_end(range.layers.end);
  message->set_head_begin(range.heads.begin);
  message->set_head_end(range.heads.end);
}

TileRange RangeOf(const v1::AcquireRequest& request) {
  if (!request.has_range()) return kAllTiles;
  const v1::TileRange& range = request.range();
  return {{static_cast<uint16_t>(range.layer_begin()), static_cast<uint16_t>(range.layer_end())},
          {static_cast<uint16_t>(range.head_begin()), static_cast<uint16_t>(range.head_end())}};
}

// Few pages are frequent, so that readers find the writers' pages; all others are rare.
constexpr uint32_t kFrequentPages[] = {0, 0, 0, 0, 1, 2, 3, 6};
}  // namespace

uint32_t PageOf(uint32_t choice) {
  return choice % 4 == 0 ? choice / 4 % kKeys
                         : kFrequentPages[choice / 4 % std::size(kFrequentPages)];
}

namespace {

PageKey KeyAt(const std::string& keys, size_t index) {
  PageKey key;
  std::memcpy(&key, keys.data() + index * sizeof(PageKey), sizeof(PageKey));
  return key;
}

}  // namespace

// A run of one sequence's keys; behind its end go those of the sequence that follows.
std::string World::KeysOf(int keyspace, uint32_t first, uint32_t count) const {
  std::string keys;
  for (uint32_t i = 0; i < count; ++i) {
    keys += model_.KeyOf(keyspace, static_cast<int>((first + i) % kKeys)).view();
  }
  return keys;
}

uint64_t World::NewContent(int keyspace, uint64_t page, const TileRange& range, bool valid) {
  const auto known = node_->keyspaces->Find(model_.IdOf(keyspace));
  const int key = static_cast<int>(page % kKeys);
  return model_.Add({.keyspace = keyspace,
                     .key = model_.KeyOf(keyspace, key),
                     .generation = known->generation.load(),
                     .range = range,
                     .valid = valid});
}

void World::Reserve(Worker& worker, const Step& step) {
  if (!HasSession(worker)) return;
  const auto view = worker.view;
  const int keyspace = KeyspaceOf(worker, step.a);
  OnCaller([this, view, keyspace, step, context = ContextOf(worker)] {
    v1::ReserveRequest request;
    request.set_count(1 + step.a / 2 % 4);
    request.set_fragment_bytes(FragmentBytes(RangeOf(step.c).tiles(), kTileBytes));
    if (step.b % 3 == 0) {
      request.set_keyspace(std::string(model_.IdOf(keyspace).view()));
      request.set_keys(KeysOf(keyspace, step.b / 3, 1));
    }
    v1::ReserveResponse response;
    const absl::Status status = server::Reserve(context, *view->session, request, &response);
    if (!status.ok() || !view->open) return;
    for (const uint64_t offset : response.offsets()) {
      view->reserved.push_back({offset, request.fragment_bytes()});
    }
  });
}

void World::Commit(Worker& worker, const Step& step) {
  if (!HasSession(worker)) return;
  if (worker.view->reserved.empty()) return Reserve(worker, step);
  const int keyspace = KeyspaceOf(worker, step.a);
  std::vector<View::Reserved>& reserved = worker.view->reserved;
  const size_t count = std::min<size_t>(reserved.size(), 1 + step.a / 2 % 4);
  const std::vector<View::Reserved> pieces(reserved.end() - static_cast<std::ptrdiff_t>(count),
                                           reserved.end());
  reserved.resize(reserved.size() - count);
  const Damage damage = DamageOf(step.c);
  std::vector<uint64_t> contents;
  for (size_t i = 0; i < count; ++i) {
    // A damaged tile is found when it is served; tiles that are known already are not looked at.
    const bool valid = damage == Damage::kNone || damage == Damage::kTile || i > 0;
    // A piece has the size of its fragment.
    const bool whole = pieces[i].bytes == FragmentBytes(kAllTiles.tiles(), kTileBytes);
    const TileRange range = whole ? kAllTiles : PartOf(step.c / 16);
    contents.push_back(NewContent(keyspace, PageOf(step.b) + i, range, valid));  // in sequence
  }
  CommitContents(worker, keyspace, pieces, contents, step.c, [](const absl::Status&) {});
}

// The first fragment is damaged as `damage` says.
void World::CommitContents(Worker& worker, int keyspace, std::vector<View::Reserved> pieces,
                           std::vector<uint64_t> contents, uint32_t damage, StatusFunction then) {
  const auto view = worker.view;
  const auto call = std::make_shared<Call<v1::CommitRequest, v1::CommitResponse>>();
  call->request.set_keyspace(std::string(model_.IdOf(keyspace).view()));
  std::vector<Model::CommitId> commits;
  for (size_t i = 0; i < contents.size(); ++i) {
    const Damage wrong = i == 0 ? DamageOf(damage) : Damage::kNone;
    const Model::Content& content = model_.at(contents[i]);
    std::vector<std::byte> bytes = model_.FragmentOf(contents[i], wrong == Damage::kTile);
    const auto header_at =
        static_cast<uint32_t>(FragmentTilesBytes(content.range.tiles(), kTileBytes));
    if (wrong == Damage::kHeader) bytes[header_at + damage % 100] ^= std::byte{32};
    if (wrong == Damage::kKeyspace || wrong == Damage::kGeneration) {
      FragmentHeader header = model_.HeaderOf(contents[i]);
      if (wrong == Damage::kGeneration) header.generation -= 1;
      if (wrong == Damage::kKeyspace) header.keyspace = model_.IdOf((keyspace + 2) % kKeyspaces);
      EncodeFragmentHeader(header, std::span(bytes).subspan(header_at));
    }
    std::memcpy(view->staging.data() + pieces[i].offset, bytes.data(),
                std::min<size_t>(bytes.size(), pieces[i].bytes));
    call->request.add_offsets(pieces[i].offset);
    call->request.add_header_offsets(wrong == Damage::kPlace ? header_at - 8 : header_at);
    commits.push_back(model_.BeginCommit(contents[i], !history_.profile.second_hit));
  }
  const auto done = Expect([this, call, commits, then = std::move(then)](const absl::Status& s) {
    for (size_t i = 0; i < commits.size(); ++i) {
      const bool completed = s.ok() && static_cast<int>(i) < call->response.outcomes_size();
      const auto outcome =
          completed ? call->response.outcomes(static_cast<int>(i)) : v1::COMMIT_OUTCOME_REFUSED;
      const bool there =
          outcome == v1::COMMIT_OUTCOME_STORED || outcome == v1::COMMIT_OUTCOME_DEDUPLICATED;
      if (there && !model_.at(commits[i].content).valid) {
        Fail("damaged-refused", "a fragment with a damaged header was accepted");
      }
      model_.EndCommit(commits[i], there);
      if (there) ++counts_.commits;
    }
    then(s);
  });
  OnCaller([call, view, done, context = ContextOf(worker)] {
    server::Commit(context, *view->session, call->request, &call->response, done);
  });
}

void World::CommitTwice(Worker& worker, const Step& step) {
  if (!HasSession(worker)) return;
  const int keyspace = KeyspaceOf(worker, step.a);
  const TileRange ranges[] = {kAllTiles, PartOf(step.c)};
  const auto left = std::make_shared<size_t>(std::size(ranges));
  for (const TileRange& range : ranges) {
    const uint64_t bytes = FragmentBytes(range.tiles(), kTileBytes);
    uint64_t offset = 0;
    if (!worker.view->session->staging()->Reserve(bytes, offset)) return;
    const uint64_t content = NewContent(keyspace, PageOf(step.b), range, /*valid=*/true);
    CommitContents(worker, keyspace, {{offset, bytes}}, {content},
                   static_cast<uint32_t>(Damage::kNone), [this, &worker, left](const auto&) {
                     if (--*left == 0) Flush(worker);
                   });
  }
}

void World::Abort(Worker& worker, const Step& step) {
  if (worker.view == nullptr || worker.view->reserved.empty()) return;
  const auto view = worker.view;
  const size_t index = step.a % view->reserved.size();
  const uint64_t offset = view->reserved[index].offset;
  view->reserved.erase(view->reserved.begin() + static_cast<std::ptrdiff_t>(index));
  OnCaller([view, offset, context = ContextOf(worker)] {
    v1::AbortRequest request;
    request.add_offsets(offset);
    server::Abort(context, *view->session, request).IgnoreError();
  });
}

void World::Put(Worker& worker, const Step& step) {
  const int keyspace = KeyspaceOf(worker, step.a);
  const bool damaged = DamageOf(step.c) == Damage::kTile;
  const uint64_t content =
      NewContent(keyspace, PageOf(step.b), RangeOf(step.c / 16), /*valid=*/true);
  const Model::CommitId commit = model_.BeginCommit(content, !history_.profile.second_hit);
  const auto done = Expect([](const absl::Status&) {});
  OnCaller([this, content, commit, damaged, keyspace, done, context = ContextOf(worker)] {
    const std::vector<std::byte> bytes = model_.FragmentOf(content, damaged);
    const size_t tiles = FragmentTilesBytes(model_.at(content).range.tiles(), kTileBytes);
    v1::PutRequest request;
    request.set_keyspace(std::string(model_.IdOf(keyspace).view()));
    const auto* data = reinterpret_cast<const char*>(bytes.data());
    request.set_header(data + tiles, bytes.size() - tiles);
    request.set_tiles(data, tiles);
    server::PutAssembler assembler(context);
    const absl::StatusOr<bool> complete = assembler.Add(request);
    if (complete.ok() && *complete) assembler.Commit();
    const v1::PutResponse response = assembler.Finish();
    const bool there =
        response.outcomes_size() == 1 && (response.outcomes(0) == v1::COMMIT_OUTCOME_STORED ||
                                          response.outcomes(0) == v1::COMMIT_OUTCOME_DEDUPLICATED);
    model_.EndCommit(commit, there);
    if (there) ++counts_.commits;
    done(absl::OkStatus());
  });
}

void World::Acquire(Worker& worker, const Step& step, bool given_up) {
  if (!HasSession(worker)) return;
  const auto view = worker.view;
  const int keyspace = KeyspaceOf(worker, step.a);
  const auto call = std::make_shared<Call<v1::AcquireRequest, v1::AcquireResponse>>();
  v1::AcquireRequest& request = call->request;
  request.set_keyspace(std::string(model_.IdOf(keyspace).view()));
  const uint32_t page = step.b % 4 == 0 ? PageOf(step.b / 4) : 0;
  request.set_keys(KeysOf(keyspace, page, 1 + step.c % (kSequencePages + 2)));
  if (step.c / 8 % 4 == 0) SetRange(RangeOf(step.c / 32), request.mutable_range());
  request.set_wait_ms(kWaitsMs[step.a / 2 % std::size(kWaitsMs)]);
  request.set_request(++view->requests);
  if (!worker.pool.id.empty() && worker.pool.view == view) request.add_pools(worker.pool.id);
  const Model::Since since = model_.Begin(keyspace);
  const auto done =
      Expect([this, call, view, &worker, keyspace, since, given_up](const absl::Status& status) {
        if (!status.ok() || !view->open || given_up) return;
        NoteAcquired(worker, view, keyspace, since, call->request, call->response);
      });
  OnCaller([call, view, done, context = ContextOf(worker)] {
    server::Acquire(context, view->session, TimePoint::max(), call->request, &call->response, done);
  });
  if (!given_up) return;
  // Soon after, or long after, the caller gives back the leases that it has no response for.
  OnCaller(
      [this, view, number = request.request(), pause = step.b % 3, context = ContextOf(worker)] {
        if (pause > 0) scheduler_.Sleep(std::chrono::microseconds(100 * pause));
        v1::ReleaseRequest release;
        release.add_requests(number);
        v1::ReleaseResponse response;
        server::Release(context, *view->session, release, &response).IgnoreError();
      });
}

void World::NoteAcquired(Worker& worker, const std::shared_ptr<View>& view, int keyspace,
                         const Model::Since& since, const v1::AcquireRequest& request,
                         const v1::AcquireResponse& response) {
  if (response.hit_pages() == 0) {
    if (response.lease() != 0) Fail("acquire", "a lease of no page");
    return;
  }
  HeldLease held;
  held.lease = response.lease();
  held.keyspace = keyspace;
  held.view = view;
  held.since = since;
  held.request = request;
  HoldHostFragments(&held, request, response);
  HoldDeviceFragments(worker, held, request, response);
  counts_.hits += response.hit_pages();
  worker.leases.push_back(std::move(held));
}

// Reads the slabs that the node sent over the session's socket, each once.
void World::ReadGrants(View& view) {
  while (true) {
    absl::StatusOr<FdMessage> message = ReceiveFdMessage(view.socket.get());
    if (!message.ok()) return;
    v1::SlabGrant grant;
    if (!grant.ParseFromString(message->bytes) || message->fds.size() != 1) {
      Fail("slab-grant", "a slab came with a message that is none");
    }
    auto slab = std::make_shared<SlabView>();
    slab->fd = std::move(message->fds.front());
    slab->mapping = Mapping::Of(slab->fd.get(), grant.bytes(), Mapping::Access::kReadOnly).value();
    const std::string path = fmt::format("/proc/self/fd/{}", slab->fd.get());
    hoard_.emplace_back(view.tenant, UniqueFd(::open(path.c_str(), O_PATH | O_CLOEXEC)));
    view.slabs[grant.slab()] = std::move(slab);
  }
}

std::shared_ptr<SlabView> World::SlabOf(View& view, uint32_t slab) {
  if (view.gate != nullptr) {
    ReadGrants(view);
  } else if (!view.slabs.contains(slab)) {
    const storage::Slab found = node_->store->slabs().at(slab);
    auto mapped = std::make_shared<SlabView>();
    mapped->mapping = Mapping::Of(found.fd, found.bytes, Mapping::Access::kReadOnly).value();
    view.slabs[slab] = std::move(mapped);
  }
  const auto found = view.slabs.find(slab);
  if (found == view.slabs.end()) Fail("slab-grant", "slab {} of a lease was not sent", slab);
  return found->second;
}

void World::HoldHostFragments(HeldLease* held, const v1::AcquireRequest& request,
                              const v1::AcquireResponse& response) {
  const TileRange wanted = RangeOf(request);
  const v1::Fragments& fragments = response.fragments();
  std::map<uint32_t, std::vector<TileRange>> covered;
  for (int i = 0; i < fragments.pages_size(); ++i) {
    const PageKey key = KeyAt(request.keys(), fragments.pages(i));
    const auto slab = SlabOf(*held->view, fragments.slabs(i));
    const auto memory = slab->mapping.bytes().subspan(fragments.offsets(i));
    const auto header = DecodeFragmentHeader(memory.subspan(fragments.header_offsets(i)));
    if (!header.ok() || header->key != key || header->keyspace != model_.IdOf(held->keyspace)) {
      Fail("bytes-are-committed", "a leased fragment has another header: {}",
           header.ok() ? header->key.ToHex() : header.status().ToString());
    }
    const TileRange range = header->range;
    covered[fragments.pages(i)].push_back(range);
    size_t tile = 0;
    for (int layer = range.layers.begin; layer < range.layers.end; ++layer) {
      for (int head = range.heads.begin; head < range.heads.end; ++head, ++tile) {
        const auto bytes = memory.subspan(tile * kTileBytes, kTileBytes);
        const uint64_t content =
            model_.CheckTile(bytes, held->keyspace, key, layer, head, held->since);
        held->tiles.push_back(
            {slab, fragments.offsets(i) + tile * kTileBytes, key, layer, head, content});
      }
    }
  }
  if (response.page_tiers().empty()) return;  // a joined lease names no tiers
  for (uint32_t page = 0; page < response.hit_pages(); ++page) {
    if (response.page_tiers(static_cast<int>(page)) == v1::TIER_DEVICE) continue;
    std::vector<TileRange> parts;
    for (const TileRange& range : covered[page]) parts.push_back(Intersect(range, wanted));
    if (!storage::Covers(parts, wanted)) {
      Fail("hits-are-whole", "page {} of a hit lacks tiles", page);
    }
  }
}

void World::Join(Worker& worker, const Step& step) {
  if (!HasSession(worker)) return;
  const Worker& other = workers_[step.a % kWorkers];
  if (other.tenant != worker.tenant || other.leases.empty()) return;
  const HeldLease& lease = other.leases[step.b % other.leases.size()];
  if (lease.view->node != nodes_) return;
  const auto view = worker.view;
  const auto call = std::make_shared<Call<v1::AcquireRequest, v1::AcquireResponse>>();
  call->request.set_keyspace(std::string(model_.IdOf(lease.keyspace).view()));
  call->request.set_lease(lease.lease);
  call->request.set_request(++view->requests);
  v1::AcquireRequest keys = lease.request;
  keys.clear_pools();
  if (keys.has_range()) *call->request.mutable_range() = keys.range();
  const auto done =
      Expect([this, call, view, &worker, keys = std::move(keys), keyspace = lease.keyspace,
              since = lease.since](const absl::Status& status) {
        if (!status.ok() || !view->open || call->response.hit_pages() == 0) return;
        HeldLease held;
        held.lease = call->response.lease();
        held.keyspace = keyspace;
        held.view = view;
        held.since = since;
        held.request = keys;
        HoldHostFragments(&held, keys, call->response);
        worker.leases.push_back(std::move(held));
      });
  OnCaller([call, view, done, context = ContextOf(worker)] {
    server::Acquire(context, view->session, TimePoint::max(), call->request, &call->response, done);
  });
}

void World::Release(Worker& worker, const Step& step) {
  if (worker.leases.empty()) return;
  const size_t index = step.a % worker.leases.size();
  const HeldLease lease = std::move(worker.leases[index]);
  worker.leases.erase(worker.leases.begin() + static_cast<std::ptrdiff_t>(index));
  for (const HeldLease::Tile& tile : lease.tiles) {
    model_.CheckTile(tile.slab->mapping.bytes().subspan(tile.offset, kTileBytes), lease.keyspace,
                     tile.key, tile.layer, tile.head, lease.since);
  }
  RemoveUsers([&](const DeviceSlot::User& user) {
    return user.worker == worker.index && user.use == DeviceSlot::Use::kLeased &&
           user.lease == lease.lease && user.view == lease.view;
  });
  if (lease.view->node != nodes_) return;  // its node is gone
  OnCaller([lease, context = ContextOf(worker)] {
    v1::ReleaseRequest request;
    request.add_leases(lease.lease);
    v1::ReleaseResponse response;
    server::Release(context, *lease.view->session, request, &response).IgnoreError();
  });
}

void World::Lookup(Worker& worker, const Step& step) {
  const int keyspace = KeyspaceOf(worker, step.a);
  const auto call = std::make_shared<Call<v1::LookupRequest, v1::LookupResponse>>();
  call->request.set_keyspace(std::string(model_.IdOf(keyspace).view()));
  call->request.set_keys(KeysOf(keyspace, PageOf(step.b), 1 + step.c % kSequencePages));
  const auto done = Expect([call](const absl::Status& status) {
    if (status.ok() && call->response.hit_pages() > call->request.keys().size() / 32) {
      Fail("lookup", "more pages than keys");
    }
  });
  OnCaller([call, done, context = ContextOf(worker)] {
    server::Lookup(context, TimePoint::max(), call->request, &call->response, done);
  });
}

void World::Prefetch(Worker& worker, const Step& step) {
  const int keyspace = KeyspaceOf(worker, step.a);
  OnCaller([this, keyspace, step, context = ContextOf(worker)] {
    v1::PrefetchRequest request;
    request.set_keyspace(std::string(model_.IdOf(keyspace).view()));
    request.set_keys(KeysOf(keyspace, PageOf(step.b), 1 + step.c % kSequencePages));
    v1::PrefetchResponse response;
    server::Prefetch(context, request, &response).IgnoreError();
  });
}

void World::Pin(Worker& worker, const Step& step, bool pin) {
  const int keyspace = KeyspaceOf(worker, step.a);
  const std::string id(model_.IdOf(keyspace).view());
  const std::string keys = KeysOf(keyspace, PageOf(step.b), 1 + step.c % kSequencePages);
  if (!pin) {
    OnCaller([id, keys, context = ContextOf(worker)] {
      v1::UnpinRequest request;
      request.set_keyspace(id);
      request.set_keys(keys);
      v1::UnpinResponse response;
      server::Unpin(context, request, &response).IgnoreError();
    });
    return;
  }
  const auto call = std::make_shared<Call<v1::PinRequest, v1::PinResponse>>();
  call->request.set_keyspace(id);
  call->request.set_keys(keys);
  call->request.set_ttl_ms(1 + step.c % 200'000);
  const auto done = Expect([call](const absl::Status&) {});
  OnCaller([call, done, context = ContextOf(worker)] {
    server::Pin(context, TimePoint::max(), call->request, &call->response, done);
  });
}

void World::Delete(Worker& worker, const Step& step) {
  const int keyspace = KeyspaceOf(worker, step.a);
  const uint32_t count = 1 + step.c % kSequencePages;
  const auto call = std::make_shared<Call<v1::DeleteRequest, v1::DeleteResponse>>();
  call->request.set_keyspace(std::string(model_.IdOf(keyspace).view()));
  call->request.set_keys(KeysOf(keyspace, PageOf(step.b), count));
  std::vector<PageKey> keys;
  for (uint32_t i = 0; i < count; ++i) keys.push_back(KeyAt(call->request.keys(), i));
  auto deleted = model_.BeginDelete(keyspace, keys);
  const auto done = Expect([this, call, deleted = std::move(deleted)](const absl::Status& status) {
    model_.EndDelete(deleted, status.ok());
  });
  OnCaller([call, done, context = ContextOf(worker)] {
    server::Delete(context, call->request, &call->response, done);
  });
}

void World::Drop(Worker& worker, const Step& step) {
  const int keyspace = KeyspaceOf(worker, step.a);
  const auto call = std::make_shared<Call<v1::DropKeyspaceRequest, v1::DropKeyspaceResponse>>();
  call->request.set_keyspace(std::string(model_.IdOf(keyspace).view()));
  model_.BeginDrop(keyspace);
  const auto done = Expect([this, call, keyspace](const absl::Status& status) {
    model_.EndDrop(keyspace, status.ok() ? call->response.generation() : 0);
  });
  OnCaller([call, done, context = ContextOf(worker)] {
    server::DropKeyspace(context, call->request, &call->response, done);
  });
}

void World::SetState(Worker& worker, const Step& step) {
  const int keyspace = KeyspaceOf(worker, step.a);
  const auto call =
      std::make_shared<Call<v1::SetKeyspaceStateRequest, v1::SetKeyspaceStateResponse>>();
  call->request.set_keyspace(std::string(model_.IdOf(keyspace).view()));
  call->request.set_state(step.b % 6 == 0 ? v1::KEYSPACE_STATE_BF16 : v1::KEYSPACE_STATE_ACTIVE);
  const auto done = Expect([call](const absl::Status&) {});
  OnCaller([call, done, context = ContextOf(worker)] {
    server::SetKeyspaceState(context, call->request, done);
  });
}

void World::Flush(Worker& worker) {
  const auto call = std::make_shared<Call<v1::FlushRequest, v1::FlushResponse>>();
  auto commits = model_.BeginFlush(worker.tenant);
  const auto done = Expect([this, call, tenant = worker.tenant,
                            commits = std::move(commits)](const absl::Status& status) {
    if (status.ok()) return model_.EndFlush(commits);
    if (call->response.lost_pages() > 0) model_.LossReported(tenant);
  });
  OnCaller([call, done, context = ContextOf(worker)] {
    server::Flush(context, call->request, &call->response, done);
  });
}

}  // namespace crumb::histories
