// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/sha256.h"

#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/sha.h>

#include <memory>

namespace crumb {

Digest Sha256(std::span<const uint8_t> bytes) {
  // SHA256() looks the algorithm up in OpenSSL's tables and allocates, each time: more work than
  // hashing a page's tokens.
  static const EVP_MD* const fetched = EVP_MD_fetch(nullptr, "SHA256", nullptr);
  const EVP_MD* const algorithm = fetched != nullptr ? fetched : EVP_sha256();
  thread_local const std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context(
      EVP_MD_CTX_new(), EVP_MD_CTX_free);
  Digest digest;
  if (EVP_DigestInit_ex2(context.get(), algorithm, nullptr) != 1 ||
      EVP_DigestUpdate(context.get(), bytes.data(), bytes.size()) != 1 ||
      EVP_DigestFinal_ex(context.get(), digest.data(), nullptr) != 1) {
    SHA256(bytes.data(), bytes.size(), digest.data());
  }
  return digest;
}

Digest Sha256(std::string_view text) {
  return Sha256({reinterpret_cast<const uint8_t*>(text.data()), text.size()});
}

Digest HmacSha256(std::string_view key, std::string_view text) {
  Digest digest;
  unsigned int size = digest.size();
  HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()),
       reinterpret_cast<const unsigned char*>(text.data()), text.size(), digest.data(), &size);
  return digest;
}

}  // namespace crumb
