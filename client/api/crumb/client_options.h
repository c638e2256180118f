// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "common/clock.h"

namespace crumb::client {

// How a process reaches crumbd, and how much it waits for it.
struct ClientOptions {
  std::string socket_dir = "/run/crumb";  // holds crumbd.sock and crumbd.fd.sock
  // HOST:PORT. Not empty: gRPC over TCP, without shared memory: no Acquire, Reserve or Commit.
  std::string address;
  // TLS to `address`: PEM files. Certificate and key of this process are what crumbd asks for when
  // it checks its callers.
  std::string tls_ca_file;      // that crumbd's certificate is checked with; empty: no TLS
  std::string tls_cert_file;    // of this process, with its intermediates
  std::string tls_key_file;     // of that certificate
  std::string tls_server_name;  // that crumbd's certificate carries; empty: the host of `address`
  std::string token;            // of the tenant; empty: none
  std::string process_name = "crumb-client";  // for crumbd's log
  // 16 random bytes that the processes of one model replica agreed on; empty: an engine of its own.
  std::string engine;
  // Lookup, Get, Prefetch and Pin ask every node of a cluster for what crumbd lacks, not only the
  // homes: finds single pages, whose place in their sequence is not known. For tools.
  bool query_every_node = false;
  uint64_t staging_bytes = uint64_t{64} << 20;  // wanted; crumbd may give less

  Duration connect_timeout = std::chrono::seconds(1);    // of one attempt
  Duration call_timeout = std::chrono::seconds(2);       // of calls that take no timeout
  Duration backoff_min = std::chrono::milliseconds(50);  // after a lost connection; doubles
  Duration backoff_max = std::chrono::seconds(5);
  Duration counters_interval = std::chrono::seconds(1);  // between reports of what was counted
};

}  // namespace crumb::client
