// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "models/tokenizer.h"

// The texts that a model is evaluated on: kept apart from calibration texts, cut to sequences.
namespace crumb::bench {

// How many bytes of the evaluated files stand in calibration files too, in passages of 1,024 bytes
// or more: a licence that many files begin with is no leak. kInvalidArgument names both files: one
// is the other, they share a passage of 9,216 bytes, or an eighth of the evaluated text is shared.
// kNotFound: a file is not there.
absl::StatusOr<int64_t> CheckTextsApart(const std::vector<std::string>& texts,
                                        const std::vector<std::string>& calibration_texts);

// The tokens of all files, one behind the other. kNotFound: a file is not there.
absl::StatusOr<std::vector<int32_t>> ReadTokens(const models::Tokenizer& tokenizer,
                                                const std::vector<std::string>& texts);

// At most `count` sequences of `length` tokens that do not overlap, evenly spread over `tokens`.
std::vector<std::vector<int32_t>> CutSequences(const std::vector<int32_t>& tokens, int length,
                                               int count);

}  // namespace crumb::bench
