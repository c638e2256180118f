// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Evict, plan and decode as a server uses them: one captured graph, random admission, growth,
// preemption, resumption and end of sequences, pages from a small pool.
#include <algorithm>
#include <cstdio>
#include <map>
#include <optional>
#include <random>
#include <set>

#include "kernels/bf16.h"
#include "kernels/cuda/common/host_oracle.h"
#include "kernels/cuda/decode/decode_attention.h"
#include "kernels/cuda/evict/evict.h"
#include "tests/kernels/cuda/device_buffer.h"

namespace crumb::kernels::cuda {
namespace {

constexpr int kDim = 128;
constexpr int kHeads = 2;
constexpr int kGroup = 2;
constexpr int kSink = 64;
constexpr int kRecentMax = 320;
constexpr int kRing = 328;
constexpr int kPagesMax = 24;  // per sequence
constexpr int kPool = 48;      // page 0 belongs to no sequence
constexpr uint8_t kCanary = 0xcc;

// Returns the row of token `position` of a sequence: `what` 0 is the query, 1 and 2 are K and V.
std::vector<Bf16> Rows(int id, int position, int what, int heads) {
  std::mt19937 random(id * 1000003 + position * 31 + what);
  std::normal_distribution<float> normal;
  std::vector<Bf16> rows(heads * kDim);
  for (Bf16& x : rows) x = Bf16FromFloat(normal(random));
  return rows;
}

// One place of the batch.
struct Place {
  int id = -1;
  int length = 0;  // tokens
  std::vector<int> pages;

  int sink() const { return std::min(length, kSink); }
  int recent() const { return length - sink() - 64 * static_cast<int>(pages.size()); }
  int oldest() const { return kSink + 64 * static_cast<int>(pages.size()); }
};

class Server {
 public:
  Server(int places, int q_tokens) : q_tokens_(q_tokens), places_(places), owner_(kPool, -1) {
    const size_t window_rows = static_cast<size_t>(kHeads) * 2 * kDim;
    sink_host_.assign(places * window_rows * kSink, Bf16{0xffff});
    ring_host_.assign(places * window_rows * kRing, Bf16{0xffff});
    q_host_.assign(static_cast<size_t>(places) * q_tokens * kHeads * kGroup * kDim, Bf16{0xffff});
    arena_.Allocate(kPool * PageBytes());
    arena_.Fill(kCanary);
    out_.Allocate(q_host_.size() * 4);
    plan_.Allocate(DecodePlanBytes(Shape()));
    workspace_.Allocate(DecodeWorkspaceBytes(Shape()));
    workspace_.Fill(0);
    Upload({});
    Capture();
  }
  ~Server() {
    cudaGraphExecDestroy(executable_);
    cudaGraphDestroy(graph_);
    cudaStreamDestroy(stream_);
  }

  std::vector<Place>& places() { return places_; }
  int FreePages() const {
    return static_cast<int>(std::count(owner_.begin() + 1, owner_.end(), -1));
  }

  // Appends a token to a place. If a window of 64 is evicted by that, it is added to `evicted`.
  bool Append(int at, std::vector<std::pair<int, int>>* evicted) {
    Place& place = places_[at];
    if (place.length >= kSink && place.recent() == kRecentMax - 1) {
      const int page = Take(place.id);
      if (page < 0) return false;
      evicted->emplace_back(at, page);
    }
    const int slot = place.length < kSink ? place.length : (place.length - kSink) % kRing;
    for (int what = 0; what < 2; ++what) {
      const std::vector<Bf16> rows = Rows(place.id, place.length, 1 + what, kHeads);
      for (int head = 0; head < kHeads; ++head) {
        const int slots = place.length < kSink ? kSink : kRing;
        std::vector<Bf16>& window = place.length < kSink ? sink_host_ : ring_host_;
        std::copy_n(
            rows.begin() + head * kDim, kDim,
            window.begin() +
                (((static_cast<size_t>(at) * kHeads + head) * 2 + what) * slots + slot) * kDim);
      }
    }
    ++place.length;
    // The newest tokens are the queries. If a sequence is shorter, its first query rows are zeros.
    constexpr size_t kQuery = static_cast<size_t>(kHeads) * kGroup * kDim;
    for (int t = 0; t < q_tokens_; ++t) {
      const int position = place.length - q_tokens_ + t;
      const std::vector<Bf16> q =
          position < 0 ? std::vector<Bf16>(kQuery) : Rows(place.id, position, 0, kHeads * kGroup);
      std::copy(q.begin(), q.end(), q_host_.begin() + (at * q_tokens_ + t) * kQuery);
    }
    return true;
  }

