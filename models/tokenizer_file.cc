// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "models/tokenizer.h"

#include <array>
#include <optional>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "common/json_file.h"
#include "common/status_macros.h"
#include "models/pre_tokenizer.h"

namespace crumb::models {

namespace {

// The largest token id: several times the largest published vocabulary.
constexpr int64_t kTokenIdMax = (int64_t{1} << 22) - 1;

absl::Status Unsupported(const std::string& where, const std::string& what,
                         const std::string& found, const std::string& supported) {
  return absl::InvalidArgumentError(
      absl::StrCat(where, ": ", what, " ", found, " is not supported, only ", supported));
}

// Returns the "type" of a component, or "null" if the component is null.
absl::StatusOr<std::string> TypeOf(const nlohmann::json& json, const std::string& key,
                                   const std::string& where) {
  if (!HasField(json, key)) return "null";
  CRUMB_ASSIGN_OR_RETURN(const nlohmann::json* component, ObjectField(json, key, where));
  return StringField(*component, "type", absl::StrCat(where, ": ", key));
}

// Byte-level files write every byte as one visible character: printable Latin-1 characters as
// themselves, the others as U+0100 and on, in order.
std::array<char32_t, 256> SpellingOfBytes() {
  std::array<char32_t, 256> spelling{};
  char32_t next = 0x100;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD);
    spelling[byte] = printable ? static_cast<char32_t>(byte) : next++;
  }
  return spelling;
}

// Inverts that mapping.
class ByteAlphabet {
 public:
  ByteAlphabet() {
    const std::array<char32_t, 256> spelling = SpellingOfBytes();
    for (int byte = 0; byte < 256; ++byte) bytes_[spelling[byte]] = static_cast<char>(byte);
  }

  // Returns nothing if a character represents no byte.
  std::optional<std::string> ToBytes(std::string_view spelled) const {
    std::string bytes;
    for (size_t at = 0; at < spelled.size();) {
      const Char c = CharAt(spelled, at);
      const auto it = bytes_.find(c.code_point);
      if (it == bytes_.end()) return std::nullopt;
      bytes.push_back(it->second);
      at += c.length;
    }
    return bytes;
  }

 private:
  absl::flat_hash_map<char32_t, char> bytes_;
};

absl::Status CheckByteLevel(const nlohmann::json& component, const std::string& where) {
  CRUMB_ASSIGN_OR_RETURN(const bool prefix, BoolField(component, "add_prefix_space", true, where));
  if (prefix) return Unsupported(where, "add_prefix_space", "true", "false");
  return absl::OkStatus();
}

// Reads the Split that precedes a ByteLevel without a pattern.
absl::StatusOr<SplitPattern> ReadSplit(const nlohmann::json& split, const std::string& where) {
  CRUMB_ASSIGN_OR_RETURN(const bool invert, BoolField(split, "invert", false, where));
  CRUMB_ASSIGN_OR_RETURN(const std::string behavior, StringField(split, "behavior", where));
  if (invert || behavior != "Isolated") {
    return Unsupported(where, "Split with behavior",
                       absl::StrCat("\"", behavior, "\"", invert ? " and invert" : ""),
                       "\"Isolated\" without invert");
  }
  CRUMB_ASSIGN_OR_RETURN(const nlohmann::json* pattern, ObjectField(split, "pattern", where));
  CRUMB_ASSIGN_OR_RETURN(const std::string regex, StringField(*pattern, "Regex", where));
  const std::optional<SplitPattern> known = PatternOf(regex);
  if (!known.has_value()) {
    return Unsupported(where, "Split pattern", regex,
                       "those of GPT-2, of Qwen2 and Qwen3, and of Llama 3");
  }
  return *known;
}

// Reads the Digits that precedes a ByteLevel, which has GPT-2's pattern if `regex` is true.
absl::StatusOr<SplitPattern> ReadDigits(const nlohmann::json& digits, bool regex,
                                        const std::string& where) {
  CRUMB_ASSIGN_OR_RETURN(const bool single, BoolField(digits, "individual_digits", false, where));
  if (!single) return Unsupported(where, "Digits with individual_digits", "false", "true");
  if (!regex) return Unsupported(where, "ByteLevel with use_regex", "false", "true after Digits");
  return SplitPattern::kDigitsGpt2;
}

