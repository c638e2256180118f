// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/examples/tiny_lm/checkpoint_digest.h"

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <vector>

#include "common/errno_status.h"
#include "common/hex.h"
#include "common/sha256.h"
#include "common/status_macros.h"

namespace crumb::tiny_lm {
namespace {

namespace fs = std::filesystem;

constexpr size_t kPieceBytes = size_t{16} << 20;

bool DecidesKeys(const fs::path& path) {
  return path.filename() == "config.json" || path.extension() == ".safetensors";
}

// Returns the digest of the digests of the file's pieces, so that no file needs to fit into memory.
absl::StatusOr<Digest> FileDigest(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return ErrnoStatus(errno, "opening " + path.string());
  std::string pieces;
  std::vector<char> piece(kPieceBytes);
  while (file) {
    file.read(piece.data(), static_cast<std::streamsize>(piece.size()));
    const Digest digest =
        Sha256(std::string_view(piece.data(), static_cast<size_t>(file.gcount())));
    pieces.append(digest.begin(), digest.end());
  }
  if (file.bad()) return ErrnoStatus(errno, "reading " + path.string());
  return Sha256(pieces);
}

}  // namespace

absl::StatusOr<std::string> CheckpointDigest(const std::string& dir) {
  std::error_code error;
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(dir, error)) {
    if (DecidesKeys(entry.path())) files.push_back(entry.path());
  }
  if (error) return ErrnoStatus(error.value(), "listing model directory " + dir);
  std::sort(files.begin(), files.end());
  std::string text;
  for (const fs::path& path : files) {
    CRUMB_ASSIGN_OR_RETURN(const Digest digest, FileDigest(path));
    text += path.filename().string() + "\n" + HexEncode(digest) + "\n";
  }
  return HexEncode(Sha256(text));
}

}  // namespace crumb::tiny_lm
