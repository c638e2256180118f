// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace crumb {

// A PEM file and the setting that names it, for messages. Empty path: not given.
struct TlsFile {
  std::string setting;
  std::string path;
};

// PEM files of one end of a TLS connection: its certificate (with intermediates behind it), the key
// of that certificate, and the certificates that the other end is checked with.
struct TlsFiles {
  TlsFile cert;
  TlsFile key;
  TlsFile ca;
};

// Use of a file's certificates: all of a chain must be valid, but only one of several authorities.
enum class TlsRole { kChain, kAuthorities };

// The instant from which the certificates in `file` no longer serve. kNotFound: no such file;
// kInvalidArgument: no certificate in it, or one with an unreadable date. Reads the file.
absl::StatusOr<std::chrono::system_clock::time_point> TlsExpiry(const TlsFile& file, TlsRole role);

// Whether the files can be used at `now`, before a TLS library says less about them. kNotFound: no
// such file; kInvalidArgument: not PEM, or certificate and key are not both given;
// kFailedPrecondition: expired, not valid yet, or the key is another certificate's. Messages name
// setting and file. Reads files.
absl::Status CheckTlsFiles(const TlsFiles& files, std::chrono::system_clock::time_point now);

}  // namespace crumb
