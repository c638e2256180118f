// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "transport/ucx_context.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <ucs/config/global_opts.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <utility>
#include <vector>

#include "common/errno_status.h"
#include "common/status_macros.h"

namespace crumb::transport {
namespace {

// UCX allocates memory in proportion. More descriptors than this are seldom allowed to a process.
constexpr rlim_t kDescriptorsMax = rlim_t{1} << 20;

struct ConfigRelease {
  void operator()(ucp_config_t* config) const { ucp_config_release(config); }
};
using Config = std::unique_ptr<ucp_config_t, ConfigRelease>;

bool SameHost(const sockaddr* a, const sockaddr* b) {
  if (a == nullptr || a->sa_family != b->sa_family) return false;
  if (a->sa_family == AF_INET) {
    return reinterpret_cast<const sockaddr_in*>(a)->sin_addr.s_addr ==
           reinterpret_cast<const sockaddr_in*>(b)->sin_addr.s_addr;
  }
  return a->sa_family == AF_INET6 &&
         std::memcmp(&reinterpret_cast<const sockaddr_in6*>(a)->sin6_addr,
                     &reinterpret_cast<const sockaddr_in6*>(b)->sin6_addr, sizeof(in6_addr)) == 0;
}

// Returns the name of the interface that has the address.
absl::StatusOr<std::string> InterfaceOf(const std::string& listen) {
  CRUMB_ASSIGN_OR_RETURN(const SocketAddress address, SocketAddress::Parse(listen));
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return ErrnoStatus(errno, "getifaddrs");
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owned(all, &::freeifaddrs);
  for (const ifaddrs* each = all; each != nullptr; each = each->ifa_next) {
    if (SameHost(each->ifa_addr, address.get())) return std::string(each->ifa_name);
  }
  return absl::InvalidArgumentError(
      "transport.listen " + listen +
      " is not an address of an interface of this machine; see `ip address`");
}

std::string Join(const std::vector<std::string>& names) {
  std::string joined;
  for (const std::string& name : names) joined += (joined.empty() ? "" : ",") + name;
  return joined;
}

absl::Status Set(ucp_config_t* config, const char* name, const std::string& value) {
  return FromUcs(ucp_config_modify(config, name, value.c_str()),
                 std::string("UCX setting ") + name + "=" + value);
}

// Overrides settings of the environment. In this UCX, a setting of one transport is set
// by its name without the transport's prefix (openucx/ucx#8649); the ones below exist for TCP only.
// NET_DEVICES is set for TCP only, because an RDMA device has another name than its interface.
absl::Status Configure(ucp_config_t* config, const TransportOptions& options,
                       const std::string& interface) {
  const std::string segment = std::to_string(options.segment_bytes.value);
  CRUMB_RETURN_IF_ERROR(Set(config, "PROTO_ENABLE", "n"));
  CRUMB_RETURN_IF_ERROR(Set(config, "TX_SEG_SIZE", segment));
  CRUMB_RETURN_IF_ERROR(Set(config, "RX_SEG_SIZE", segment));
  CRUMB_RETURN_IF_ERROR(Set(config, "PUT_ENABLE", "n"));
  CRUMB_RETURN_IF_ERROR(Set(config, "CM_REUSEADDR", "y"));
  if (!options.ucx_tls.empty()) CRUMB_RETURN_IF_ERROR(Set(config, "TLS", Join(options.ucx_tls)));
  const bool tcp_only = options.ucx_tls.size() == 1 && options.ucx_tls[0] == "tcp";
  if (tcp_only && !interface.empty()) {
    CRUMB_RETURN_IF_ERROR(Set(config, "NET_DEVICES", interface));
  }
  return absl::OkStatus();
}

// Beyond its bound on watched descriptors, 1,024 by default, this UCX closes the socket of a new
// connection twice. The second time the number may be another thread's file by then. So the bound
// is that of the process: then accept fails instead.
absl::Status AllowAllDescriptors() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return ErrnoStatus(errno, "getrlimit");
  const auto most = std::min<rlim_t>(limit.rlim_max, kDescriptorsMax);
  return FromUcs(ucs_global_opts_set_value("ASYNC_MAX_EVENTS", std::to_string(most).c_str()),
                 "UCX setting ASYNC_MAX_EVENTS");
}

}  // namespace

