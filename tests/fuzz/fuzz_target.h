// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdlib>
#include <span>
#include <string>
#include <vector>

namespace crumb::fuzz {

// A decoder of hostile input. Inputs are taken one after the other, in any number; one leaves
// nothing behind for the next.
struct FuzzTarget {
  const char* name;
  // Decodes `input`, and aborts if the decoded value breaks a promise.
  void (*run)(std::span<const std::byte> input);
  // Well-formed inputs, made by the encoders.
  std::vector<std::string> (*seeds)();
};

// The targets, one per source of this folder.
extern const FuzzTarget kCallTarget;
extern const FuzzTarget kConfigTarget;
extern const FuzzTarget kFragmentTarget;
extern const FuzzTarget kFrameTarget;
extern const FuzzTarget kHostImageTarget;
extern const FuzzTarget kModelTarget;
extern const FuzzTarget kPeerTarget;
extern const FuzzTarget kRequestTarget;
extern const FuzzTarget kRotationTarget;
extern const FuzzTarget kSessionTarget;
extern const FuzzTarget kTakeoverTarget;
extern const FuzzTarget kTorchTarget;

std::vector<const FuzzTarget*> AllTargets();

// Ends the process when a promise is broken.
inline void Check(bool kept) {
  if (!kept) std::abort();
}

inline std::span<const std::byte> BytesOf(const std::string& text) {
  return std::as_bytes(std::span(text));
}
template <typename Bytes>
std::string TextOf(const Bytes& bytes) {
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

}  // namespace crumb::fuzz