absl::StatusOr<SplitPattern> ReadPreTokenizer(const nlohmann::json& json, const std::string& file) {
  const std::string where = file + ": pre_tokenizer";
  constexpr char kSupported[] = "ByteLevel, or a Sequence of Split or Digits and ByteLevel";
  CRUMB_ASSIGN_OR_RETURN(const std::string type, TypeOf(json, "pre_tokenizer", file));
  if (type == "ByteLevel") {
    const nlohmann::json& component = json["pre_tokenizer"];
    CRUMB_RETURN_IF_ERROR(CheckByteLevel(component, where));
    CRUMB_ASSIGN_OR_RETURN(const bool regex, BoolField(component, "use_regex", true, where));
    return regex ? SplitPattern::kGpt2 : SplitPattern::kNone;
  }
  if (type != "Sequence") return Unsupported(where, "type", "\"" + type + "\"", kSupported);
  CRUMB_ASSIGN_OR_RETURN(const nlohmann::json* steps,
                         ArrayField(json["pre_tokenizer"], "pretokenizers", where));
  std::vector<std::string> types;
  for (const nlohmann::json& step : *steps) {
    if (!step.is_object()) return absl::InvalidArgumentError(where + ": a step is not an object");
    CRUMB_ASSIGN_OR_RETURN(types.emplace_back(), StringField(step, "type", where));
  }
  if (types.size() != 2 || (types[0] != "Split" && types[0] != "Digits") ||
      types[1] != "ByteLevel") {
    return Unsupported(where, "Sequence of", nlohmann::json(types).dump(), kSupported);
  }
  const nlohmann::json& byte_level = (*steps)[1];
  CRUMB_RETURN_IF_ERROR(CheckByteLevel(byte_level, where));
  CRUMB_ASSIGN_OR_RETURN(const bool regex, BoolField(byte_level, "use_regex", true, where));
  if (types[0] == "Digits") return ReadDigits((*steps)[0], regex, where);
  if (regex) return Unsupported(where, "ByteLevel with use_regex", "true", "false after a Split");
  return ReadSplit((*steps)[0], where);
}

// Appends the ids that the special token `name` of a TemplateProcessing stands for.
absl::Status AddTemplateIds(const nlohmann::json& processor, const std::string& name,
                            const std::string& where, std::vector<int32_t>* ids) {
  CRUMB_ASSIGN_OR_RETURN(const nlohmann::json* specials,
                         ObjectField(processor, "special_tokens", where));
  CRUMB_ASSIGN_OR_RETURN(const nlohmann::json* special, ObjectField(*specials, name, where));
  CRUMB_ASSIGN_OR_RETURN(const nlohmann::json* list, ArrayField(*special, "ids", where));
  for (const nlohmann::json& id : *list) {
    const nlohmann::json holder = {{"ids", id}};
    CRUMB_ASSIGN_OR_RETURN(const int64_t value, IntField(holder, "ids", 0, kTokenIdMax, where));
    ids->push_back(static_cast<int32_t>(value));
  }
  return absl::OkStatus();
}

// Reads the tokens that a TemplateProcessing puts before a single text. It must put none behind it:
// a prompt is to be continued.
absl::Status ReadTemplate(const nlohmann::json& processor, const std::string& where,
                          std::vector<int32_t>* begin) {
  CRUMB_ASSIGN_OR_RETURN(const nlohmann::json* parts, ArrayField(processor, "single", where));
  bool text_seen = false;
  for (const nlohmann::json& part : *parts) {
    const bool is_text = part.is_object() && HasField(part, "Sequence");
    const bool is_special = part.is_object() && HasField(part, "SpecialToken");
    if (text_seen || is_text == is_special) {
      return Unsupported(where, "template", parts->dump(), "special tokens before one Sequence");
    }
    if (is_text) {
      text_seen = true;
      continue;
    }
    CRUMB_ASSIGN_OR_RETURN(const nlohmann::json* token, ObjectField(part, "SpecialToken", where));
    CRUMB_ASSIGN_OR_RETURN(const std::string name, StringField(*token, "id", where));
    CRUMB_RETURN_IF_ERROR(AddTemplateIds(processor, name, where, begin));
  }
  if (text_seen) return absl::OkStatus();
  return Unsupported(where, "template", parts->dump(), "special tokens before one Sequence");
}

