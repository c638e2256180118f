// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// One target for libFuzzer. CRUMB_FUZZ_TARGET is its name in fuzz_target.h. --seeds=FOLDER writes
// its seeds there instead, as 0, 1...
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string_view>

#include "common/logging.h"
#include "tests/fuzz/fuzz_target.h"

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  crumb::SetLogSeverity(crumb::Severity::kOff);
  constexpr std::string_view kSeeds = "--seeds=";
  for (int i = 1; i < *argc; ++i) {
    const std::string_view argument = (*argv)[i];
    if (!argument.starts_with(kSeeds)) continue;
    const std::filesystem::path folder = argument.substr(kSeeds.size());
    std::filesystem::create_directories(folder);
    int number = 0;
    for (const std::string& seed : crumb::fuzz::CRUMB_FUZZ_TARGET.seeds()) {
      std::ofstream(folder / std::to_string(number++), std::ios::binary) << seed;
    }
    std::exit(0);
  }
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  crumb::fuzz::CRUMB_FUZZ_TARGET.run(std::as_bytes(std::span(data, size)));
  return 0;
}
