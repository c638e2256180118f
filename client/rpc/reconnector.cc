// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/rpc/reconnector.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "common/logging.h"

namespace crumb::client {
namespace {

// Timeouts for returning leases and for the last report of counters. They are short because crumbd
// releases everything anyway when the process ends.
constexpr Duration kReturnTimeout = std::chrono::milliseconds(500);
constexpr Duration kFarewellTimeout = std::chrono::milliseconds(100);
// Number of slots returned in one call.
constexpr size_t kSlotsPerReturn = 1024;
// Number of keyspaces whose state is remembered; a process uses a few.
constexpr size_t kStatesMax = 4096;
// Number of samples that wait for the next report; further ones are dropped.
constexpr size_t kSamplesMax = 4096;
// Number of leases, Acquires or reservations returned in one call; crumbd accepts more.
constexpr size_t kReturnsPerCall = 1024;

void Add(SessionCounters& to, const SessionCounters& amounts) {
  to.used_tokens += amounts.used_tokens;
  to.prefill_tokens_avoided += amounts.prefill_tokens_avoided;
  to.publish_dropped_pages += amounts.publish_dropped_pages;
  to.deadline_exceeded += amounts.deadline_exceeded;
  to.verify_failures += amounts.verify_failures;
  to.windows_refused += amounts.windows_refused;
  to.scrubbed_pages += amounts.scrubbed_pages;
  const size_t room = kSamplesMax - std::min(kSamplesMax, to.quality.size());
  to.quality.insert(to.quality.end(), amounts.quality.begin(),
                    amounts.quality.begin() + std::min(room, amounts.quality.size()));
}

v1::SessionRequest ToRequest(const SessionCounters& counters) {
  v1::SessionRequest request;
  v1::SessionRequest::Counters& out = *request.mutable_counters();
  out.set_used_tokens(counters.used_tokens);
  out.set_prefill_tokens_avoided(counters.prefill_tokens_avoided);
  out.set_publish_dropped_pages(counters.publish_dropped_pages);
  out.set_deadline_exceeded(counters.deadline_exceeded);
  out.set_verify_failures(counters.verify_failures);
  out.set_windows_refused(counters.windows_refused);
  out.set_scrubbed_pages(counters.scrubbed_pages);
  for (const QualitySample& sample : counters.quality) {
    v1::SessionRequest::QualitySample& added = *request.add_quality();
    added.set_layer(static_cast<uint32_t>(sample.layer));
    added.set_attention_error(sample.attention_error);
    added.set_key_error(sample.key_error);
    added.set_value_error(sample.value_error);
  }
  return request;
}

// Sorts `returns` by connection and calls `call` once per connection. A call that fails is not
// repeated: the connection is lost, and crumbd ends the session.
template <typename Returns, typename Call>
void ByConnection(Returns& returns, const Call& call) {
  std::sort(returns.begin(), returns.end(),
            [](const auto& a, const auto& b) { return a.connection.get() < b.connection.get(); });
  for (size_t begin = 0; begin < returns.size();) {
    size_t end = begin;
    while (end < returns.size() && returns[end].connection == returns[begin].connection) ++end;
    call(*returns[begin].connection, std::span(returns).subspan(begin, end - begin));
    begin = end;
  }
}

// Returns the entries of `returns` to crumbd in calls of at most kReturnsPerCall entries.
template <typename Request, typename Response, typename Connection, typename Return, typename Add>
void CallInPieces(Connection& connection, std::span<Return> returns, const Add& add) {
  while (!returns.empty()) {
    const size_t count = std::min(returns.size(), kReturnsPerCall);
    Request request;
    for (const Return& one : returns.first(count)) add(one, request);
    Response response;
    connection.stub()
        .Call({connection.token(), Clock::Real().Now() + kReturnTimeout}, request, &response)
        .IgnoreError();
    returns = returns.subspan(count);
  }
}

}  // namespace

Reconnector::Reconnector(const ClientOptions& options)
    : options_(options),
      pid_(::getpid()),
      random_(std::random_device{}()),
      backoff_(options.backoff_min) {}

Reconnector::~Reconnector() { Stop(); }

bool Reconnector::InOwnProcess() const { return ::getpid() == pid_; }

void Reconnector::Start() {
  thread_ = Thread("crumb-client", [this] { Run(); });
  MutexLock lock(&mutex_);
  while (!attempted_) changed_.Wait(&mutex_);
}

void Reconnector::Stop() {
  {
    MutexLock lock(&mutex_);
    if (stopping_) return;
    stopping_ = true;
  }
  Wake();
  thread_.Join();
  {
    MutexLock lock(&mutex_);
    stopped_ = true;
  }
  ReturnPending();
}

bool Reconnector::stopping() const {
  MutexLock lock(&mutex_);
  return stopping_;
}

void Reconnector::Wake() {
  std::shared_ptr<SessionStream> stream;
  {
    MutexLock lock(&mutex_);
    stream = stream_;
    changed_.NotifyAll();
  }
  if (stream != nullptr) stream->Wake();
}

std::shared_ptr<Connection> Reconnector::current() const {
  MutexLock lock(&mutex_);
  return current_;
}

std::shared_ptr<Connection> Reconnector::Wait(TimePoint deadline) const {
  MutexLock lock(&mutex_);
  while (current_ == nullptr && !stopping_ && changed_.WaitUntil(&mutex_, deadline)) {
  }
  return current_;
}

void Reconnector::SetCurrent(std::shared_ptr<Connection> connection,
                             std::shared_ptr<SessionStream> stream) {
  MutexLock lock(&mutex_);
  // A restarted crumbd may count generations from a lower number again.
  if (connection != nullptr && connection->epoch() != generations_epoch_) {
    generations_epoch_ = connection->epoch();
    generations_.clear();
  }
  // The caller's reference releases the former connection outside the lock.
  current_ = std::move(connection);
  stream_ = std::move(stream);
  attempted_ = true;
  changed_.NotifyAll();
}

void Reconnector::Run() {
  while (!stopping()) {
    absl::StatusOr<std::shared_ptr<Connection>> opened = Connection::Open(options_);
    if (opened.ok()) {
      const std::shared_ptr<SessionStream> stream =
          (*opened)->stub().OpenSession((*opened)->token());
      LogDebug("connected to crumbd in {}, epoch {}", options_.socket_dir, (*opened)->epoch());
      failure_logged_ = false;
      SetCurrent(*opened, stream);
      NotifyConnected();
      const TimePoint since = Clock::Real().Now();
      Serve(**opened, *stream);
      if (Clock::Real().Now() - since > options_.backoff_max) backoff_ = options_.backoff_min;
    }
    SetCurrent(nullptr, nullptr);
    ReturnPending();
    if (stopping()) return;
    NoteFailure(opened.ok() ? absl::UnavailableError("the session stream ended") : opened.status());
    opened = absl::UnavailableError("");  // releases the connection before the wait
    BackOff();
  }
}

void Reconnector::NoteFailure(const absl::Status& status) {
  if (failure_logged_) return;
  failure_logged_ = true;
  LogWarning("no crumbd in {}, going on without cache: {}", options_.socket_dir, status.ToString());
}

void Reconnector::BackOff() {
  // Half of the wait is random, so that the workers of a host do not reconnect all at once.
  std::uniform_real_distribution<double> jitter(0.5, 1.0);
  const TimePoint until =
      Clock::Real().Now() + std::chrono::duration_cast<Duration>(backoff_ * jitter(random_));
  backoff_ = std::min(2 * backoff_, options_.backoff_max);
  MutexLock lock(&mutex_);
  while (!stopping_ && changed_.WaitUntil(&mutex_, until)) {
  }
}

void Reconnector::Serve(const Connection& connection, SessionStream& stream) {
  counters_due_ = Clock::Real().Now();
  while (!stopping()) {
    ReturnPending();
    SendCounters(stream);
    bool counted;
    {
      MutexLock lock(&mutex_);
      counted = counted_;
    }
    v1::SessionResponse message;
    switch (stream.Wait(counted ? counters_due_ : TimePoint::max(), &message)) {
      case SessionStream::Event::kMessage:
        Handle(connection, message);
        break;
      case SessionStream::Event::kClosed:
        return;
      case SessionStream::Event::kWoken:
      case SessionStream::Event::kTimeout:
        break;
    }
  }
  stream.Flush(Clock::Real().Now() + kFarewellTimeout);
  counters_due_ = TimePoint();
  SendCounters(stream);
  stream.Flush(Clock::Real().Now() + kFarewellTimeout);
}

absl::Status Reconnector::Listen(const PoolName& pool, PoolListener* listener) {
  MutexLock lock(&listening_);
  for (const Listening& there : listeners_) {
    if (there.pool != pool) continue;
    return absl::FailedPreconditionError(
        "this Client takes part in a device pool of slots of " + std::to_string(pool.slot_bytes) +
        " bytes on that device already: open another Client for another DeviceWorker");
  }
  listeners_.push_back({pool, listener});
  return absl::OkStatus();
}

void Reconnector::StopListening(PoolListener* listener) {
  MutexLock lock(&listening_);
  std::erase_if(listeners_, [&](const Listening& one) { return one.listener == listener; });
}

void Reconnector::NotifyConnected() {
  MutexLock lock(&listening_);
  for (const Listening& one : listeners_) one.listener->OnConnected();
}

void Reconnector::NotifyDemotions(const v1::SessionResponse::Demotions& message) {
  const PoolId pool = PoolId::FromBytes(message.pool());
  std::vector<Demotion> demotions;
  for (int i = 0; i < std::min(message.slots_size(), message.headers_size()); ++i) {
    const std::string& bytes = message.headers(i);
    auto header = DecodeFragmentHeader(std::as_bytes(std::span(bytes.data(), bytes.size())));
    if (header.ok()) demotions.push_back({pool, message.slots(i), *std::move(header)});
  }
  MutexLock lock(&listening_);
  for (const Listening& one : listeners_) one.listener->OnDemotions(pool, demotions);
}

void Reconnector::Handle(const Connection& connection, const v1::SessionResponse& message) {
  if (message.event_case() == v1::SessionResponse::kSlabGone) {
    return connection.ForgetSlab(message.slab_gone().slab());
  }
  if (message.has_demotions()) return NotifyDemotions(message.demotions());
  if (message.event_case() != v1::SessionResponse::kKeyspaceState) return;
  const v1::SessionResponse::KeyspaceStateChange& change = message.keyspace_state();
  const absl::StatusOr<KeyspaceId> id = KeyspaceId::FromBytes(change.keyspace());
  if (!id.ok()) return;
  NoteState(*id, static_cast<KeyspaceState>(change.state()));
  NoteGeneration(*id, change.generation());
}

void Reconnector::SendCounters(SessionStream& stream) {
  const TimePoint now = Clock::Real().Now();
  if (now < counters_due_) return;
  SessionCounters counters;
  {
    MutexLock lock(&mutex_);
    if (!std::exchange(counted_, false)) return;
    counters = std::exchange(counters_, {});
  }
  counters_due_ = now + options_.counters_interval;
  if (stream.Send(ToRequest(counters))) return;
  MutexLock lock(&mutex_);
  Add(counters_, counters);
  counted_ = true;
}

void Reconnector::Count(const SessionCounters& amounts) {
  bool first;
  {
    MutexLock lock(&mutex_);
    Add(counters_, amounts);
    first = !std::exchange(counted_, true);
  }
  if (first) Wake();
}

void Reconnector::ReturnPending() {
  Pending pending;
  {
    MutexLock lock(&mutex_);
    pending = std::exchange(pending_, {});
  }
  ByConnection(pending.leases, [](Connection& connection, std::span<Return> returns) {
    CallInPieces<v1::ReleaseRequest, v1::ReleaseResponse>(
        connection, returns,
        [](const Return& lease, auto& request) { request.add_leases(lease.id); });
  });
  ByConnection(pending.requests, [](Connection& connection, std::span<Return> returns) {
    CallInPieces<v1::ReleaseRequest, v1::ReleaseResponse>(
        connection, returns,
        [](const Return& acquire, auto& request) { request.add_requests(acquire.id); });
  });
  for (const SlotReturn& one : pending.slots) {
    v1::ReleaseRequest request;
    request.set_pool(one.pool.ToBytes());
    request.mutable_slots()->Assign(one.slots.begin(), one.slots.end());
    v1::ReleaseResponse response;
    one.connection->stub()
        .Call({one.connection->token(), Clock::Real().Now() + kReturnTimeout}, request, &response)
        .IgnoreError();
  }
  ByConnection(pending.rooms, [](Connection& connection, std::span<Return> returns) {
    CallInPieces<v1::AbortRequest, v1::AbortResponse>(connection, returns,
                                                      [](const Return& room, auto& request) {
                                                        request.add_offsets(room.id);
                                                        request.add_reserves(room.reserve);
                                                      });
  });
  ByConnection(pending.reserves, [](Connection& connection, std::span<Return> returns) {
    CallInPieces<v1::AbortRequest, v1::AbortResponse>(
        connection, returns,
        [](const Return& reserve, auto& request) { request.add_requests(reserve.id); });
  });
}

void Reconnector::Enqueue(std::vector<Return> Pending::*list,
                          std::shared_ptr<Connection> connection, uint64_t id, uint64_t reserve) {
  if (!InOwnProcess()) return;
  bool stopped;
  {
    MutexLock lock(&mutex_);
    (pending_.*list).push_back({std::move(connection), id, reserve});
    stopped = stopped_;
  }
  stopped ? ReturnPending() : Wake();
}

void Reconnector::ReleaseSlotsLater(std::shared_ptr<Connection> connection, const PoolId& pool,
                                    std::span<const uint64_t> slots) {
  if (!InOwnProcess() || slots.empty()) return;
  bool stopped;
  {
    MutexLock lock(&mutex_);
    // Slots of the same pool that are released together are returned in one call.
    SlotReturn* last = pending_.slots.empty() ? nullptr : &pending_.slots.back();
    if (last == nullptr || last->connection != connection || last->pool != pool ||
        last->slots.size() >= kSlotsPerReturn) {
      last = &pending_.slots.emplace_back(SlotReturn{std::move(connection), pool, {}});
    }
    last->slots.insert(last->slots.end(), slots.begin(), slots.end());
    stopped = stopped_;
  }
  stopped ? ReturnPending() : Wake();
}

void Reconnector::ReleaseLater(std::shared_ptr<Connection> connection, uint64_t lease) {
  Enqueue(&Pending::leases, std::move(connection), lease);
}

void Reconnector::AbortLater(std::shared_ptr<Connection> connection, uint64_t offset,
                             uint64_t reserve) {
  Enqueue(&Pending::rooms, std::move(connection), offset, reserve);
}

void Reconnector::GiveUpReserveLater(std::shared_ptr<Connection> connection, uint64_t reserve) {
  Enqueue(&Pending::reserves, std::move(connection), reserve);
}

void Reconnector::ForgetLater(std::shared_ptr<Connection> connection, uint64_t request) {
  Enqueue(&Pending::requests, std::move(connection), request);
}

KeyspaceState Reconnector::StateOf(const KeyspaceId& keyspace) const {
  MutexLock lock(&mutex_);
  const auto found = states_.find(keyspace);
  return found == states_.end() ? KeyspaceState::kUnknown : found->second;
}

void Reconnector::NoteState(const KeyspaceId& keyspace, KeyspaceState state) {
  MutexLock lock(&mutex_);
  if (states_.size() >= kStatesMax && states_.find(keyspace) == states_.end()) return;
  states_[keyspace] = state;
}

uint64_t Reconnector::GenerationOf(const KeyspaceId& keyspace) const {
  MutexLock lock(&mutex_);
  const auto found = generations_.find(keyspace);
  return found == generations_.end() ? 0 : found->second;
}

void Reconnector::NoteGeneration(const KeyspaceId& keyspace, uint64_t generation) {
  MutexLock lock(&mutex_);
  if (generations_.size() >= kStatesMax && generations_.find(keyspace) == generations_.end())
    return;
  uint64_t& noted = generations_[keyspace];
  noted = std::max(noted, generation);
}

}  // namespace crumb::client