  // Runs the graph, in which windows are evicted and then every place attends, and then the same
  // calls without the graph. The bits must be equal.
  void Step(const std::vector<std::pair<int, int>>& evicted) {
    Upload(evicted);
    for (const auto& [at, page] : evicted) places_[at].pages.push_back(page);
    UploadLengths();
    out_.Fill(0xff);
    ASSERT_CUDA(cudaGraphLaunch(executable_, stream_));
    ASSERT_CUDA(cudaStreamSynchronize(stream_));
    const std::vector<uint8_t> replayed = out_.Download<uint8_t>();
    out_.Fill(0xff);
    ASSERT_CUDA(PlanDecode(Shape(), Lengths(), 0, plan_.as<void>(), stream_));
    ASSERT_CUDA(DecodeAttention(Params(), stream_));
    ASSERT_CUDA(cudaStreamSynchronize(stream_));
    ASSERT_EQ(out_.Download<uint8_t>(), replayed) << "a fresh launch gave other bits";
  }

  std::vector<float> Out(int at) const {
    const std::vector<float> all = out_.Download<float>();
    const size_t size = all.size() / places_.size();
    return {all.begin() + at * size, all.begin() + (at + 1) * size};
  }

  // Frees a place. Its pages become canaries again.
  void Leave(int at) {
    for (const int page : places_[at].pages) {
      owner_[page] = -1;
      EXPECT_EQ(cudaMemset(arena_.as<uint8_t>() + page * PageBytes(), kCanary, PageBytes()),
                cudaSuccess);
    }
    places_[at] = Place{};
    for (std::vector<Bf16>* window : {&sink_host_, &ring_host_}) {
      const size_t size = window->size() / places_.size();
      std::fill_n(window->begin() + at * size, size, Bf16{0xffff});
    }
  }

  // Every page is free, and then unchanged, or belongs to one place; no other place's rows are
  // written.
  void Check() const {
    std::set<int> used;
    for (const Place& place : places_) {
      for (const int page : place.pages) {
        EXPECT_TRUE(used.insert(page).second) << "page " << page << " is in two places";
        EXPECT_EQ(owner_[page], place.id);
      }
    }
    EXPECT_EQ(used.size() + FreePages(), kPool - 1u);
    const std::vector<uint8_t> arena = arena_.Download<uint8_t>();
    for (int page = 0; page < kPool; ++page) {
      if (used.count(page) != 0) continue;
      const auto begin = arena.begin() + page * PageBytes();
      ASSERT_TRUE(std::all_of(begin, begin + PageBytes(), [](uint8_t x) { return x == kCanary; }))
          << "page " << page << " belongs to no sequence and was written";
    }
    ASSERT_EQ(std::memcmp(sink_.Download<Bf16>().data(), sink_host_.data(), 2 * sink_host_.size()),
              0);
    ASSERT_EQ(std::memcmp(ring_.Download<Bf16>().data(), ring_host_.data(), 2 * ring_host_.size()),
              0);
    for (size_t at = 0; at < places_.size(); ++at) {
      if (places_[at].id >= 0) continue;
      const std::vector<uint8_t> out = out_.Download<uint8_t>();
      const size_t size = out.size() / places_.size();
      ASSERT_TRUE(std::all_of(out.begin() + at * size, out.begin() + (at + 1) * size,
                              [](uint8_t x) { return x == 0xff; }))
          << "padding " << at << " was written";
    }
  }