absl::Status ReadPostProcessor(const nlohmann::json& json, const std::string& file,
                               std::vector<int32_t>* begin) {
  const std::string where = file + ": post_processor";
  constexpr char kSupported[] =
      "null, ByteLevel, TemplateProcessing, and a Sequence of ByteLevel and TemplateProcessing";
  CRUMB_ASSIGN_OR_RETURN(const std::string type, TypeOf(json, "post_processor", file));
  if (type == "null" || type == "ByteLevel") return absl::OkStatus();
  if (type == "TemplateProcessing") return ReadTemplate(json["post_processor"], where, begin);
  if (type != "Sequence") return Unsupported(where, "type", "\"" + type + "\"", kSupported);
  CRUMB_ASSIGN_OR_RETURN(const nlohmann::json* steps,
                         ArrayField(json["post_processor"], "processors", where));
  int templates = 0;
  for (const nlohmann::json& step : *steps) {
    if (!step.is_object()) return absl::InvalidArgumentError(where + ": a step is not an object");
    CRUMB_ASSIGN_OR_RETURN(const std::string step_type, StringField(step, "type", where));
    if (step_type == "ByteLevel") continue;
    if (step_type != "TemplateProcessing" || ++templates > 1) {
      return Unsupported(where, "Sequence with", "\"" + step_type + "\"", kSupported);
    }
    CRUMB_RETURN_IF_ERROR(ReadTemplate(step, where, begin));
  }
  return absl::OkStatus();
}

absl::Status CheckModel(const nlohmann::json& model, const std::string& where) {
  CRUMB_ASSIGN_OR_RETURN(const std::string type, StringField(model, "type", where));
  if (type != "BPE") return Unsupported(where, "type", "\"" + type + "\"", "\"BPE\"");
  if (HasField(model, "dropout")) return Unsupported(where, "dropout", "", "null");
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (HasField(model, key) && model[key] != "") {
      return Unsupported(where, key, model[key].dump(), "null");
    }
  }
  CRUMB_ASSIGN_OR_RETURN(const bool fallback, BoolField(model, "byte_fallback", false, where));
  if (fallback) return Unsupported(where, "byte_fallback", "true", "false");
  return absl::OkStatus();
}

absl::Status SetBytes(const std::string& where, int64_t id, const std::string& bytes,
                      TokenizerDefinition* definition) {
  if (static_cast<size_t>(id) >= definition->bytes_of.size()) {
    definition->bytes_of.resize(static_cast<size_t>(id) + 1);
  }
  std::string& held = definition->bytes_of[static_cast<size_t>(id)];
  if (!held.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(where, ": two tokens have id ", id));
  }
  held = bytes;
  return absl::OkStatus();
}

absl::Status ReadVocabulary(const nlohmann::json& model, const std::string& where,
                            const ByteAlphabet& alphabet, TokenizerDefinition* definition) {
  CRUMB_ASSIGN_OR_RETURN(const nlohmann::json* vocab, ObjectField(model, "vocab", where));
  definition->tokens.reserve(vocab->size());
  for (const auto& [spelled, value] : vocab->items()) {
    CRUMB_ASSIGN_OR_RETURN(const int64_t id, IntField(*vocab, spelled, 0, kTokenIdMax, where));
    const std::optional<std::string> bytes = alphabet.ToBytes(spelled);
    // A token whose characters represent no bytes is an added one; its bytes are its text.
    CRUMB_RETURN_IF_ERROR(SetBytes(where, id, bytes.value_or(spelled), definition));
    if (bytes.has_value()) definition->tokens[*bytes] = static_cast<int32_t>(id);
  }
  return absl::OkStatus();
}

absl::Status ReadUnknown(const nlohmann::json& model, const std::string& where,
                         TokenizerDefinition* definition) {
  if (!HasField(model, "unk_token")) return absl::OkStatus();
  CRUMB_ASSIGN_OR_RETURN(const std::string text, StringField(model, "unk_token", where));
  CRUMB_ASSIGN_OR_RETURN(const nlohmann::json* vocab, ObjectField(model, "vocab", where));
  CRUMB_ASSIGN_OR_RETURN(const int64_t id, IntField(*vocab, text, 0, kTokenIdMax, where));
  CRUMB_ASSIGN_OR_RETURN(const bool fuse, BoolField(model, "fuse_unk", false, where));
  if (fuse) return Unsupported(where, "fuse_unk with an unk_token", "true", "false");
  definition->unknown = static_cast<int32_t>(id);
  return absl::OkStatus();
}

