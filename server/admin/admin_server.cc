// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/admin/admin_server.h"

#include <utility>

#include "common/status_macros.h"
#include "common/thread.h"
#include "httplib.h"
#include "server/listen_check.h"

namespace crumb::server {
namespace {

constexpr char kText[] = "text/plain; charset=utf-8";
constexpr char kPrometheusText[] = "text/plain; version=0.0.4; charset=utf-8";
constexpr char kJson[] = "application/json";
constexpr char kHtml[] = "text/html; charset=utf-8";
// No script runs on the status page, whatever it shows, and nothing is loaded.
constexpr char kContentPolicy[] =
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'";
constexpr size_t kBodyBytesMax = 4096;  // nobody has to send one

class HttpAdminServer : public AdminServer {
 public:
  HttpAdminServer(const AdminOptions& options, Pages pages)
      : options_(options), pages_(std::move(pages)) {}

  ~HttpAdminServer() override {
    server_.stop();
    thread_.Join();
  }

  absl::Status Open() {
    CRUMB_ASSIGN_OR_RETURN(HostPort place, ParseHostPort("admin.listen", options_.listen));
    CRUMB_RETURN_IF_ERROR(CheckTcpFree("admin.listen", place));
    Configure();
    Route();
    if (place.port == 0) {
      place.port = server_.bind_to_any_port(place.host);
    } else if (!server_.bind_to_port(place.host, place.port)) {
      place.port = -1;
    }
    if (place.port < 0)
      return absl::UnavailableError("admin.listen " + options_.listen + ": cannot listen there");
    const bool v6 = place.host.find(':') != std::string::npos;
    address_ = (v6 ? "[" + place.host + "]" : place.host) + ":" + std::to_string(place.port);
    thread_ = Thread("crumb-admin", [this] { server_.listen_after_bind(); });
    // stop() before listening has begun would be lost.
    while (!server_.is_running()) std::this_thread::yield();
    return absl::OkStatus();
  }

  std::string address() const override { return address_; }

 private:
  void Configure() {
    const auto threads = static_cast<size_t>(options_.threads);
    server_.new_task_queue = [threads] { return new httplib::ThreadPool(threads); };
    server_.set_payload_max_length(kBodyBytesMax);
    // The library polls idle connections: each answers one request.
    server_.set_keep_alive_max_count(1);
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(options_.read_timeout);
    const auto rest =
        std::chrono::duration_cast<std::chrono::microseconds>(options_.read_timeout - seconds);
    server_.set_read_timeout(seconds.count(), rest.count());
    server_.set_write_timeout(seconds.count(), rest.count());
    // Not the library's default, which lets two processes share a port.
    server_.set_socket_options([](socket_t socket) {
      const int on = 1;
      ::setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    });
  }

  void Route() {
    using httplib::Request;
    using httplib::Response;
    server_.Get("/", [this](const Request&, Response& out) {
      out.set_header("Content-Security-Policy", kContentPolicy);
      out.set_header("Cache-Control", "no-store");
      Answer(pages_.page(), kHtml, out);
    });
    server_.Get("/healthz", [](const Request&, Response& out) { out.set_content("ok\n", kText); });
    server_.Get("/readyz", [this](const Request&, Response& out) {
      const bool ready = pages_.ready();
      out.status = ready ? 200 : 503;
      out.set_content(ready ? "ready\n" : "not ready\n", kText);
    });
    server_.Get("/metrics", [this](const Request&, Response& out) {
      Answer(pages_.metrics(), kPrometheusText, out);
    });
    server_.Get("/status.json",
                [this](const Request&, Response& out) { Answer(pages_.status(), kJson, out); });
  }

  static void Answer(const std::string& content, const char* type, httplib::Response& out) {
    if (content.empty()) {
      out.status = 503;
      return out.set_content("starting\n", kText);
    }
    out.set_content(content, type);
  }

  const AdminOptions options_;
  const Pages pages_;
  httplib::Server server_;
  std::string address_;
  Thread thread_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<AdminServer>> AdminServer::Start(const AdminOptions& options,
                                                                Pages pages) {
  auto server = std::make_unique<HttpAdminServer>(options, std::move(pages));
  CRUMB_RETURN_IF_ERROR(server->Open());
  return server;
}

}  // namespace crumb::server