  double Error(int at, int q_token, int q_head) const {
    const Place& place = places_[at];
    const std::vector<uint8_t> arena = arena_.Download<uint8_t>();
    std::vector<uint64_t> address;
    for (const int page : place.pages) {
      address.push_back(reinterpret_cast<uint64_t>(arena.data() + page * PageBytes()));
    }
    AttentionParams p;
    p.kv_heads = kHeads;
    p.q_heads = kHeads * kGroup;
    p.q_tokens = q_tokens_;
    p.q = q_host_.data() + static_cast<size_t>(at) * q_tokens_ * p.q_heads * kDim;
    p.sink_tokens = place.sink();
    p.sink_k = sink_host_.data() + static_cast<size_t>(at) * kHeads * 2 * kSink * kDim;
    p.sink_v = p.sink_k + kSink * kDim;
    p.sink_head_stride = 2 * kSink * kDim;
    p.sink_token_stride = kDim;
    p.pages = static_cast<int>(place.pages.size());
    p.page_address = address.data();
    p.page_head_stride = static_cast<int64_t>(TileShape{}.int2_bytes());
    p.recent_tokens = place.recent();
    p.recent_begin = (place.oldest() - kSink) % kRing;
    p.recent_capacity = kRing;
    p.recent_k = ring_host_.data() + static_cast<size_t>(at) * kHeads * 2 * kRing * kDim;
    p.recent_v = p.recent_k + kRing * kDim;
    p.recent_head_stride = 2 * kRing * kDim;
    p.recent_token_stride = kDim;
    const OracleRow expected = OracleAttend(p, q_token, q_head);
    const std::vector<float> out = Out(at);
    double error = 0.0, norm = 0.0;
    for (int i = 0; i < kDim; ++i) {
      const double difference = out[(q_token * p.q_heads + q_head) * kDim + i] - expected.out[i];
      error += difference * difference;
      norm += expected.out[i] * expected.out[i];
    }
    return std::sqrt(error / norm);
  }

 private:
  static size_t PageBytes() { return TileShape{}.int2_bytes() * kHeads; }

  int Take(int id) {
    for (int page = 1; page < kPool; ++page) {
      if (owner_[page] >= 0) continue;
      owner_[page] = id;
      return page;
    }
    return -1;
  }

  DecodeShape Shape() const {
    DecodeShape shape;
    shape.batch = static_cast<int>(places_.size());
    shape.max_pages = kPagesMax;
    shape.q_tokens = q_tokens_;
    shape.kv_heads = kHeads;
    shape.q_heads = kHeads * kGroup;
    shape.batch_invariant = true;  // a sequence's bits do not depend on the others in the batch
    return shape;
  }
  DecodeLengths Lengths() const {
    return {sink_tokens_.as<int32_t>(), pages_.as<int32_t>(), recent_tokens_.as<int32_t>(),
            begin_.as<int32_t>()};
  }
  DecodeAttentionParams Params() const {
    DecodeAttentionParams p;
    p.shape = Shape();
    p.lengths = Lengths();
    p.q = q_.as<void>();
    p.out = out_.as<void>();
    p.out_type = OutType::kF32;
    p.page_address = table_.as<uint64_t>();
    p.page_head_stride = static_cast<int64_t>(TileShape{}.int2_bytes());
    p.sink = {sink_address_.as<uint64_t>(), 0, 4 * kSink * kDim, 2 * kDim, 2 * kSink * kDim};
    p.recent = {ring_address_.as<uint64_t>(), 0, 4 * kRing * kDim, 2 * kDim, 2 * kRing * kDim};
    p.recent_capacity = kRing;
    p.plan = plan_.as<void>();
    p.workspace = workspace_.as<void>();
    return p;
  }

  void UploadLengths() {
    std::vector<int32_t> sink, pages, recent, begin;
    std::vector<uint64_t> table;
    for (const Place& place : places_) {
      sink.push_back(place.sink());
      pages.push_back(static_cast<int32_t>(place.pages.size()));
      recent.push_back(place.id < 0 ? 0 : place.recent());
      begin.push_back(place.id < 0 ? 0 : (place.oldest() - kSink) % kRing);
      for (size_t i = 0; i < kPagesMax; ++i) {
        const int page = i < place.pages.size() ? place.pages[i] : 0;
        table.push_back(arena_.address() + page * PageBytes());
      }
    }
    sink_tokens_.Upload(sink);
    pages_.Upload(pages);
    recent_tokens_.Upload(recent);
    begin_.Upload(begin);
    table_.Upload(table);
  }

