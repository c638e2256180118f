// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tools/commands.h"

#include <filesystem>
#include <fstream>
#include <optional>

#include "calibration/rotation_zoo.h"
#include "common/rotation_file.h"
#include "common/status_macros.h"
#include "fmt/format.h"

namespace crumb::tools {
namespace {

using calibration::RotationZooFile;
using calibration::Side;

std::optional<Side> NamedSide(const std::string& name) {
  if (name.empty()) return std::nullopt;
  return name == "k" ? Side::kKeys : Side::kValues;
}

// Distinguishes the files: torch.save writes ZIP archives, and a rotation file begins with the
// length of its header.
bool IsZip(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  char head[2] = {};
  in.read(head, sizeof(head));
  return head[0] == 'P' && head[1] == 'K';
}

// Returns the "model" of "dir/model.k_rotation_qqt_r_h_pbr.pt".
std::string ModelOf(const std::string& path) {
  std::string name = std::filesystem::path(path).stem().string();
  for (const char* mark : {"k_rotation", "v_rotation"}) {
    if (const size_t at = name.find(mark); at != std::string::npos) name.resize(at);
  }
  while (!name.empty() && (name.back() == '.' || name.back() == '_' || name.back() == '-')) {
    name.pop_back();
  }
  return name;
}

absl::StatusOr<RotationFile> Import(const RotationConvertCommand& command) {
  std::optional<RotationZooFile> keys, values;
  for (const std::string& path : command.files) {
    CRUMB_ASSIGN_OR_RETURN(RotationZooFile zoo, calibration::ReadRotationZoo(path));
    std::optional<Side> side = calibration::SideOf(zoo, path);
    if (!side && command.files.size() == 1) side = NamedSide(command.side);
    if (!side) {
      return absl::InvalidArgumentError(
          path +
          ": neither its objective nor its name says whether it is for K or for V; convert "
          "it alone with --side");
    }
    std::optional<RotationZooFile>& place = *side == Side::kKeys ? keys : values;
    if (place) return absl::InvalidArgumentError(path + ": it is a second file for the same side");
    place = std::move(zoo);
  }
  auto file = calibration::FromRotationZoo(keys ? &*keys : nullptr, values ? &*values : nullptr);
  if (!file.ok()) {
    return absl::InvalidArgumentError(command.files.front() + ", " + command.files.back() + ": " +
                                      std::string(file.status().message()));
  }
  file->model = ModelOf(command.files.front());
  return file;
}

absl::StatusOr<RotationFile> Load(const RotationConvertCommand& command) {
  const bool zips = IsZip(command.files.front());
  if (!zips && command.files.size() != 1) {
    return absl::InvalidArgumentError(command.files.front() +
                                      ": only RotationZoo files come in pairs");
  }
  CRUMB_ASSIGN_OR_RETURN(RotationFile file,
                         zips ? Import(command) : ReadRotationFile(command.files.front()));
  if (!command.model.empty()) file.model = command.model;
  if (command.clip_k) file.clip_k = *command.clip_k;
  if (command.clip_v) file.clip_v = *command.clip_v;
  return file;
}

CommandResult Export(const RotationFile& file, const RotationConvertCommand& command) {
  std::optional<Side> side = NamedSide(command.side);
  if (!side && file.rotation_k.empty() != file.rotation_v.empty()) {
    side = file.rotation_v.empty() ? Side::kKeys : Side::kValues;
  }
  if (!side) {
    return CommandResult::Failed(absl::InvalidArgumentError(
        "a RotationZoo file is for K or for V: say which with --side k or --side v"));
  }
  const int version = command.format == "v1" ? 1 : 2;
  const auto zoo =
      calibration::ToRotationZoo(file, *side, version, command.layers, command.kv_heads);
  if (!zoo.ok()) {
    return CommandResult::Failed(absl::InvalidArgumentError(command.files.front() + ": " +
                                                            std::string(zoo.status().message())));
  }
  const absl::Status written = calibration::WriteRotationZoo(*zoo, command.out);
  if (!written.ok()) return CommandResult::Failed(written);
  std::string text =
      fmt::format("{}: format {}, {} layers, {} KV heads, head_dim {}\n", zoo->objective,
                  command.format, zoo->layer_ids.size(), zoo->kv_heads, zoo->head_dim);
  if (!file.mean_k.empty()) {
    text += "left out, as the format has no place for them: means, feedback, mass shifts\n";
  }
  return CommandResult::Done(text, {{"objective", zoo->objective},
                                    {"format_version", version},
                                    {"layers", zoo->layer_ids.size()},
                                    {"kv_heads", zoo->kv_heads},
                                    {"head_dim", zoo->head_dim}});
}

}  // namespace

CommandResult RunRotationConvert(const RotationConvertCommand& command) {
  const auto file = Load(command);
  if (!file.ok()) return CommandResult::Failed(file.status());
  if (command.format != "crumb") return Export(*file, command);
  const absl::Status written = WriteRotationFile(*file, command.out);
  if (!written.ok()) return CommandResult::Failed(written);
  return CommandResult::Done(DescribeRotationText(*file), DescribeRotation(*file));
}

}  // namespace crumb::tools
