// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Files of torch.save: an archive and the pickle in it. The first byte says which is meant.
#include "calibration/pickle.h"
#include "calibration/rotation_zoo.h"
#include "calibration/zip_archive.h"
#include "common/json_file.h"
#include "tests/common/temporary_folder.h"
#include "tests/fuzz/fuzz_target.h"

namespace crumb::fuzz {
namespace {

using namespace calibration;

void RunArchive(std::span<const std::byte> bytes) {
  const auto archive = ZipArchive::Parse(bytes, "fuzz");
  if (!archive.ok()) return;
  for (const std::string& name : archive->names()) {
    const auto entry = archive->Read(name);
    if (!entry.ok()) continue;
    Check(entry->empty() || (entry->data() >= bytes.data() &&
                             entry->data() + entry->size() <= bytes.data() + bytes.size()));
  }
}

void RunPickle(std::span<const std::byte> bytes) {
  const auto pickle =
      Pickle::Parse(bytes, {"collections OrderedDict", "torch FloatStorage"}, "fuzz");
  if (!pickle.ok()) return;
  // Every part is a value that is there, and no value contains itself: this ends.
  int visited = 0;
  std::vector<const PickleValue*> left = {&pickle->root()};
  while (!left.empty() && ++visited < 100000) {
    const PickleValue& value = *left.back();
    left.pop_back();
    for (const int item : value.items) {
      Check(item >= 0);
      left.push_back(&pickle->At(item));
    }
  }
  pickle->Find(pickle->root(), "a");
}

void Run(std::span<const std::byte> input) {
  if (input.empty()) return;
  if ((static_cast<unsigned>(input[0]) & 1) == 0) return RunArchive(input.subspan(1));
  RunPickle(input.subspan(1));
}

std::vector<std::string> Seeds() {
  RotationZooFile file;
  file.objective = "hadamard";
  file.layer_ids = {0};
  file.head_dim = 2;
  file.rotation = {0.6f, -0.8f, 0.8f, 0.6f};
  const TemporaryFolder folder;
  Check(WriteRotationZoo(file, folder.File("zoo.pt")).ok());
  const std::string archive = ReadFile(folder.File("zoo.pt"), 1 << 20).value();
  const auto parsed = ZipArchive::Parse(BytesOf(archive), "seed");
  Check(parsed.ok());
  std::vector<std::string> seeds = {std::string("\0", 1) + archive};
  for (const std::string& name : parsed->names()) {
    if (name.ends_with("data.pkl")) seeds.push_back("\1" + TextOf(*parsed->Read(name)));
  }
  Check(seeds.size() == 2);
  return seeds;
}

}  // namespace

const FuzzTarget kTorchTarget = {"torch", Run, Seeds};

}  // namespace crumb::fuzz
