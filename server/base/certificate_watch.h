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

// Knows until when the certificates of this node serve, and warns in good time. The daemon owns it,
// has an upkeep thread call Look, and exports Read as metrics. Thread-safe: a lock is held while
// Look reads the files, so Read may wait for it.
class CertificateWatch {
 public:
  using Instant = std::chrono::system_clock::time_point;

  // A file to watch: the setting that names it, its path, and whether it is a chain (whose first
  // certificate to end counts) or a set of authorities.
  struct Certificate {
    TlsFile file;
    TlsRole role = TlsRole::kChain;
  };
  // The state of one certificate as of the last Look.
  struct Reading {
    std::string setting;
    std::optional<Instant> expires;  // none: no such file is set, or it was never readable
  };

  // Certificates without a path are not looked at. `warn_before` zero: never warns, but of
  // certificates that have expired.
  // `now` returns the wall clock's time; tests pass a fake.
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

  // Reads one file and logs if there is something to warn of.
  void LookAt(Entry& entry, Instant now) const;

  const Duration warn_before_;
  const std::function<Instant()> now_;
  mutable Mutex mutex_;
  std::vector<Entry> entries_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::server
