// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstring>
#include <string>
#include <utility>

#include "client/c_api/handles.h"
#include "client/c_api/options.h"
#include "common/status_macros.h"

// Begins sequences for workers of both kinds: `Worker` and `Sequence` are handles of crumb.h,
// `call` is the name of its function, for messages.
namespace crumb::c_api {

// All of them run inside Guarded: a null argument and an error of the worker become a code and a
// text, and no exception crosses the C interface.
inline absl::Status NullArgument(const char* call, const char* what) {
  return absl::InvalidArgumentError(std::string(call) + ": " + what + " is NULL");
}

template <typename Worker, typename Sequence, typename Begun>
// Moves a sequence into a new handle, which keeps the worker alive, and writes both results.
void Hand(const Worker& worker, Begun sequence, Sequence** out, uint32_t* cached_tokens) {
  if (cached_tokens != nullptr) {
    *cached_tokens = static_cast<uint32_t>(sequence->cached_tokens());
  }
  *out = new Sequence{worker, std::move(sequence)};
}

template <typename Worker, typename Sequence>
// Worker::Begin behind crumb_sequence_begin and crumb_device_sequence_begin.
crumb_code StartAlone(const char* call, Worker* worker, const int32_t* tokens, size_t count,
                      const crumb_sequence_options* options, Sequence** out,
                      uint32_t* cached_tokens) {
  return Guarded([&]() -> absl::Status {
    if (tokens == nullptr || out == nullptr) return NullArgument(call, "tokens or out");
    CRUMB_ASSIGN_OR_RETURN(const client::SequenceOptions wanted, OptionsOf(Known(options)));
    CRUMB_ASSIGN_OR_RETURN(auto sequence, worker->worker->Begin({tokens, count}, wanted));
    Hand(*worker, std::move(sequence), out, cached_tokens);
    return absl::OkStatus();
  });
}

template <typename Worker, typename Sequence>
// Worker::Lead. The token is copied to the caller's memory, whose size is checked before anything
// is leased.
crumb_code StartLeading(const char* call, Worker* worker, const int32_t* tokens, size_t count,
                        const crumb_sequence_options* options, Sequence** out,
                        uint32_t* cached_tokens, void* token, size_t token_capacity,
                        size_t* token_bytes) {
  return Guarded([&]() -> absl::Status {
    if (tokens == nullptr || out == nullptr || token == nullptr || token_bytes == nullptr) {
      return NullArgument(call, "tokens, out, token or token_bytes");
    }
    if (token_capacity < CRUMB_LEAD_TOKEN_BYTES(count)) {
      return absl::InvalidArgumentError(
          std::string(call) + ": token has room for less than CRUMB_LEAD_TOKEN_BYTES(count)");
    }
    CRUMB_ASSIGN_OR_RETURN(const client::SequenceOptions wanted, OptionsOf(Known(options)));
    CRUMB_ASSIGN_OR_RETURN(auto led, worker->worker->Lead({tokens, count}, wanted));
    if (led.token.size() > token_capacity) return absl::InternalError("a token of unusual size");
    std::memcpy(token, led.token.data(), led.token.size());
    *token_bytes = led.token.size();
    Hand(*worker, std::move(led.sequence), out, cached_tokens);
    return absl::OkStatus();
  });
}

template <typename Worker, typename Sequence>
// Worker::Follow. `token` may come from another process and is checked when it is decoded.
crumb_code StartFollowing(const char* call, Worker* worker, const void* token, size_t token_bytes,
                          const int32_t* tokens, size_t count,
                          const crumb_sequence_options* options, Sequence** out,
                          uint32_t* cached_tokens) {
  return Guarded([&]() -> absl::Status {
    if (tokens == nullptr || out == nullptr || token == nullptr) {
      return NullArgument(call, "token, tokens or out");
    }
    CRUMB_ASSIGN_OR_RETURN(const client::SequenceOptions wanted, OptionsOf(Known(options)));
    CRUMB_ASSIGN_OR_RETURN(auto sequence,
                           worker->worker->Follow({static_cast<const char*>(token), token_bytes},
                                                  {tokens, count}, wanted));
    Hand(*worker, std::move(sequence), out, cached_tokens);
    return absl::OkStatus();
  });
}

}  // namespace crumb::c_api
