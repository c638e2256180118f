// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "crumb/worker_options.h"

#include <cmath>
#include <functional>

#include "client/worker/keyspace_binding.h"
#include "gtest/gtest.h"
#include "tests/client/sequence_model.h"

namespace crumb::client {
namespace {

using kernels::PageFormat;

struct Change {
  const char* field;
  std::function<void(WorkerOptions&)> apply;
};

TEST(WorkerOptionsTest, NamesTheFieldThatIsWrong) {
  ASSERT_TRUE(SmallWorkerOptions().Validate().ok());
  const Change changes[] = {
      {"model", [](WorkerOptions& o) { o.model.clear(); }},
      {"weights", [](WorkerOptions& o) { o.weights.clear(); }},
      {"layers", [](WorkerOptions& o) { o.layers = 0; }},
      {"kv_heads", [](WorkerOptions& o) { o.kv_heads = 0; }},
      {"q_heads", [](WorkerOptions& o) { o.q_heads = 3; }},
      {"head_dim", [](WorkerOptions& o) { o.head_dim = 96; }},
      {"head_dim", [](WorkerOptions& o) { o.group_size = 128; }},
      {"history_format", [](WorkerOptions& o) { o.history_format = PageFormat{9}; }},
      {"clip_k", [](WorkerOptions& o) { o.clip_v = 1.5f; }},
      {"v_basis", [](WorkerOptions& o) { o.v_basis = "sideways"; }},
      {"recent_tokens", [](WorkerOptions& o) { o.recent_tokens = 100; }},
      {"prefill_block", [](WorkerOptions& o) { o.prefill_block = 256; }},
      {"windows", [](WorkerOptions& o) { o.windows = {128}; }},
      {"windows",
       [](WorkerOptions& o) {
         o.windows = {128, -1};
       }},
      {"sink_logits",
       [](WorkerOptions& o) {
         o.sink_logits = {1.0f, 2.0f};
       }},
      {"sink_logits", [](WorkerOptions& o) { o.sink_logits.assign(8, std::nanf("")); }},
      {"draft_slots", [](WorkerOptions& o) { o.draft_slots = 64; }},
      {"publish_queue_max", [](WorkerOptions& o) { o.publish_queue_max = 0; }},
      {"publish_batch", [](WorkerOptions& o) { o.publish_batch = 0; }},
      {"rotations", [](WorkerOptions& o) { o.rotations = RotationSet::Hadamard(128).value(); }},
  };
  for (const Change& change : changes) {
    WorkerOptions options = SmallWorkerOptions();
    change.apply(options);
    const absl::Status status = options.Validate();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << change.field;
    EXPECT_NE(std::string(status.message()).find(change.field), std::string::npos) << status;
  }
}

TEST(WorkerKeyspaceTest, DependsOnWhatPagesDependOn) {
  const KeyspaceId id = PrivateKeyspace(SmallWorkerOptions(), PageFormat::kInt2).value();
  const Change matter[] = {
      {"model", [](WorkerOptions& o) { o.model = "other"; }},
      {"weights", [](WorkerOptions& o) { o.weights = "other"; }},
      {"rope", [](WorkerOptions& o) { o.rope = "theta=5"; }},
      {"v_basis", [](WorkerOptions& o) { o.v_basis = "rotated"; }},
      {"layers", [](WorkerOptions& o) { o.layers = 3; }},
      {"group", [](WorkerOptions& o) { o.group_size = 32; }},
      {"clip", [](WorkerOptions& o) { o.clip_k = 0.9f; }},
      {"rotation", [](WorkerOptions& o) { o.rotations = RotationSet::Identity(); }},
      {"block", [](WorkerOptions& o) { o.prefill_block = 1024; }},
      {"lora", [](WorkerOptions& o) { o.fields["lora"] = "7"; }},
  };
  for (const Change& change : matter) {
    WorkerOptions options = SmallWorkerOptions();
    change.apply(options);
    EXPECT_NE(PrivateKeyspace(options, PageFormat::kInt2).value(), id) << change.field;
  }
  WorkerOptions same = SmallWorkerOptions();
  same.publish_batch = 1;
  same.page_bytes_max = 5;
  EXPECT_EQ(PrivateKeyspace(same, PageFormat::kInt2).value(), id);
}

TEST(WorkerKeyspaceTest, Bf16PagesDoNotDependOnTheQuantizer) {
  WorkerOptions options = SmallWorkerOptions();
  const KeyspaceId id = PrivateKeyspace(options, PageFormat::kBf16).value();
  options.clip_k = 0.5f;
  options.rotations = RotationSet::Identity();
  EXPECT_EQ(PrivateKeyspace(options, PageFormat::kBf16).value(), id);
}

TEST(WorkerKeyspaceTest, RefusesFieldsItSetsItself) {
  WorkerOptions options = SmallWorkerOptions();
  options.fields["model"] = "twice";
  EXPECT_EQ(KeyspaceFields(options, PageFormat::kInt2).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace crumb::client
