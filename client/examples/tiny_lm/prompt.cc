// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/examples/tiny_lm/prompt.h"

#include <cerrno>
#include <fstream>
#include <iostream>
#include <iterator>

#include "common/errno_status.h"
#include "common/json_file.h"
#include "common/status_macros.h"
#include "models/chat.h"

namespace crumb::tiny_lm {
namespace {

// The largest conversation: the text of a million tokens and more.
constexpr int64_t kConversationBytesMax = int64_t{64} << 20;

absl::StatusOr<std::string> ReadText(const std::string& path) {
  if (path == "-") return std::string(std::istreambuf_iterator<char>(std::cin), {});
  std::ifstream file(path, std::ios::binary);
  if (!file) return ErrnoStatus(errno, "opening prompt file " + path);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

absl::StatusOr<std::vector<models::ChatMessage>> ReadMessages(const RunOptions& options) {
  if (!options.chat) {
    CRUMB_ASSIGN_OR_RETURN(const std::string text,
                           ReadFile(options.messages, kConversationBytesMax));
    return models::ParseChatMessages(text, options.messages);
  }
  std::vector<models::ChatMessage> messages;
  if (!options.system.empty()) messages.push_back({"system", options.system});
  CRUMB_ASSIGN_OR_RETURN(const std::string text, ReadText(options.prompt_file));
  messages.push_back({"user", text});
  return messages;
}

}  // namespace

absl::StatusOr<Prompt> ReadPrompt(const RunOptions& options, const models::Tokenizer& tokenizer) {
  Prompt prompt;
  if (!options.chat && options.messages.empty()) {
    CRUMB_ASSIGN_OR_RETURN(const std::string text, ReadText(options.prompt_file));
    prompt.tokens = tokenizer.begin();
    const std::vector<int32_t> ids = tokenizer.Encode(text);
    prompt.tokens.insert(prompt.tokens.end(), ids.begin(), ids.end());
    return prompt;
  }
  CRUMB_ASSIGN_OR_RETURN(const models::ChatTemplate chat,
                         models::ChatTemplate::Load(options.model));
  CRUMB_ASSIGN_OR_RETURN(const std::vector<models::ChatMessage> messages, ReadMessages(options));
  CRUMB_ASSIGN_OR_RETURN(const std::string text, chat.Render(messages));
  prompt.tokens = tokenizer.Encode(text);
  const std::vector<int32_t> end = tokenizer.Encode(chat.end_of_turn());
  if (end.size() == 1) prompt.end_of_turn = end.front();
  return prompt;
}

}  // namespace crumb::tiny_lm