  // Uploads everything that the graph reads. `evicted` holds place and page of each window.
  void Upload(const std::vector<std::pair<int, int>>& evicted) {
    sink_.Upload(sink_host_);
    ring_.Upload(ring_host_);
    q_.Upload(q_host_);
    std::vector<uint64_t> sink_address, ring_address;
    for (size_t at = 0; at < places_.size(); ++at) {
      sink_address.push_back(sink_.address() + at * kHeads * 4 * kSink * kDim);
      ring_address.push_back(ring_.address() + at * kHeads * 4 * kRing * kDim);
    }
    // Entries beyond the number of windows point at page 0 and the first ring.
    std::vector<uint64_t> from(places_.size(), ring_address[0]),
        to(places_.size(), arena_.address());
    std::vector<int32_t> begin(places_.size(), 0);
    for (size_t i = 0; i < evicted.size(); ++i) {
      const auto& [at, page] = evicted[i];
      from[i] = ring_address[at];
      to[i] = arena_.address() + page * PageBytes();
      begin[i] = (places_[at].oldest() - kSink) % kRing;
    }
    windows_.Upload(std::vector<int32_t>{static_cast<int32_t>(evicted.size())});
    evict_from_.Upload(from);
    evict_to_.Upload(to);
    evict_begin_.Upload(begin);
    sink_address_.Upload(sink_address);
    ring_address_.Upload(ring_address);
    UploadLengths();
  }

  void Capture() {
    EvictParams e;
    e.kv_heads = kHeads;
    e.windows_max = static_cast<int>(places_.size());
    e.windows = windows_.as<int32_t>();
    e.ring_address = evict_from_.as<uint64_t>();
    e.ring_begin = evict_begin_.as<int32_t>();
    e.ring_capacity = kRing;
    e.ring_head_stride = 4 * kRing * kDim;
    e.ring_token_stride = 2 * kDim;
    e.ring_v_offset = 2 * kRing * kDim;
    e.tile_address = evict_to_.as<uint64_t>();
    e.tile_head_stride = static_cast<int64_t>(TileShape{}.int2_bytes());
    ASSERT_CUDA(cudaStreamCreate(&stream_));
    ASSERT_CUDA(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal));
    ASSERT_CUDA(EvictWindows(e, stream_));
    ASSERT_CUDA(PlanDecode(Shape(), Lengths(), 0, plan_.as<void>(), stream_));
    ASSERT_CUDA(DecodeAttention(Params(), stream_));
    ASSERT_CUDA(cudaStreamEndCapture(stream_, &graph_));
    ASSERT_CUDA(cudaGraphInstantiate(&executable_, graph_, 0));
  }

  const int q_tokens_;
  std::vector<Place> places_;
  std::vector<int> owner_;  // place that owns each page, -1: free
  std::vector<Bf16> sink_host_, ring_host_, q_host_;
  DeviceBuffer arena_, sink_, ring_, q_, out_, plan_, workspace_, table_;
  DeviceBuffer sink_address_, ring_address_, sink_tokens_, pages_, recent_tokens_, begin_;
  DeviceBuffer windows_, evict_from_, evict_to_, evict_begin_;
  cudaStream_t stream_ = nullptr;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

// Appends tokens up to `length`, as prefill or a resumption does; windows are evicted on the way.
bool Grow(Server& server, int at, int length) {
  while (server.places()[at].length < length) {
    std::vector<std::pair<int, int>> evicted;
    if (!server.Append(at, &evicted)) return false;
    if (!evicted.empty() || server.places()[at].length == length) server.Step(evicted);
  }
  return true;
}

class Storm {
 public:
  Storm(uint32_t seed, int q_tokens)
      : q_tokens_(q_tokens), random_(seed), server_(5, q_tokens), calm_(1, q_tokens) {}

