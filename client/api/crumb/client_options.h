// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "common/clock.h"

namespace crumb::client {

// ClientOptions describe how a process reaches crumbd and how long it waits for it.
//
// They are read once, by Client::Open, which also checks them. The defaults fit a worker beside its
// crumbd: calls that miss their deadline cost a cache hit, never a token.
struct ClientOptions {
  std::string socket_dir = "/run/crumb";  // folder of crumbd.sock and crumbd.fd.sock
  // HOST:PORT. If not empty, the client uses gRPC over TCP without shared memory; Acquire, Reserve
  // and Commit are not available.
  std::string address;
  // PEM files for TLS to `address`. The certificate and key of this process are needed if crumbd
  // verifies its callers.
  std::string tls_ca_file;    // verifies crumbd's certificate; empty: no TLS
  std::string tls_cert_file;  // certificate of this process, with its intermediates
  std::string tls_key_file;   // private key of tls_cert_file
  // expected name in crumbd's certificate; empty: the host of `address`
  std::string tls_server_name;
  std::string token;                          // identifies the tenant; empty: none
  std::string process_name = "crumb-client";  // name in crumbd's log
  // 16 random bytes that all processes of one model replica have in common; empty: this process is
  // an engine of its own.
  std::string engine;
  // Lookup, Get, Prefetch and Pin query every node of a cluster for pages that crumbd lacks,
  // instead of the homes only. This finds single pages whose position in their sequence is unknown,
  // which tools look up; workers know the position and do not need it.
  bool query_every_node = false;
  uint64_t staging_bytes = uint64_t{64} << 20;  // requested size; crumbd may grant less

  Duration connect_timeout = std::chrono::seconds(1);  // limit of one attempt
  Duration call_timeout = std::chrono::seconds(2);     // limit of calls without a timeout parameter
  // after a lost connection; it doubles up to backoff_max
  Duration backoff_min = std::chrono::milliseconds(50);
  Duration backoff_max = std::chrono::seconds(5);
  Duration counters_interval = std::chrono::seconds(1);  // pause between reports of counters
};

}  // namespace crumb::client
