// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace crumb::models {

// A message of a conversation.
struct ChatMessage {
  std::string role;  // system, user or assistant
  std::string content;
};

// The ways to write conversations as text that are known here. Published chat templates are
// programs (in Jinja), which this project does not run: it recognises these two by their markers.
enum class ChatFormat {
  kChatMl,  // <|im_start|>ROLE\nCONTENT<|im_end|>\n, as SmolLM's and Qwen's
  kLlama3,  // <|start_header_id|>ROLE<|end_header_id|>\n\nCONTENT<|eot_id|>
};

// Writes conversations as the text that a model was trained on. Immutable, so thread-safe.
class ChatTemplate {
 public:
  // Reads the template of an HF directory: chat_template.jinja, or the field chat_template of
  // tokenizer_config.json. kNotFound: the directory has no template. kInvalidArgument: a file is
  // damaged, or the template is none of the known formats; the message names them.
  static absl::StatusOr<ChatTemplate> Load(const std::string& dir);

  // Recognises the format of a template's text. `begin` is the text of the model's token for the
  // beginning of a sequence, which may be empty.
  static absl::StatusOr<ChatTemplate> Recognise(std::string_view jinja, const std::string& begin);

  ChatFormat format() const { return format_; }
  // Returns the text of the token that ends a turn.
  std::string_view end_of_turn() const;

  // Returns the text of `messages` with the beginning of the assistant's reply. kInvalidArgument:
  // a role is unknown, a system message is not the first one, or the last message is not a user's.
  absl::StatusOr<std::string> Render(std::span<const ChatMessage> messages) const;

 private:
  // Appends one message with its markers, as the format writes it.
  void AppendMessage(const ChatMessage& message, std::string* text) const;

  ChatFormat format_ = ChatFormat::kChatMl;
  std::string begin_;  // text before the first message
  // The system message, without markers, of conversations that begin with none; may be empty.
  std::string default_system_;
  // Reasoning up to </think> is cut from the assistant's earlier messages, as Qwen3's template
  // does.
  bool drops_reasoning_ = false;
};

// Reads a conversation: a JSON array of objects with the texts "role" and "content". Messages of
// errors name `where`.
absl::StatusOr<std::vector<ChatMessage>> ParseChatMessages(std::string_view json,
                                                           const std::string& where);

}  // namespace crumb::models
