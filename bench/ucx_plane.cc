// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/ucx_plane.h"

#include <cstring>
#include <fstream>
#include <utility>

#include "bench/measure.h"
#include "common/mutex.h"
#include "common/status_macros.h"
#include "fmt/format.h"
#include "transport/ucx_transport.h"

namespace crumb::bench {
namespace {

constexpr transport::SessionToken kSession = {0xC7};
constexpr uint64_t kGeneration = 1;
constexpr size_t kUcxBodiesBytes = 128 << 20;
constexpr size_t kSequencePages = 1600;

FragmentSet MakeSet(size_t fragment_bytes, size_t bodies_bytes) {
  FragmentSet set(fmt::format("ucx-{}", fragment_bytes), fragment_bytes, bodies_bytes,
                  kSequencePages);
  KeyspaceId keyspace;
  keyspace.bytes.fill(0xC7);
  set.BindKeyspace(keyspace, kGeneration);
  return set;
}

// Keeps a number of fetches in flight for a time. Its state belongs to the progress thread while
// fetches are in flight, and to the caller before and after.
class FetchRound {
 public:
  FetchRound(transport::Transport& transport, const std::string& address,
             const FragmentSet& fragments, size_t pages, size_t in_flight, UcxRooms rooms)
      : transport_(transport),
        address_(address),
        fragments_(fragments),
        pages_(pages),
        in_flight_(in_flight),
        rooms_(rooms == UcxRooms::kReused ? in_flight : pages,
               std::vector<std::byte>(fragments.tiles_bytes())) {
    for (size_t page = 0; page < pages; ++page) keys_.push_back(fragments.Key(page));
  }

  // Returns the number of fetches that ended within the time, and the time.
  absl::StatusOr<std::pair<uint64_t, Duration>> Run(Duration length, Latencies& latencies) {
    latencies_ = &latencies;
    ended_ = 0;
    const TimePoint begin = Clock::Real().Now();
    end_ = begin + length;
    {
      MutexLock lock(&mutex_);
      under_way_ = in_flight_;
    }
    for (size_t i = 0; i < in_flight_; ++i) Start(i);
    MutexLock lock(&mutex_);
    while (under_way_ > 0) idle_.Wait(&mutex_);
    CRUMB_RETURN_IF_ERROR(status_);
    return std::pair(ended_, last_ - begin);
  }

 private:
  // Returns the memory of a page, or of the fetch that ended if there is less memory than pages.
  void Start(size_t reused) {
    const size_t page = next_++ % pages_;
    const size_t room = rooms_.size() == pages_ ? page : reused;
    transport::FetchRequest request;
    request.session = kSession;
    request.keyspace = fragments_.keyspace();
    request.generation = fragments_.generation();
    request.pages = {
        {keys_[page], fragments_.range(), FragmentSet::kTileBytes, {rooms_[room].data(), 0, 0}}};
    const TimePoint begin = Clock::Real().Now();
    const auto started = transport_.Fetch(
        address_, std::move(request), [this, room, begin](const transport::FetchResponse& answer) {
          OnDone(room, begin, answer);
        });
    if (!started.ok()) Stop(started.status());
  }

  void OnDone(size_t room, TimePoint begin, const transport::FetchResponse& answer) {
    const transport::PageStatus status = answer.pages[0].status;
    if (status != transport::PageStatus::kHit) {
      return Stop(absl::UnavailableError(fmt::format("a fetch ended as {}: {}",
                                                     transport::PageStatusName(status),
                                                     std::string(answer.detail.message()))));
    }
    const TimePoint now = Clock::Real().Now();
    latencies_->Add(now - begin);
    ++ended_;
    last_ = now;
    if (now < end_ && !Interrupted()) return Start(room);
    Stop(absl::OkStatus());
  }

  void Stop(const absl::Status& status) {
    MutexLock lock(&mutex_);
    status_.Update(status);
    if (--under_way_ == 0) idle_.NotifyAll();
  }

