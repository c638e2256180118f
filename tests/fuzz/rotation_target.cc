// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Rotation files and the safetensors that they are.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>

#include "common/rotation_file.h"
#include "common/safetensors.h"
#include "common/unique_fd.h"
#include "tests/common/temporary_folder.h"
#include "tests/fuzz/fuzz_target.h"

namespace crumb::fuzz {
namespace {

void Run(std::span<const std::byte> input) {
  const UniqueFd file(::memfd_create("rotation", MFD_CLOEXEC));
  Check(::write(file.get(), input.data(), input.size()) == static_cast<ssize_t>(input.size()));
  const std::string path = "/proc/self/fd/" + std::to_string(file.get());
  const auto tensors = SafetensorsFile::Open(path);
  if (!tensors.ok()) {
    Check(!ReadRotationFile(path).ok());
    return;
  }
  for (const std::string& name : (*tensors)->names()) {
    const auto raw = (*tensors)->FindRaw(name);
    Check(raw.ok() && raw->bytes.size() <= input.size());
    (*tensors)->Find(name).status().IgnoreError();
  }
  const auto rotation = ReadRotationFile(path);
  if (!rotation.ok()) return;
  for (const float value : rotation->rotation_k) Check(std::isfinite(value));
  RotationDigest(*rotation);
}

std::string Written(const RotationFile& file) {
  const TemporaryFolder folder;
  Check(WriteRotationFile(file, folder.File("rotation")).ok());
  const UniqueFd written(::open(folder.File("rotation").c_str(), O_RDONLY | O_CLOEXEC));
  std::string bytes(1 << 16, '\0');
  const ssize_t size = ::read(written.get(), bytes.data(), bytes.size());
  Check(size > 0);
  bytes.resize(static_cast<size_t>(size));
  return bytes;
}

std::vector<std::string> Seeds() {
  RotationFile file;
  file.method = "hadamard";
  file.model = "sample";
  file.layers = 1;
  file.kv_heads = 1;
  file.head_dim = 4;
  file.clip_k = 0.92f;
  file.clip_v = 0.9f;
  file.rotation_k.assign(16, 0.5f);
  file.rotation_v.assign(16, 0.5f);
  const std::string small = Written(file);
  file.method = "crumb";
  file.rope = "theta=1e6";
  file.q_heads = 2;
  file.positions = 4096;
  file.position_blocks = 2;
  file.pages_per_position_block = 7;
  file.tokens = 32768;
  file.mean_k.assign(8, 0.25f);
  file.mean_v.assign(4, 0.25f);
  file.feedback_k.assign(16, 0.0f);
  file.shift.assign(2, 0.1f);
  return {small, Written(file)};
}

}  // namespace

const FuzzTarget kRotationTarget = {"rotation", Run, Seeds};

}  // namespace crumb::fuzz
