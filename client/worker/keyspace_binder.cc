// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/worker/keyspace_binder.h"

#include <utility>

#include "client/worker/keyspace_binding.h"
#include "common/logging.h"
#include "common/status_macros.h"

namespace crumb::client {
namespace {

using kernels::PageFormat;

// Timeout for crumbd to open a keyspace; it writes a record of a new one.
constexpr Duration kOpenTimeout = std::chrono::seconds(2);

}  // namespace

absl::StatusOr<std::unique_ptr<KeyspaceBinder>> KeyspaceBinder::Create(
    const WorkerOptions& options, Client* client,
    std::function<void(std::function<void()>)> run_soon) {
  CRUMB_RETURN_IF_ERROR(options.Validate());
  CRUMB_ASSIGN_OR_RETURN(const KeyspaceId keyspace,
                         PrivateKeyspace(options, options.history_format));
  CRUMB_ASSIGN_OR_RETURN(const KeyspaceId bf16, PrivateKeyspace(options, PageFormat::kBf16));
  std::unique_ptr<KeyspaceBinder> binder(
      new KeyspaceBinder(options, client, keyspace, bf16, std::move(run_soon)));
  if (client != nullptr) binder->Current(kOpenTimeout);
  return binder;
}

KeyspaceBinder::KeyspaceBinder(const WorkerOptions& options, Client* client,
                               const KeyspaceId& keyspace, const KeyspaceId& bf16_keyspace,
                               std::function<void(std::function<void()>)> run_soon)
    : options_(options),
      client_(client),
      private_binding_(std::make_shared<KeyspaceBinding>(KeyspaceBinding{
          .id = keyspace, .watched = keyspace, .history_format = options.history_format})),
      private_bf16_binding_(std::make_shared<KeyspaceBinding>(KeyspaceBinding{
          .id = bf16_keyspace, .watched = keyspace, .history_format = PageFormat::kBf16})),
      run_soon_(std::move(run_soon)),
      binding_(private_binding_) {}

const KeyspaceId& KeyspaceBinder::PrivateId(PageFormat format) const {
  return format == PageFormat::kBf16 ? private_bf16_binding_->id : private_binding_->id;
}

bool KeyspaceBinder::Stale(const KeyspaceBinding& binding) const {
  if (!binding.known_to_crumbd || binding.epoch != client_->epoch() || stale_.load()) return true;
  if (client_->GenerationOf(binding.id) > binding.generation) return true;
  if (options_.history_format != PageFormat::kInt2) return false;
  const bool int2_off = client_->StateOf(binding.watched) == KeyspaceState::kBf16;
  return int2_off != (binding.history_format == PageFormat::kBf16);
}

KeyspaceBinder::Binding KeyspaceBinder::Current(Duration timeout) {
  Binding binding;
  bool bad_quality;
  {
    MutexLock lock(&mutex_);
    binding = binding_;
    bad_quality = !bad_quality_.empty();
  }
  if (bad_quality) {
    run_soon_([this] { ReportBadQuality(); });
    return private_bf16_binding_;
  }
  if (client_ == nullptr) return private_binding_;
  if (!client_->connected() || !Stale(*binding) || binding_now_.exchange(true)) return binding;
  stale_.store(false);
  absl::StatusOr<Binding> bound = Bind(timeout);
  if (bound.ok()) {
    binding = *std::move(bound);
    MutexLock lock(&mutex_);
    binding_ = binding;
  } else {
    LogWarning("keyspace of {} could not be opened: {}", options_.model, bound.status().ToString());
  }
  binding_now_.store(false);
  return binding;
}

absl::StatusOr<KeyspaceInfo> KeyspaceBinder::Open(PageFormat format, Duration timeout) {
  KeyspaceSpec spec;
  CRUMB_ASSIGN_OR_RETURN(spec.fields, KeyspaceFields(options_, format));
  spec.layers = options_.layers;
  spec.kv_heads = options_.kv_heads;
  spec.head_dim = options_.head_dim;
  spec.group_size = options_.group_size;
  spec.tenant = options_.tenant;
  CRUMB_ASSIGN_OR_RETURN(const KeyspaceInfo info, client_->OpenKeyspace(spec, timeout));
  const kernels::TileShape shape = options_.tile_shape();
  if (info.bf16_tile_bytes != shape.bf16_bytes() || info.int2_tile_bytes != shape.int2_bytes()) {
    return absl::FailedPreconditionError(
        "crumbd computes other tile sizes for this geometry: client and crumbd differ in version");
  }
  return info;
}

absl::StatusOr<KeyspaceBinder::Binding> KeyspaceBinder::Bind(Duration timeout) {
  PageFormat format = options_.history_format;
  CRUMB_ASSIGN_OR_RETURN(KeyspaceInfo info, Open(format, timeout));
  const KeyspaceId watched = info.id;
  if (format == PageFormat::kInt2 && info.state == KeyspaceState::kBf16) {
    LogWarning("INT2 pages of {} are switched off: new sequences use BF16", options_.model);
    format = PageFormat::kBf16;
    CRUMB_ASSIGN_OR_RETURN(info, Open(format, timeout));
  }
  return std::make_shared<const KeyspaceBinding>(KeyspaceBinding{.id = info.id,
                                                                 .watched = watched,
                                                                 .history_format = format,
                                                                 .known_to_crumbd = true,
                                                                 .generation = info.generation,
                                                                 .epoch = info.epoch});
}

void KeyspaceBinder::GiveUpInt2(std::string reason) {
  LogWarning("INT2 pages of {} are given up: {}", options_.model, reason);
  {
    MutexLock lock(&mutex_);
    bad_quality_ = std::move(reason);
  }
  run_soon_([this] { ReportBadQuality(); });
}

void KeyspaceBinder::ReportBadQuality() {
  std::string reason;
  {
    MutexLock lock(&mutex_);
    reason = bad_quality_;
  }
  if (reason.empty() || client_ == nullptr || !client_->connected()) return;
  const absl::StatusOr<KeyspaceInfo> keyspace = Open(PageFormat::kInt2, kOpenTimeout);
  absl::Status reported = keyspace.status();
  if (reported.ok()) {
    reported =
        client_->SetKeyspaceState(keyspace->id, KeyspaceState::kBf16, "quality watch", reason);
  }
  if (!reported.ok()) {
    LogWarning("crumbd has not recorded that INT2 pages of {} are given up: {}", options_.model,
               reported.ToString());
    return;
  }
  Invalidate();
  MutexLock lock(&mutex_);
  bad_quality_.clear();
}

}  // namespace crumb::client
