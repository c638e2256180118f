// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "models/chat.h"

#include <filesystem>

#include "absl/strings/str_cat.h"
#include "common/json_file.h"
#include "common/status_macros.h"

namespace crumb::models {
namespace {

// The largest template file: a hundred times the longest published template.
constexpr int64_t kTemplateBytesMax = int64_t{1} << 20;

constexpr std::string_view kTurnBegin = "<|im_start|>";
constexpr std::string_view kTurnEnd = "<|im_end|>";
constexpr std::string_view kHeaderBegin = "<|start_header_id|>";
constexpr std::string_view kHeaderEnd = "<|end_header_id|>";
constexpr std::string_view kLlamaTurnEnd = "<|eot_id|>";
constexpr std::string_view kReasoningEnd = "</think>";
// Text of Llama 3.1's template, which writes today's date into every prompt.
constexpr std::string_view kDatedBlock = "Cutting Knowledge Date";
constexpr std::string_view kSpaces = " \t\n\r\v\f";

bool Has(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

// Returns `text` with the escapes of a Jinja string literal resolved.
std::string Unescaped(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const bool newline = text[i] == '\\' && i + 1 < text.size() && text[i + 1] == 'n';
    out.push_back(newline ? '\n' : text[i]);
    if (newline) ++i;
  }
  return out;
}

// Returns the system message that a ChatML template has as a literal between the markers of a turn,
// or an empty text if it has none.
std::string LiteralSystem(std::string_view jinja) {
  const std::string opening = absl::StrCat(std::string(kTurnBegin), "system");
  for (size_t at = jinja.find(opening); at != std::string_view::npos;
       at = jinja.find(opening, at + 1)) {
    std::string_view rest = jinja.substr(at + opening.size());
    if (rest.starts_with("\\n")) {
      rest.remove_prefix(2);
    } else if (rest.starts_with('\n')) {
      rest.remove_prefix(1);
    } else {
      continue;
    }
    // A quote or a brace ends the literal: an expression follows.
    const size_t end = rest.find_first_of("'\"{}<");
    if (end == std::string_view::npos || end == 0) continue;
    if (rest.substr(end).starts_with(kTurnEnd)) return Unescaped(rest.substr(0, end));
  }
  return "";
}

std::string_view Trimmed(std::string_view text) {
  const size_t begin = text.find_first_not_of(kSpaces);
  if (begin == std::string_view::npos) return "";
  return text.substr(begin, text.find_last_not_of(kSpaces) - begin + 1);
}

std::string_view WithoutReasoning(std::string_view content) {
  const size_t end = content.rfind(kReasoningEnd);
  if (end == std::string_view::npos) return content;
  content.remove_prefix(end + kReasoningEnd.size());
  const size_t begin = content.find_first_not_of('\n');
  return begin == std::string_view::npos ? "" : content.substr(begin);
}

// Returns the text of a special token, which is a text or an object with the text as "content".
absl::StatusOr<std::string> SpecialToken(const nlohmann::json& json, const std::string& key,
                                         const std::string& where) {
  if (!HasField(json, key)) return "";
  if (json[key].is_object()) return StringField(json[key], "content", where + ": " + key);
  return StringField(json, key, where);
}

// Returns the template of a tokenizer_config.json: a text, or a list of named ones of which the one
// named "default" is meant.
absl::StatusOr<std::string> TemplateOf(const nlohmann::json& json, const std::string& where) {
  constexpr char kKey[] = "chat_template";
  if (!HasField(json, kKey)) {
    return absl::NotFoundError(where + " has no chat_template: this is no chat model");
  }
  if (!json[kKey].is_array()) return StringField(json, kKey, where);
  for (const nlohmann::json& entry : json[kKey]) {
    if (entry.is_object() && HasField(entry, "name") && entry["name"] == "default") {
      return StringField(entry, "template", where + ": " + kKey);
    }
  }
  return absl::InvalidArgumentError(where + ": chat_template has no template named default");
}

}  // namespace

absl::StatusOr<ChatTemplate> ChatTemplate::Load(const std::string& dir) {
  const std::string config = dir + "/tokenizer_config.json";
  const std::string file = dir + "/chat_template.jinja";
  std::error_code error;
  const bool has_file = std::filesystem::exists(file, error);
  absl::StatusOr<nlohmann::json> json = ReadJsonObject(config);
  if (!json.ok()) {
    if (!absl::IsNotFound(json.status())) return json.status();
    if (!has_file) {
      return absl::NotFoundError(
          dir +
          " has neither chat_template.jinja nor tokenizer_config.json: this is no chat model");
    }
    json = nlohmann::json::object();
  }
  CRUMB_ASSIGN_OR_RETURN(const std::string begin, SpecialToken(*json, "bos_token", config));
  absl::StatusOr<std::string> text =
      has_file ? ReadFile(file, kTemplateBytesMax) : TemplateOf(*json, config);
  CRUMB_RETURN_IF_ERROR(text.status());
  absl::StatusOr<ChatTemplate> known = Recognise(*text, begin);
  if (known.ok()) return known;
  return absl::Status(known.status().code(), absl::StrCat(has_file ? file : config, ": ",
                                                          std::string(known.status().message())));
}

absl::StatusOr<ChatTemplate> ChatTemplate::Recognise(std::string_view jinja,
                                                     const std::string& begin) {
  ChatTemplate chat;
  const bool writes_begin = Has(jinja, "bos_token");
  if (Has(jinja, kTurnBegin) && Has(jinja, kTurnEnd) && !Has(jinja, "<|im_sep|>")) {
    chat.format_ = ChatFormat::kChatMl;
    chat.default_system_ = LiteralSystem(jinja);
    chat.drops_reasoning_ = Has(jinja, kReasoningEnd);
  } else if (Has(jinja, kHeaderBegin) && Has(jinja, kHeaderEnd) && Has(jinja, kLlamaTurnEnd)) {
    if (Has(jinja, kDatedBlock)) {
      return absl::InvalidArgumentError(
          "the chat template writes a date into every prompt, which is not supported; give the "
          "whole prompt as text");
    }
    chat.format_ = ChatFormat::kLlama3;
  } else {
    return absl::InvalidArgumentError(
        "the chat template is neither ChatML (<|im_start|>) nor that of Llama 3 "
        "(<|start_header_id|>); give the whole prompt as text");
  }
  if (writes_begin) chat.begin_ = begin;
  return chat;
}

std::string_view ChatTemplate::end_of_turn() const {
  return format_ == ChatFormat::kChatMl ? kTurnEnd : kLlamaTurnEnd;
}

void ChatTemplate::AppendMessage(const ChatMessage& message, std::string* text) const {
  std::string_view content = message.content;
  if (format_ == ChatFormat::kLlama3) {
    text->append(kHeaderBegin).append(message.role).append(kHeaderEnd).append("\n\n");
    text->append(Trimmed(content)).append(kLlamaTurnEnd);
    return;
  }
  if (drops_reasoning_ && message.role == "assistant") content = WithoutReasoning(content);
  text->append(kTurnBegin).append(message.role).append("\n");
  text->append(content).append(kTurnEnd).append("\n");
}

absl::StatusOr<std::string> ChatTemplate::Render(std::span<const ChatMessage> messages) const {
  if (messages.empty() || messages.back().role != "user") {
    return absl::InvalidArgumentError("the last message of a conversation must be the user's");
  }
  std::string text = begin_;
  if (messages.front().role != "system" && !default_system_.empty()) {
    AppendMessage({"system", default_system_}, &text);
  }
  for (size_t i = 0; i < messages.size(); ++i) {
    const std::string& role = messages[i].role;
    if (role != "user" && role != "assistant" && (role != "system" || i != 0)) {
      return absl::InvalidArgumentError(
          absl::StrCat("message ", i, " has the role \"", role,
                       "\"; a conversation has user and assistant messages after at most one "
                       "system message"));
    }
    AppendMessage(messages[i], &text);
  }
  if (format_ == ChatFormat::kLlama3) {
    text.append(kHeaderBegin).append("assistant").append(kHeaderEnd).append("\n\n");
  } else {
    text.append(kTurnBegin).append("assistant\n");
  }
  return text;
}

absl::StatusOr<std::vector<ChatMessage>> ParseChatMessages(std::string_view json,
                                                           const std::string& where) {
  const nlohmann::json list = nlohmann::json::parse(json, nullptr, /*allow_exceptions=*/false);
  if (!list.is_array()) {
    return absl::InvalidArgumentError(where + ": the conversation is not a JSON array");
  }
  std::vector<ChatMessage> messages;
  for (const nlohmann::json& entry : list) {
    if (!entry.is_object()) {
      return absl::InvalidArgumentError(where + ": a message is not an object");
    }
    ChatMessage& message = messages.emplace_back();
    CRUMB_ASSIGN_OR_RETURN(message.role, StringField(entry, "role", where));
    CRUMB_ASSIGN_OR_RETURN(message.content, StringField(entry, "content", where));
  }
  return messages;
}

}  // namespace crumb::models
