// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "models/tokenizer.h"

// The texts on which a model is evaluated: they must differ from calibration texts, and are cut
// into sequences.
namespace crumb::bench {

// Returns the number of bytes of the evaluated files that are also in calibration files, in
// passages of 1,024 bytes or more. Short passages, such as a licence with which many files begin,
// are no leak. kInvalidArgument names two files that are the same or share a passage of 9,216
// bytes, or of which an eighth of the evaluated text is shared. kNotFound: a file does not exist.
absl::StatusOr<int64_t> CheckTextsApart(const std::vector<std::string>& texts,
                                        const std::vector<std::string>& calibration_texts);

// Returns the concatenated tokens of all files. kNotFound: a file does not exist.
absl::StatusOr<std::vector<int32_t>> ReadTokens(const models::Tokenizer& tokenizer,
                                                const std::vector<std::string>& texts);

// Returns at most `count` disjoint sequences of `length` tokens, evenly spread over `tokens`.
std::vector<std::vector<int32_t>> CutSequences(const std::vector<int32_t>& tokens, int length,
                                               int count);

}  // namespace crumb::bench
