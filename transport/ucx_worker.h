// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ucp/api/ucp.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/clock.h"
#include "transport/link.h"
#include "transport/ucx_context.h"

namespace crumb::transport {

// A UCX worker with its listener and endpoints. Belongs to one progress thread, which makes all
// calls and receives all callbacks. REQUIRES: no thread drives it during construction and
// destruction. UcxTransport's thread drives it:
//
//   Progress until it returns false --> Arm --> sleep on event_fd --> Progress ...
class UcxWorker final : public LinkMaker {
 public:
  // `events` must outlive the worker and is not called before the first Progress. kUnavailable:
  // options.listen is in use.
  static absl::StatusOr<std::unique_ptr<UcxWorker>> Create(std::shared_ptr<UcxContext> context,
                                                           const TransportOptions& options,
                                                           LinkEvents& events);
  ~UcxWorker() override;

  // The address at which it listens. Empty if it does not.
  const std::string& address() const { return address_; }

  // Makes progress and reports to `events`. Returns false if there was nothing to do.
  bool Progress();
  // A descriptor that becomes readable when there is work, once Arm has returned true.
  int event_fd() const { return event_fd_; }
  // Returns false if there is work now.
  bool Arm();
  // Returns whether endpoints are being closed. UCX does this in Progress and signals no event.
  bool settling() const;

  absl::StatusOr<std::unique_ptr<Link>> MakeLink(const std::string& address) override;

 private:
  class UcxLink;
  class UcxArrival;
  struct Endpoint;
  struct SendRecord;
  struct PullRecord;

  explicit UcxWorker(LinkEvents& events) : events_(events) {}
  // Makes the worker and, with Listen, its listener.
  absl::Status Open(const TransportOptions& options);
  absl::Status Listen(const std::string& listen);
  // Makes an endpoint and its link.
  absl::StatusOr<std::unique_ptr<Link>> Adopt(ucp_ep_params_t params, const std::string& what);
  // Reports connections and failures that UCX's callbacks noted, outside of these callbacks, where
  // links may be destroyed. Returns false if there were none.
  bool DeliverEvents();
  // Accepts a connection and reports it.
  void Accept(ucp_conn_request_h request);
  // Closes an endpoint by force; UCX completes that in later calls of Progress.
  void Close(ucp_ep_h endpoint);
  // End a send or a pull: drop its references and call back.
  void FinishSend(SendRecord* record, ucs_status_t status);
  void FinishPull(PullRecord* record, ucs_status_t status);
  // Notes the failure of an endpoint, once.
  void ReportDown(const std::shared_ptr<Endpoint>& endpoint, ucs_status_t status);
  // Waits up to kDrainMax for sends and pulls; UCX ends those that are left with the worker.
  void Drain();

  // UCX's callbacks, which run inside ucp_worker_progress.
  static void OnRequest(ucp_conn_request_h request, void* arg);
  static void OnEndpointError(void* arg, ucp_ep_h endpoint, ucs_status_t status);
  static void OnSent(void* request, ucs_status_t status, void* arg);
  static void OnPulled(void* request, ucs_status_t status, size_t length, void* arg);
  static void OnClosed(void* request, ucs_status_t status, void* arg);
  static ucs_status_t OnMessage(void* arg, const void* header, size_t header_size, void* data,
                                size_t size, const ucp_am_recv_param_t* param);

  LinkEvents& events_;
  std::shared_ptr<UcxContext> context_;
  ucp_worker_h worker_ = nullptr;
  ucp_listener_h listener_ = nullptr;
  int event_fd_ = -1;
  std::string address_;
  size_t eager_bytes_max_ = 0;
  std::unordered_map<ucp_ep_h, std::shared_ptr<Endpoint>> endpoints_;
  std::vector<ucp_conn_request_h> requests_;
  std::vector<std::pair<std::shared_ptr<Endpoint>, absl::Status>> downs_;
  std::unordered_set<SendRecord*> sends_;
  std::unordered_set<PullRecord*> pulls_;
  size_t closing_ = 0;
  TimePoint settle_until_{};
};

}  // namespace crumb::transport