  transport::Transport& transport_;
  const std::string address_;
  const FragmentSet& fragments_;
  const size_t pages_;
  const size_t in_flight_;
  std::vector<PageKey> keys_;
  std::vector<std::vector<std::byte>> rooms_;
  std::atomic<size_t> next_{0};
  Latencies* latencies_ = nullptr;
  TimePoint end_, last_;
  uint64_t ended_ = 0;
  Mutex mutex_;
  CondVar idle_;
  size_t under_way_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

transport::TransportOptions UcxPlaneOptions(const std::string& address) {
  transport::TransportOptions options;
  options.listen = address + ":0";
  return options;
}

FragmentSetSource::FragmentSetSource(size_t fragment_bytes, size_t pages)
    : fragments_(MakeSet(fragment_bytes, kUcxBodiesBytes)), slots_(pages) {
  for (size_t page = 0; page < pages; ++page) {
    const auto tiles = fragments_.Tiles(page);
    std::vector<std::byte>& slot = slots_[page];
    slot.resize(fragments_.fragment_bytes());
    std::memcpy(slot.data(), tiles.data(), tiles.size());
    EncodeFragmentHeader(fragments_.Header(page), std::span(slot).subspan(tiles.size()));
    pages_.emplace(fragments_.Key(page), page);
  }
}

void FragmentSetSource::Acquire(transport::SourceRequest request, Reply reply) {
  transport::SourceResponse answer;
  const bool known = request.session == kSession && request.keyspace == fragments_.keyspace() &&
                     request.generation == fragments_.generation();
  for (const auto& wanted : request.pages) {
    const auto found = pages_.find(wanted.key);
    transport::SourcePage& page = answer.pages.emplace_back();
    if (!known || found == pages_.end()) continue;
    page.status = transport::PageStatus::kHit;
    page.fragments = {{slots_[found->second], fragments_.range(), FragmentSet::kTileBytes}};
  }
  reply(std::move(answer));
}

absl::StatusOr<std::unique_ptr<FragmentServer>> FragmentServer::Start(const std::string& program,
                                                                      size_t fragment_bytes,
                                                                      size_t pages) {
  auto server = std::make_unique<FragmentServer>();
  CRUMB_ASSIGN_OR_RETURN(server->folder_, ScratchFolder::Create());
  const std::string file = server->folder_->path() + "/address";
  const std::string log = server->folder_->path() + "/log";
  CRUMB_ASSIGN_OR_RETURN(
      server->process_,
      ChildProcess::Start({program, std::to_string(fragment_bytes), std::to_string(pages), file},
                          log));
  CRUMB_RETURN_IF_ERROR(WaitReady(program, *server->process_, log, [&] {
    return static_cast<bool>(std::ifstream(file) >> server->address_);
  }));
  return server;
}

absl::StatusOr<TimedCalls> RunUcxFetches(const TimedCallsOptions& options,
                                         const std::string& server, size_t fragment_bytes,
                                         size_t pages, size_t in_flight, const std::string& here,
                                         UcxRooms rooms) {
  const FragmentSet fragments = MakeSet(fragment_bytes, 1);
  CRUMB_ASSIGN_OR_RETURN(const auto transport,
                         transport::OpenUcxTransport(UcxPlaneOptions(here), nullptr));
  FetchRound round(*transport, server, fragments, pages, in_flight, rooms);
  Latencies warm_up, latencies;
  CRUMB_RETURN_IF_ERROR(round.Run(std::chrono::milliseconds(50), warm_up).status());
  TimedRounds rounds(options);
  for (int i = 0; i < options.rounds && !Interrupted(); ++i) {
    CRUMB_ASSIGN_OR_RETURN(const auto ran, round.Run(rounds.length(), latencies));
    rounds.Add(ran.first, ToSeconds(ran.second));
  }
  return rounds.Total(latencies);
}

}  // namespace crumb::bench