absl::Status ReadMerges(const nlohmann::json& model, const std::string& where,
                        const ByteAlphabet& alphabet, TokenizerDefinition* definition) {
  CRUMB_ASSIGN_OR_RETURN(const nlohmann::json* merges, ArrayField(model, "merges", where));
  definition->merges.reserve(merges->size());
  for (const nlohmann::json& merge : *merges) {
    std::string left;
    std::string right;
    if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
      left = merge[0].get<std::string>();
      right = merge[1].get<std::string>();
    } else if (merge.is_string()) {  // the older form: both tokens, separated by a blank
      const std::string both = merge.get<std::string>();
      const size_t blank = both.find(' ');
      left = both.substr(0, blank);
      if (blank != std::string::npos) right = both.substr(blank + 1);
    }
    std::optional<std::string> left_bytes = alphabet.ToBytes(left);
    std::optional<std::string> right_bytes = alphabet.ToBytes(right);
    if (left.empty() || right.empty() || !left_bytes.has_value() || !right_bytes.has_value()) {
      return absl::InvalidArgumentError(absl::StrCat(where, ": merge ", definition->merges.size(),
                                                     ", ", merge.dump(),
                                                     ", is no pair of byte-level tokens"));
    }
    definition->merges.emplace_back(*std::move(left_bytes), *std::move(right_bytes));
  }
  return absl::OkStatus();
}

absl::Status ReadAddedToken(const nlohmann::json& token, const std::string& where,
                            TokenizerDefinition* definition) {
  if (!token.is_object())
    return absl::InvalidArgumentError(where + ": an element is not an object");
  AddedToken added;
  CRUMB_ASSIGN_OR_RETURN(added.text, StringField(token, "content", where));
  CRUMB_ASSIGN_OR_RETURN(const int64_t id, IntField(token, "id", 0, kTokenIdMax, where));
  added.id = static_cast<int32_t>(id);
  CRUMB_ASSIGN_OR_RETURN(added.normalized, BoolField(token, "normalized", false, where));
  for (const char* key : {"single_word", "lstrip", "rstrip"}) {
    CRUMB_ASSIGN_OR_RETURN(const bool set, BoolField(token, key, false, where));
    if (set)
      return Unsupported(where, absl::StrCat(key, " of token ", added.text), "true", "false");
  }
  if (added.text.empty()) return absl::InvalidArgumentError(where + ": a token has no text");
  // Files usually repeat added tokens in the vocabulary, or give them ids above it.
  const size_t index = static_cast<size_t>(id);
  const bool repeated =
      index < definition->bytes_of.size() && definition->bytes_of[index] == added.text;
  if (!repeated) CRUMB_RETURN_IF_ERROR(SetBytes(where, id, added.text, definition));
  definition->added.push_back(std::move(added));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<TokenizerDefinition> ReadTokenizerFile(const std::string& path) {
  CRUMB_ASSIGN_OR_RETURN(const nlohmann::json json, ReadJsonObject(path));
  TokenizerDefinition definition;
  CRUMB_ASSIGN_OR_RETURN(const std::string normalizer, TypeOf(json, "normalizer", path));
  if (normalizer != "null" && normalizer != "NFC") {
    return Unsupported(path, "normalizer", "\"" + normalizer + "\"", "null and \"NFC\"");
  }
  definition.nfc = normalizer == "NFC";
  CRUMB_ASSIGN_OR_RETURN(definition.pattern, ReadPreTokenizer(json, path));
  CRUMB_RETURN_IF_ERROR(ReadPostProcessor(json, path, &definition.begin));
  CRUMB_ASSIGN_OR_RETURN(const std::string decoder, TypeOf(json, "decoder", path));
  if (decoder != "ByteLevel") {
    return Unsupported(path, "decoder", "\"" + decoder + "\"", "\"ByteLevel\"");
  }
  CRUMB_ASSIGN_OR_RETURN(const nlohmann::json* model, ObjectField(json, "model", path));
  const std::string where = path + ": model";
  const ByteAlphabet alphabet;
  CRUMB_RETURN_IF_ERROR(CheckModel(*model, where));
  CRUMB_ASSIGN_OR_RETURN(definition.whole_first, BoolField(*model, "ignore_merges", false, where));
  CRUMB_RETURN_IF_ERROR(ReadVocabulary(*model, where, alphabet, &definition));
  CRUMB_RETURN_IF_ERROR(ReadUnknown(*model, where, &definition));
  CRUMB_RETURN_IF_ERROR(ReadMerges(*model, where, alphabet, &definition));
  if (HasField(json, "added_tokens")) {
    CRUMB_ASSIGN_OR_RETURN(const nlohmann::json* added, ArrayField(json, "added_tokens", path));
    for (const nlohmann::json& token : *added) {
      CRUMB_RETURN_IF_ERROR(ReadAddedToken(token, path + ": added_tokens", &definition));
    }
  }
  return definition;
}

}  // namespace crumb::models
