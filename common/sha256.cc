// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/sha256.h"

#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/sha.h>

namespace crumb {

Digest Sha256(std::span<const uint8_t> bytes) {
  // SHA256() looks the algorithm up in OpenSSL's tables each time, which takes longer than a page's
  // tokens do.
  static const EVP_MD* const fetched = EVP_MD_fetch(nullptr, "SHA256", nullptr);
  const EVP_MD* const algorithm = fetched != nullptr ? fetched : EVP_sha256();
  Digest digest;
  EVP_Digest(bytes.data(), bytes.size(), digest.data(), nullptr, algorithm, nullptr);
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
