// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/tls_files.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <memory>
#include <vector>

#include "common/errno_status.h"
#include "common/status_macros.h"
#include "fmt/chrono.h"
#include "fmt/format.h"

namespace crumb {
namespace {

struct FreeSsl {
  void operator()(BIO* bio) const { BIO_free(bio); }
  void operator()(X509* certificate) const { X509_free(certificate); }
  void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
};
template <typename T>
using Ssl = std::unique_ptr<T, FreeSsl>;

// A file that is enough for thousands of certificates.
constexpr long kCertificatesMax = 10'000;

std::string Name(const TlsFile& file) { return file.setting + ": " + file.path; }

absl::StatusOr<Ssl<BIO>> OpenFile(const TlsFile& file) {
  errno = 0;
  Ssl<BIO> bio(BIO_new_file(file.path.c_str(), "r"));
  const int error = errno;
  ERR_clear_error();
  if (bio == nullptr) return ErrnoStatus(error == 0 ? EIO : error, Name(file));
  return bio;
}

// A key with a pass phrase would wait for a terminal.
int NoPassPhrase(char*, int, int, void*) { return -1; }

absl::StatusOr<std::vector<Ssl<X509>>> ReadCertificates(const TlsFile& file) {
  CRUMB_ASSIGN_OR_RETURN(const Ssl<BIO> bio, OpenFile(file));
  std::vector<Ssl<X509>> certificates;
  while (static_cast<long>(certificates.size()) < kCertificatesMax) {
    Ssl<X509> certificate(PEM_read_bio_X509(bio.get(), nullptr, NoPassPhrase, nullptr));
    if (certificate == nullptr) break;
    certificates.push_back(std::move(certificate));
  }
  ERR_clear_error();  // the end of the file is one
  if (certificates.empty()) {
    return absl::InvalidArgumentError(Name(file) + " holds no certificate in PEM");
  }
  return certificates;
}

std::string Subject(const X509* certificate) {
  char text[256] = "";
  X509_NAME_oneline(X509_get_subject_name(certificate), text, sizeof(text));
  return text;
}

std::string Instant(const ASN1_TIME* time) {
  std::tm parts{};
  if (ASN1_TIME_to_tm(time, &parts) != 1) return "an unreadable time";
  return fmt::format("{:%Y-%m-%d %H:%M:%S} UTC", parts);
}

absl::Status CheckDates(const TlsFile& file, const X509* certificate, std::time_t now) {
  if (X509_cmp_time(X509_get0_notAfter(certificate), &now) <= 0) {
    return absl::FailedPreconditionError(
        fmt::format("{}: the certificate of {} expired on {}: replace it", Name(file),
                    Subject(certificate), Instant(X509_get0_notAfter(certificate))));
  }
  if (X509_cmp_time(X509_get0_notBefore(certificate), &now) > 0) {
    return absl::FailedPreconditionError(
        fmt::format("{}: the certificate of {} is not valid before {}", Name(file),
                    Subject(certificate), Instant(X509_get0_notBefore(certificate))));
  }
  return absl::OkStatus();
}

absl::Status CheckKey(const TlsFile& file, const TlsFile& cert, const X509* certificate) {
  CRUMB_ASSIGN_OR_RETURN(const Ssl<BIO> bio, OpenFile(file));
  const Ssl<EVP_PKEY> key(PEM_read_bio_PrivateKey(bio.get(), nullptr, NoPassPhrase, nullptr));
  ERR_clear_error();
  if (key == nullptr) {
    return absl::InvalidArgumentError(Name(file) +
                                      " holds no private key in PEM, or one with a pass phrase");
  }
  const int matches = X509_check_private_key(certificate, key.get());
  ERR_clear_error();
  if (matches == 1) return absl::OkStatus();
  return absl::FailedPreconditionError(
      fmt::format("{} is not the key of the certificate in {}", Name(file), Name(cert)));
}

}  // namespace

absl::StatusOr<std::chrono::system_clock::time_point> TlsExpiry(const TlsFile& file, TlsRole role) {
  CRUMB_ASSIGN_OR_RETURN(const auto certificates, ReadCertificates(file));
  std::vector<std::time_t> ends;
  for (const auto& certificate : certificates) {
    std::tm parts{};
    if (ASN1_TIME_to_tm(X509_get0_notAfter(certificate.get()), &parts) != 1) {
      return absl::InvalidArgumentError(
          fmt::format("{}: the certificate of {} has an unreadable end", Name(file),
                      Subject(certificate.get())));
    }
    ends.push_back(::timegm(&parts));
  }
  const auto [first, last] = std::minmax_element(ends.begin(), ends.end());
  return std::chrono::system_clock::from_time_t(role == TlsRole::kChain ? *first : *last);
}

absl::Status CheckTlsFiles(const TlsFiles& files, std::chrono::system_clock::time_point now) {
  if (files.cert.path.empty() != files.key.path.empty()) {
    return absl::InvalidArgumentError(fmt::format("{} and {} belong together: set both or none",
                                                  files.cert.setting, files.key.setting));
  }
  const std::time_t seconds = std::chrono::system_clock::to_time_t(now);
  if (!files.cert.path.empty()) {
    CRUMB_ASSIGN_OR_RETURN(const auto chain, ReadCertificates(files.cert));
    CRUMB_RETURN_IF_ERROR(CheckKey(files.key, files.cert, chain.front().get()));
    for (const auto& certificate : chain) {
      CRUMB_RETURN_IF_ERROR(CheckDates(files.cert, certificate.get(), seconds));
    }
  }
  if (files.ca.path.empty()) return absl::OkStatus();
  CRUMB_ASSIGN_OR_RETURN(const auto authorities, ReadCertificates(files.ca));
  absl::Status dates;
  for (const auto& authority : authorities) {  // one that is valid is enough: others are on the way
    dates = CheckDates(files.ca, authority.get(), seconds);
    if (dates.ok()) break;
  }
  return dates;
}

}  // namespace crumb