absl::StatusOr<SocketAddress> SocketAddress::Parse(const std::string& text) {
  const auto refused = absl::InvalidArgumentError(
      "'" + text + "' is no numeric ADDRESS:PORT, or [ADDRESS]:PORT for IPv6");
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos) return refused;
  uint16_t port = 0;
  const char* end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data() + colon + 1, end, port);
  if (parsed.ec != std::errc() || parsed.ptr != end) return refused;
  std::string host = text.substr(0, colon);
  SocketAddress address;
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    auto* v6 = reinterpret_cast<sockaddr_in6*>(&address.storage);
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(port);
    address.size = sizeof(*v6);
    host = host.substr(1, host.size() - 2);
    if (::inet_pton(AF_INET6, host.c_str(), &v6->sin6_addr) != 1) return refused;
    return address;
  }
  auto* v4 = reinterpret_cast<sockaddr_in*>(&address.storage);
  v4->sin_family = AF_INET;
  v4->sin_port = htons(port);
  address.size = sizeof(*v4);
  if (::inet_pton(AF_INET, host.c_str(), &v4->sin_addr) != 1) return refused;
  return address;
}

std::string SocketAddress::ToString() const {
  char host[INET6_ADDRSTRLEN] = "?";
  if (storage.ss_family == AF_INET6) {
    const auto* v6 = reinterpret_cast<const sockaddr_in6*>(&storage);
    ::inet_ntop(AF_INET6, &v6->sin6_addr, host, sizeof(host));
    return "[" + std::string(host) + "]:" + std::to_string(ntohs(v6->sin6_port));
  }
  const auto* v4 = reinterpret_cast<const sockaddr_in*>(&storage);
  ::inet_ntop(AF_INET, &v4->sin_addr, host, sizeof(host));
  return std::string(host) + ":" + std::to_string(ntohs(v4->sin_port));
}

absl::StatusOr<std::shared_ptr<UcxContext>> UcxContext::Create(const TransportOptions& options) {
  std::string interface;
  if (!options.listen.empty()) {
    CRUMB_ASSIGN_OR_RETURN(interface, InterfaceOf(options.listen));
  }
  CRUMB_RETURN_IF_ERROR(AllowAllDescriptors());
  ucp_config_t* raw = nullptr;
  CRUMB_RETURN_IF_ERROR(FromUcs(ucp_config_read(nullptr, nullptr, &raw), "UCX configuration"));
  const Config config(raw);
  CRUMB_RETURN_IF_ERROR(Configure(config.get(), options, interface));
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  params.mt_workers_shared = 1;  // the opening thread makes the worker, another one drives it
  std::shared_ptr<UcxContext> context(new UcxContext);
  CRUMB_RETURN_IF_ERROR(FromUcs(ucp_init(&params, config.get(), &context->context_),
                                "UCX with transports " + Join(options.ucx_tls)));
  context->description_ = std::string("ucx ") + ucp_get_version_string() + ", " +
                          (options.ucx_tls.empty() ? "all transports" : Join(options.ucx_tls)) +
                          (interface.empty() ? "" : " on " + interface);
  return context;
}

UcxContext::~UcxContext() {
  if (context_ != nullptr) ucp_cleanup(context_);
}

absl::Status FromUcs(ucs_status_t status, const std::string& what) {
  if (status == UCS_OK) return absl::OkStatus();
  const std::string text = what + ": " + ucs_status_string(status);
  switch (status) {
    case UCS_ERR_INVALID_PARAM:
    case UCS_ERR_INVALID_ADDR:
      return absl::InvalidArgumentError(text);
    case UCS_ERR_NO_MEMORY:
    case UCS_ERR_NO_RESOURCE:
    case UCS_ERR_EXCEEDS_LIMIT:
      return absl::ResourceExhaustedError(text);
    case UCS_ERR_NO_DEVICE:
    case UCS_ERR_UNSUPPORTED:
    case UCS_ERR_NOT_IMPLEMENTED:
      return absl::FailedPreconditionError(text);
    case UCS_ERR_MESSAGE_TRUNCATED:
      return absl::DataLossError(text);
    case UCS_ERR_UNREACHABLE:
    case UCS_ERR_CONNECTION_RESET:
    case UCS_ERR_NOT_CONNECTED:
    case UCS_ERR_REJECTED:
    case UCS_ERR_ENDPOINT_TIMEOUT:
    case UCS_ERR_CANCELED:
    case UCS_ERR_BUSY:
    case UCS_ERR_IO_ERROR:
    case UCS_ERR_TIMED_OUT:
      return absl::UnavailableError(text);
    default:
      return absl::InternalError(text);
  }
}

}  // namespace crumb::transport
