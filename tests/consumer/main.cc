// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// An engine in small: fills a sequence with made-up keys and values, publishes its pages to the
// crumbd whose sockets lie in the folder argv[1], and finds them from a second worker.
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "crumb/client.h"
#include "crumb/sequence.h"
#include "crumb/worker.h"

namespace {

using crumb::client::Client;
using crumb::client::Worker;

constexpr int kTokens = 512;
constexpr int kHeadDim = 64;
constexpr int kCachedTokens = kTokens - 256;  // the recent window is always computed

int Fail(const char* what, const absl::Status& status) {
  std::fprintf(stderr, "%s: %s\n", what, status.ToString().c_str());
  return 1;
}

crumb::client::WorkerOptions Options() {
  crumb::client::WorkerOptions options;
  options.model = "consumer";
  options.weights = "1";
  options.layers = options.kv_heads = options.q_heads = 1;
  options.head_dim = options.group_size = kHeadDim;
  return options;
}

// One forward pass over the whole prompt, of rows between 1 and 2.
absl::Status Compute(crumb::client::Sequence& sequence, std::span<const int32_t> tokens) {
  std::mt19937 random(1);
  std::vector<crumb::kernels::Bf16> rows(tokens.size() * kHeadDim);
  for (auto& row : rows) {
    const auto bits = static_cast<uint16_t>(0x3f80 + random() % 0x80);
    std::memcpy(&row, &bits, sizeof(bits));
  }
  std::vector<float> out(rows.size());
  const int count = static_cast<int>(tokens.size());
  if (auto status = sequence.Append(0, count, rows.data(), rows.data()); !status.ok())
    return status;
  if (auto status = sequence.Attend(0, count, rows.data(), out.data()); !status.ok()) return status;
  if (auto status = sequence.Advance(tokens); !status.ok()) return status;
  for (const float value : out) {  // an average of rows
    if (!(value > 0.5f && value < 2.5f)) return absl::InternalError("attention is off");
  }
  return sequence.Finish();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  crumb::client::ClientOptions options;
  options.socket_dir = argv[1];
  std::vector<int32_t> tokens(kTokens);
  std::iota(tokens.begin(), tokens.end(), 1);
  for (const int expected : {0, kCachedTokens}) {
    auto client = Client::Open(options);
    if (!client.ok()) return Fail("open", client.status());
    if (!(*client)->WaitConnected(std::chrono::seconds(10))) {
      return Fail("connect", absl::UnavailableError(options.socket_dir));
    }
    auto worker = Worker::Open(Options(), client->get());
    if (!worker.ok()) return Fail("worker", worker.status());
    auto sequence = (*worker)->Begin(tokens);
    if (!sequence.ok()) return Fail("begin", sequence.status());
    const int cached = (*sequence)->cached_tokens();
    std::printf("%d of %d tokens were cached\n", cached, kTokens);
    if (cached != expected) return 1;
    if (cached > 0) return 0;
    if (auto status = Compute(**sequence, tokens); !status.ok()) return Fail("compute", status);
    if (auto status = (*worker)->WaitPublished(std::chrono::seconds(10)); !status.ok()) {
      return Fail("publish", status);
    }
  }
  return 1;
}
