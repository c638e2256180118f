// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/ssd/page_cipher.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/rand.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string_view>

#include "common/hex.h"
#include "common/little_endian.h"
#include "common/sha256.h"

namespace crumb::storage {
namespace {

constexpr size_t kNonceBytes = 12;
constexpr size_t kTagBytes = 16;
static_assert(kNonceBytes + kTagBytes == PageCipher::kSealBytes);
constexpr size_t kKeyFileBytesMax = 1024;

struct FreeContext {
  void operator()(EVP_CIPHER_CTX* context) const { EVP_CIPHER_CTX_free(context); }
};
using Context = std::unique_ptr<EVP_CIPHER_CTX, FreeContext>;

const uint8_t* In(std::span<const std::byte> bytes) {
  return reinterpret_cast<const uint8_t*>(bytes.data());
}
uint8_t* Out(std::span<std::byte> bytes) { return reinterpret_cast<uint8_t*>(bytes.data()); }

// The associated data that a sealed fragment is bound to.
std::array<std::byte, 80> Binding(const FragmentMeta& meta) {
  std::array<std::byte, 80> bytes;
  std::memcpy(bytes.data(), meta.keyspace.bytes.data(), 32);
  std::memcpy(bytes.data() + 32, meta.key.bytes.data(), 32);
  StoreLittle(bytes.data() + 64, meta.generation);
  StoreLittle(bytes.data() + 72, meta.range.layers.begin);
  StoreLittle(bytes.data() + 74, meta.range.layers.end);
  StoreLittle(bytes.data() + 76, meta.range.heads.begin);
  StoreLittle(bytes.data() + 78, meta.range.heads.end);
  return bytes;
}

}  // namespace

absl::StatusOr<std::unique_ptr<PageCipher>> PageCipher::FromFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) return absl::NotFoundError("ssd.key_file: cannot read " + path);
  std::string text(kKeyFileBytesMax, '\0');
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(in.gcount()));
  Key key;
  if (text.size() == key.size()) {
    std::memcpy(key.data(), text.data(), key.size());
  } else {
    while (!text.empty() && std::strchr(" \t\r\n", text.back()) != nullptr) text.pop_back();
    if (text.size() != 2 * key.size() || !HexDecode(text, key)) {
      return absl::InvalidArgumentError(
          "ssd.key_file: " + path +
          " holds no key: 32 bytes or 64 hexadecimal digits, as from `openssl rand -hex 32`");
    }
  }
  OPENSSL_cleanse(text.data(), text.size());
  return std::unique_ptr<PageCipher>(new PageCipher(key));
}

PageCipher::~PageCipher() { OPENSSL_cleanse(key_.data(), key_.size()); }

PageCipher::KeyCheck PageCipher::key_check() const {
  const std::string_view key(reinterpret_cast<const char*>(key_.data()), key_.size());
  const Digest digest = HmacSha256(key, "crumb/ssd/key-check/1");
  KeyCheck check;
  std::memcpy(check.data(), digest.data(), check.size());
  return check;
}

absl::Status PageCipher::Seal(const FragmentMeta& meta, std::span<const std::byte> plain,
                              std::span<std::byte> sealed) const {
  if (sealed.size() != plain.size() + kSealBytes) {
    return absl::InternalError("a sealed fragment of the wrong size");
  }
  const std::span<std::byte> nonce = sealed.subspan(plain.size(), kNonceBytes);
  const std::span<std::byte> tag = sealed.last(kTagBytes);
  if (RAND_bytes(Out(nonce), kNonceBytes) != 1) return absl::InternalError("no random numbers");
  const Context context(EVP_CIPHER_CTX_new());
  const auto binding = Binding(meta);
  int written = 0;
  const bool done =
      context != nullptr &&
      EVP_EncryptInit_ex(context.get(), EVP_aes_256_gcm(), nullptr, key_.data(), In(nonce)) == 1 &&
      EVP_EncryptUpdate(context.get(), nullptr, &written, In(binding), binding.size()) == 1 &&
      EVP_EncryptUpdate(context.get(), Out(sealed), &written, In(plain),
                        static_cast<int>(plain.size())) == 1 &&
      EVP_EncryptFinal_ex(context.get(), Out(sealed) + written, &written) == 1 &&
      EVP_CIPHER_CTX_ctrl(context.get(), EVP_CTRL_GCM_GET_TAG, kTagBytes, Out(tag)) == 1;
  return done ? absl::OkStatus() : absl::InternalError("encrypting a fragment failed");
}

absl::Status PageCipher::Unseal(const FragmentMeta& meta, std::span<const std::byte> sealed,
                                std::span<std::byte> plain) const {
  if (sealed.size() != plain.size() + kSealBytes) {
    return absl::InternalError("a sealed fragment of the wrong size");
  }
  const std::span<const std::byte> nonce = sealed.subspan(plain.size(), kNonceBytes);
  std::array<std::byte, kTagBytes> tag;
  std::memcpy(tag.data(), sealed.last(kTagBytes).data(), kTagBytes);
  const Context context(EVP_CIPHER_CTX_new());
  const auto binding = Binding(meta);
  int written = 0;
  const bool begun =
      context != nullptr &&
      EVP_DecryptInit_ex(context.get(), EVP_aes_256_gcm(), nullptr, key_.data(), In(nonce)) == 1 &&
      EVP_DecryptUpdate(context.get(), nullptr, &written, In(binding), binding.size()) == 1 &&
      EVP_DecryptUpdate(context.get(), Out(plain), &written, In(sealed),
                        static_cast<int>(plain.size())) == 1 &&
      EVP_CIPHER_CTX_ctrl(context.get(), EVP_CTRL_GCM_SET_TAG, kTagBytes, Out(tag)) == 1;
  if (!begun) return absl::InternalError("decrypting a fragment failed");
  if (EVP_DecryptFinal_ex(context.get(), Out(plain) + written, &written) != 1) {
    return absl::DataLossError("an encrypted fragment does not authenticate");
  }
  return absl::OkStatus();
}

}  // namespace crumb::storage
