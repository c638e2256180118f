// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/ssd/page_cipher.h"

#include <openssl/evp.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>

#include "gtest/gtest.h"
#include "tests/storage/sample_fragment.h"

namespace crumb::storage {
namespace {

class PageCipherTest : public testing::Test {
 protected:
  ~PageCipherTest() override { std::filesystem::remove(path_); }

  absl::StatusOr<std::unique_ptr<PageCipher>> FromText(const std::string& text) {
    std::ofstream(path_, std::ios::binary | std::ios::trunc) << text;
    return PageCipher::FromFile(path_);
  }

  static std::string RawKey() {
    std::string key;
    for (int i = 0; i < 32; ++i) key += static_cast<char>(7 * i + 1);
    return key;
  }

  std::vector<std::byte> Seal(const PageCipher& cipher, std::span<const std::byte> plain) const {
    std::vector<std::byte> sealed(plain.size() + PageCipher::kSealBytes);
    EXPECT_TRUE(cipher.Seal(meta_, plain, sealed).ok());
    return sealed;
  }

  absl::Status Unseal(const PageCipher& cipher, const FragmentMeta& meta,
                      std::span<const std::byte> sealed) const {
    std::vector<std::byte> plain(sealed.size() - PageCipher::kSealBytes);
    return cipher.Unseal(meta, sealed, plain);
  }

  const std::string path_ = testing::TempDir() + "crumb-key-" + std::to_string(::getpid());
  const std::vector<std::byte> plain_ = BytesOf(SamplePage(1, 2));
  const FragmentMeta meta_ = MetaOf(SamplePage(1, 2));
};

TEST_F(PageCipherTest, OpensWhatItSealed) {
  const auto cipher = FromText(RawKey()).value();
  for (const size_t size : {size_t{0}, size_t{1}, size_t{15}, size_t{16}, plain_.size()}) {
    const auto plain = std::span(plain_).first(size);
    const std::vector<std::byte> sealed = Seal(*cipher, plain);
    std::vector<std::byte> opened(size);
    ASSERT_TRUE(cipher->Unseal(meta_, sealed, opened).ok()) << size;
    EXPECT_TRUE(std::equal(plain.begin(), plain.end(), opened.begin()));
  }
}

// GCM encrypts in counter mode, from counter 2 on: another mode of the library opens the bytes.
TEST_F(PageCipherTest, CiphertextIsAes256InCounterMode) {
  const auto cipher = FromText(RawKey()).value();
  const std::vector<std::byte> sealed = Seal(*cipher, plain_);
  uint8_t counter[16] = {};
  std::memcpy(counter, sealed.data() + plain_.size(), 12);
  counter[15] = 2;
  std::vector<std::byte> opened(plain_.size());
  EVP_CIPHER_CTX* context = EVP_CIPHER_CTX_new();
  int written = 0;
  const std::string key = RawKey();
  ASSERT_EQ(EVP_DecryptInit_ex(context, EVP_aes_256_ctr(), nullptr,
                               reinterpret_cast<const uint8_t*>(key.data()), counter),
            1);
  ASSERT_EQ(EVP_DecryptUpdate(context, reinterpret_cast<uint8_t*>(opened.data()), &written,
                              reinterpret_cast<const uint8_t*>(sealed.data()),
                              static_cast<int>(plain_.size())),
            1);
  EVP_CIPHER_CTX_free(context);
  EXPECT_EQ(opened, plain_);
}

TEST_F(PageCipherTest, AnyChangedBitIsDataLoss) {
  const auto cipher = FromText(RawKey()).value();
  const std::vector<std::byte> sealed = Seal(*cipher, std::span(plain_).first(100));
  for (size_t i = 0; i < sealed.size(); ++i) {
    std::vector<std::byte> damaged = sealed;
    damaged[i] ^= std::byte{1} << (i % 8);
    EXPECT_TRUE(absl::IsDataLoss(Unseal(*cipher, meta_, damaged))) << "byte " << i;
  }
}

TEST_F(PageCipherTest, OpensForItsOwnFragmentOnly) {
  const auto cipher = FromText(RawKey()).value();
  const std::vector<std::byte> sealed = Seal(*cipher, plain_);
  EXPECT_TRUE(Unseal(*cipher, meta_, sealed).ok());
  FragmentMeta other = meta_;
  other.key = SampleKey(1, 3);
  EXPECT_TRUE(absl::IsDataLoss(Unseal(*cipher, other, sealed)));
  other = meta_;
  other.keyspace = SampleKeyspace(9);
  EXPECT_TRUE(absl::IsDataLoss(Unseal(*cipher, other, sealed)));
  other = meta_;
  ++other.generation;
  EXPECT_TRUE(absl::IsDataLoss(Unseal(*cipher, other, sealed)));
  other = meta_;
  ++other.range.heads.end;
  EXPECT_TRUE(absl::IsDataLoss(Unseal(*cipher, other, sealed)));
  const auto stranger = FromText(std::string(64, '0')).value();
  EXPECT_TRUE(absl::IsDataLoss(Unseal(*stranger, meta_, sealed)));
}

TEST_F(PageCipherTest, NoNonceComesTwice) {
  const auto cipher = FromText(RawKey()).value();
  std::set<std::vector<std::byte>> nonces;
  for (int i = 0; i < 1000; ++i) {
    const auto sealed = Seal(*cipher, std::span(plain_).first(4));
    nonces.insert({sealed.begin() + 4, sealed.begin() + 16});
  }
  EXPECT_EQ(nonces.size(), 1000u);
}

TEST_F(PageCipherTest, KeysComeInTwoForms) {
  const auto raw = FromText(std::string(32, '\x5a')).value();
  std::string digits;
  for (int i = 0; i < 32; ++i) digits += "5a";
  const auto hex = FromText(digits + "\n").value();
  EXPECT_EQ(raw->key_check(), hex->key_check());
  EXPECT_NE(raw->key_check(), FromText(std::string(64, 'f')).value()->key_check());
  EXPECT_TRUE(Unseal(*hex, meta_, Seal(*raw, plain_)).ok());
  for (const std::string& text : {std::string(), std::string(31, 'x'), std::string(63, 'a'),
                                  std::string(64, 'g'), std::string(65, 'a'), digits + digits}) {
    EXPECT_TRUE(absl::IsInvalidArgument(FromText(text).status())) << text.size();
  }
}

}  // namespace
}  // namespace crumb::storage
