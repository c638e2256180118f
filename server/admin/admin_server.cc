// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/admin/admin_server.h"

#include <utility>

#include "common/status_macros.h"
#include "httplib.h"
#include "server/admin/http_listener.h"
#include "server/base/listen_check.h"
#include "server/base/tcp_listener.h"

namespace crumb::server {
namespace {

constexpr char kText[] = "text/plain; charset=utf-8";
constexpr char kPrometheusText[] = "text/plain; version=0.0.4; charset=utf-8";
constexpr char kJson[] = "application/json";
constexpr char kHtml[] = "text/html; charset=utf-8";
// No script runs on the status page, whatever it shows, and nothing is loaded.
constexpr char kContentPolicy[] =
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'";
constexpr size_t kBodyBytesMax = 4096;  // no page needs one

// One request and its response as the HTTP library sees a connection.
class RequestStream : public httplib::Stream {
 public:
  explicit RequestStream(const std::string& head) : head_(head) {}
  std::string TakeResponse() { return std::move(response_); }

  bool is_readable() const override { return true; }
  bool is_writable() const override { return true; }
  ssize_t read(char* to, size_t size) override {
    const size_t count = head_.copy(to, size, read_);
    read_ += count;
    return static_cast<ssize_t>(count);
  }
  ssize_t write(const char* from, size_t size) override {
    response_.append(from, size);
    return static_cast<ssize_t>(size);
  }
  void get_remote_ip_and_port(std::string&, int&) const override {}
  void get_local_ip_and_port(std::string&, int&) const override {}
  socket_t socket() const override { return INVALID_SOCKET; }

 private:
  const std::string& head_;
  size_t read_ = 0;
  std::string response_;
};

// Parses requests, finds their pages and makes responses; it has no connections.
class PageServer : public httplib::Server {
 public:
  std::string Respond(const std::string& head) {
    RequestStream stream(head);
    bool closed = false;
    process_request(stream, /*close_connection=*/true, closed, nullptr);
    return stream.TakeResponse();
  }
};

class HttpAdminServer : public AdminServer {
 public:
  HttpAdminServer(const AdminOptions& options, Pages pages)
      : options_(options), pages_(std::move(pages)) {}

  absl::Status Open(Counter& closed) {
    CRUMB_ASSIGN_OR_RETURN(HostPort place, ParseHostPort("admin.listen", options_.listen));
    CRUMB_RETURN_IF_ERROR(CheckTcpFree("admin.listen", place));
    server_.set_payload_max_length(kBodyBytesMax);
    Route();
    CRUMB_ASSIGN_OR_RETURN(auto sockets,
                           ListenTcp("admin.listen", place, WildcardListens::kItsFamily));
    const bool v6 = place.host.find(':') != std::string::npos;
    address_ = (v6 ? "[" + place.host + "]" : place.host) + ":" + std::to_string(place.port);
    CRUMB_ASSIGN_OR_RETURN(
        listener_, HttpListener::Start(
                       {static_cast<int>(options_.threads),
                        static_cast<size_t>(options_.connections_max), options_.read_timeout},
                       std::move(sockets),
                       [this](const std::string& head) { return server_.Respond(head); }, closed));
    return absl::OkStatus();
  }

  std::string address() const override { return address_; }

 private:
  void Route() {
    using httplib::Request;
    using httplib::Response;
    server_.Get("/", [this](const Request&, Response& out) {
      out.set_header("Content-Security-Policy", kContentPolicy);
      out.set_header("Cache-Control", "no-store");
      SetContent(pages_.page(), kHtml, out);
    });
    server_.Get("/healthz", [](const Request&, Response& out) { out.set_content("ok\n", kText); });
    server_.Get("/readyz", [this](const Request&, Response& out) {
      const bool ready = pages_.ready();
      out.status = ready ? 200 : 503;
      out.set_content(ready ? "ready\n" : "not ready\n", kText);
    });
    server_.Get("/metrics", [this](const Request&, Response& out) {
      SetContent(pages_.metrics(), kPrometheusText, out);
    });
    server_.Get("/status.json",
                [this](const Request&, Response& out) { SetContent(pages_.status(), kJson, out); });
  }

  static void SetContent(const std::string& content, const char* type, httplib::Response& out) {
    if (content.empty()) {
      out.status = 503;
      return out.set_content("starting\n", kText);
    }
    out.set_content(content, type);
  }

  const AdminOptions options_;
  const Pages pages_;
  PageServer server_;
  std::string address_;
  std::unique_ptr<HttpListener> listener_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<AdminServer>> AdminServer::Start(const AdminOptions& options,
                                                                Pages pages, Counter& closed) {
  auto server = std::make_unique<HttpAdminServer>(options, std::move(pages));
  CRUMB_RETURN_IF_ERROR(server->Open(closed));
  return server;
}

}  // namespace crumb::server
