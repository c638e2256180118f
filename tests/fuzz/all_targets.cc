// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/fuzz/fuzz_target.h"

namespace crumb::fuzz {

std::vector<const FuzzTarget*> AllTargets() {
  return {&kCallTarget,      &kConfigTarget,  &kFragmentTarget, &kFrameTarget,
          &kHostImageTarget, &kModelTarget,   &kPeerTarget,     &kRequestTarget,
          &kRotationTarget,  &kSessionTarget, &kTakeoverTarget, &kTorchTarget};
}

}  // namespace crumb::fuzz
