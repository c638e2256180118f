// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "common/clock.h"
#include "common/mutex.h"
#include "common/tls_files.h"

namespace crumb::server {

// Knows until when the certificates of this node serve, and warns in good time. Thread-safe.
class CertificateWatch {
 public:
  using Instant = std::chrono::system_clock::time_point;

  struct Certificate {
    TlsFile file;
    TlsRole role = TlsRole::kChain;
  };
  struct Reading {
    std::string setting;
    std::optional<Instant> expires;  // none: no such file is set, or it was never readable
  };

  // Certificates without a path are not looked at. `warn_before` zero: never warns, but of
  // certificates that have expired.
  CertificateWatch(const std::vector<Certificate>& certificates, Duration warn_before,
                   std::function<Instant()> now);

  // Reads the files. Logs a certificate that ends within `warn_before`, or has ended, once a day,
  // and again when another file is in its place; a file that cannot be read once. Blocks.
  void Look();

  // Returns one reading for each certificate, in their order, as of the last check. A certificate
  // that could not be read keeps its instant.
  std::vector<Reading> Read() const;

 private:
  struct Entry {
    Certificate certificate;
    std::optional<Instant> expires;
    std::optional<Instant> warned;  // time of the last warning about `expires`
    bool unreadable = false;
  };

  void LookAt(Entry& entry, Instant now) const;

  const Duration warn_before_;
  const std::function<Instant()> now_;
  mutable Mutex mutex_;
  std::vector<Entry> entries_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::server
