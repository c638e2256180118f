// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/cpu/cpu_worker.h"

#include <utility>

#include "client/cpu/cpu_sequence.h"
#include "common/status_macros.h"

namespace crumb::client {

absl::StatusOr<std::unique_ptr<Worker>> Worker::Open(const WorkerOptions& options, Client* client) {
  return CpuWorker::Create(options, client);
}

absl::StatusOr<std::unique_ptr<CpuWorker>> CpuWorker::Create(const WorkerOptions& options,
                                                             Client* client) {
  CRUMB_RETURN_IF_ERROR(options.Validate());
  std::unique_ptr<CpuWorker> worker(new CpuWorker(options));
  CRUMB_ASSIGN_OR_RETURN(
      worker->starter_,
      SequenceStarter::Create(worker->options_, client, worker->reader_, nullptr, nullptr));
  SequenceStarter& starter = *worker->starter_;
  worker->parts_.emplace(CpuSequenceParts{.options = worker->options_,
                                          .rule = starter.rule(),
                                          .backend = worker->backend_,
                                          .pool = starter.pool(),
                                          .table = starter.table(),
                                          .publisher = starter.publisher(),
                                          .watch = starter.watch(),
                                          .tally = starter.tally()});
  return worker;
}

absl::StatusOr<std::unique_ptr<Sequence>> CpuWorker::Begin(std::span<const int32_t> tokens,
                                                           const SequenceOptions& options) {
  CRUMB_ASSIGN_OR_RETURN(SequenceStart start, starter_->Begin(tokens, options));
  return std::make_unique<CpuSequence>(*parts_, options, std::move(start));
}

absl::StatusOr<LedSequence> CpuWorker::Lead(std::span<const int32_t> tokens,
                                            const SequenceOptions& options) {
  CRUMB_ASSIGN_OR_RETURN(LedStart led, starter_->Lead(tokens, options));
  return LedSequence{std::make_unique<CpuSequence>(*parts_, options, std::move(led.start)),
                     std::move(led.token)};
}

absl::StatusOr<std::unique_ptr<Sequence>> CpuWorker::Follow(std::string_view token,
                                                            std::span<const int32_t> tokens,
                                                            const SequenceOptions& options) {
  CRUMB_ASSIGN_OR_RETURN(SequenceStart start, starter_->Follow(token, tokens, options));
  return std::make_unique<CpuSequence>(*parts_, options, std::move(start));
}

}  // namespace crumb::client
