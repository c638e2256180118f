// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/base/certificate_watch.h"

#include <utility>

#include "common/logging.h"
#include "fmt/chrono.h"
#include "fmt/format.h"

namespace crumb::server {
namespace {

constexpr auto kBetweenWarnings = std::chrono::hours(24);

std::string InUtc(CertificateWatch::Instant instant) {
  return fmt::format("{:%Y-%m-%d %H:%M:%S} UTC",
                     fmt::gmtime(std::chrono::system_clock::to_time_t(instant)));
}

}  // namespace

CertificateWatch::CertificateWatch(const std::vector<Certificate>& certificates,
                                   Duration warn_before, std::function<Instant()> now)
    : warn_before_(warn_before), now_(std::move(now)) {
  for (const Certificate& certificate : certificates) {
    entries_.push_back({.certificate = certificate, .expires = {}, .warned = {}});
  }
}

void CertificateWatch::Look() {
  MutexLock lock(&mutex_);
  for (Entry& entry : entries_) {
    if (!entry.certificate.file.path.empty()) LookAt(entry, now_());
  }
}

void CertificateWatch::LookAt(Entry& entry, Instant now) const {
  const TlsFile& file = entry.certificate.file;
  const auto expires = TlsExpiry(file, entry.certificate.role);
  if (!expires.ok()) {
    if (!std::exchange(entry.unreadable, true)) {
      LogError("new connections may fail: {}", expires.status().ToString());
    }
    return;
  }
  entry.unreadable = false;
  if (entry.expires != *expires) entry.warned.reset();
  entry.expires = *expires;
  const bool ended = *expires <= now;
  if (!ended && *expires - now > warn_before_) return;
  if (entry.warned && now - *entry.warned < kBetweenWarnings) return;
  entry.warned = now;
  if (ended) {
    LogError("{}: {} expired on {}: new connections fail until it is replaced", file.setting,
             file.path, InUtc(*expires));
  } else {
    LogWarning("{}: {} expires on {}: replace it, no restart is needed", file.setting, file.path,
               InUtc(*expires));
  }
}

std::vector<CertificateWatch::Reading> CertificateWatch::Read() const {
  MutexLock lock(&mutex_);
  std::vector<Reading> readings;
  for (const Entry& entry : entries_) {
    readings.push_back({entry.certificate.file.setting, entry.expires});
  }
  return readings;
}

}  // namespace crumb::server