  void Run(int steps) {
    for (int step = 0; step < steps && !testing::Test::HasFatalFailure(); ++step) {
      Happen();
      std::vector<std::pair<int, int>> evicted;
      for (int at = 0; at < 5; ++at) {
        Place& place = server_.places()[at];
        if (place.id < 0) continue;
        if (place.length >= kLengthMax || !server_.Append(at, &evicted)) Preempt(at);
      }
      server_.Step(evicted);
      server_.Check();
      for (int at = 0; at < 5; ++at) {
        const Place& place = server_.places()[at];
        if (place.id >= 0) outputs_[{place.id, place.length}] = server_.Out(at);
      }
      const int at = static_cast<int>(random_() % 5);
      if (server_.places()[at].length >= q_tokens_) {
        EXPECT_LE(server_.Error(at, step % q_tokens_, step % (kHeads * kGroup)), 5e-4)
            << "step " << step;
      }
    }
    std::printf("%d admitted, %d preempted, %d resumed, %d finished, %zu outputs\n", admitted_,
                preempted_, resumed_, finished_, outputs_.size());
    EXPECT_GT(preempted_, 2);
    EXPECT_GT(resumed_, 2);
    EXPECT_GT(finished_, 2);
  }

  // Compares with each sequence alone: the same bits at every length that was seen.
  void CompareWithCalm() {
    std::map<int, std::set<int>> lengths;
    for (const auto& [key, out] : outputs_) lengths[key.first].insert(key.second);
    for (const auto& [id, seen] : lengths) {
      calm_.places()[0].id = id;
      for (const int length : seen) {
        ASSERT_TRUE(Grow(calm_, 0, length));
        const std::vector<float> alone = calm_.Out(0), out = outputs_[{id, length}];
        ASSERT_EQ(std::memcmp(alone.data(), out.data(), alone.size() * sizeof(float)), 0)
            << "sequence " << id << ", " << length << " tokens";
      }
      calm_.Leave(0);
    }
  }

 private:
  static constexpr int kLengthMax = 1200;

  void Happen() {
    const int at = static_cast<int>(random_() % 5);
    Place& place = server_.places()[at];
    const int dice = static_cast<int>(random_() % 8);
    if (place.id < 0) {
      if (!waiting_.empty() && dice < 4) {
        const auto [id, length] = waiting_.back();
        waiting_.pop_back();
        Enter(at, id, length);
        ++resumed_;
      } else if (dice < 6) {
        Enter(at, admitted_++, 1 + static_cast<int>(random_() % 900));
      }
    } else if (dice == 0) {
      server_.Leave(at);
      ++finished_;
    } else if (dice == 1) {
      Preempt(at);
    }
  }

  void Enter(int at, int id, int length) {
    server_.places()[at].id = id;
    // no pages are left: the sequence is rejected
    if (!Grow(server_, at, length)) server_.Leave(at);
  }

  void Preempt(int at) {
    const Place& place = server_.places()[at];
    if (place.length < kLengthMax) waiting_.emplace_back(place.id, place.length);
    server_.Leave(at);
    ++preempted_;
  }

  const int q_tokens_;
  std::mt19937 random_;
  Server server_, calm_;
  std::vector<std::pair<int, int>> waiting_;  // id and length of preempted sequences
  std::map<std::pair<int, int>, std::vector<float>> outputs_;
  int admitted_ = 0, preempted_ = 0, resumed_ = 0, finished_ = 0;
};

// One query token, and several as in speculative decoding: 2, 6 and 10 query rows.
class ServingStorm : public testing::TestWithParam<int> {};

TEST_P(ServingStorm, EveryPageIsAccountedForAndEveryOutputIsTheUndisturbedOne) {
  CRUMB_NEEDS_DEVICE();
  Storm storm(20250117, GetParam());
  storm.Run(160);
  storm.CompareWithCalm();
}

INSTANTIATE_TEST_SUITE_P(QueryTokens, ServingStorm, testing::Values(1, 3, 5));

// One graph runs while a sequence grows over window, page and split boundaries, with two others
// beside it.
TEST(ServingGraph, OneGraphWhileLengthsGrowOverEveryBoundary) {
  CRUMB_NEEDS_DEVICE();
  Server server(3, 1);
  server.places()[0].id = 1;
  server.places()[2].id = 2;
  for (const int length : {1, 63, 64, 65, 319, 320, 321, 383, 384, 385, 447, 448, 449, 767, 769}) {
    ASSERT_TRUE(Grow(server, 0, length));
    ASSERT_TRUE(Grow(server, 2, std::max(1, length / 2)));
    server.Check();
    EXPECT_LE(server.Error(0, 0, 3), 5e-4) << length;
  }
}

}  // namespace
}  // namespace crumb::kernels::cuda
