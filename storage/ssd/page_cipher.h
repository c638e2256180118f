// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/fragment_tier.h"

namespace crumb::storage {

// Encrypts fragments for the SSD: AES-256-GCM under one key, a random nonce for each write, bound
// to keyspace, page, generation and range, so that a sealed fragment opens nowhere else. Random
// nonces are good for 2^32 writes under one key (NIST SP 800-38D, 8.3). Thread-safe.
class PageCipher {
 public:
  // Bytes that Seal adds: nonce (12) and tag (16).
  static constexpr size_t kSealBytes = 28;
  using KeyCheck = std::array<std::byte, 16>;

  // The key is 32 bytes, or 64 hexadecimal digits and white space. kNotFound: no such file;
  // kInvalidArgument: no key.
  static absl::StatusOr<std::unique_ptr<PageCipher>> FromFile(const std::string& path);

  ~PageCipher();
  PageCipher(const PageCipher&) = delete;
  PageCipher& operator=(const PageCipher&) = delete;

  // Returns a value that differs between keys and reveals nothing about them.
  KeyCheck key_check() const;

  // sealed  out [plain.size() + kSealBytes] ciphertext, nonce, tag
  absl::Status Seal(const FragmentMeta& meta, std::span<const std::byte> plain,
                    std::span<std::byte> sealed) const;
  // plain  out [sealed.size() - kSealBytes]; undefined on error. kDataLoss: damaged, of another
  // fragment, or sealed with another key.
  absl::Status Unseal(const FragmentMeta& meta, std::span<const std::byte> sealed,
                      std::span<std::byte> plain) const;

 private:
  using Key = std::array<uint8_t, 32>;

  explicit PageCipher(const Key& key) : key_(key) {}

  Key key_;
};

}  // namespace crumb::storage
