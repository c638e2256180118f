// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "models/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <random>

#include "models/pre_tokenizer.h"
#include "tests/models/model_folder.h"

namespace crumb::models {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Change = std::function<void(nlohmann::json&)>;

// Loads tiny-lm's tokenizer after `change`.
absl::StatusOr<std::unique_ptr<Tokenizer>> LoadChanged(const Change& change) {
  static const nlohmann::json* original =
      new nlohmann::json(ReadJson(std::string(kTinyLm) + "/tokenizer.json"));
  ModelFolder folder;
  nlohmann::json json = *original;
  change(json);
  folder.Write("tokenizer.json", json);
  return Tokenizer::Load(folder.path());
}

nlohmann::json Fixture() { return ReadJson("tests/models/fixtures/tokenizer.json"); }

nlohmann::json Added(int id, const std::string& content, bool normalized) {
  return {{"id", id},         {"content", content},   {"normalized", normalized},
          {"special", false}, {"single_word", false}, {"lstrip", false},
          {"rstrip", false}};
}

// Changes tiny-lm's file into the form of Qwen3 models.
void MakeQwen(nlohmann::json& json) {
  json["normalizer"] = {{"type", "NFC"}};
  json["pre_tokenizer"] = {{"type", "Sequence"},
                           {"pretokenizers",
                            {{{"type", "Split"},
                              {"pattern", {{"Regex", Fixture()["qwen_pattern"]}}},
                              {"behavior", "Isolated"},
                              {"invert", false}},
                             {{"type", "ByteLevel"},
                              {"add_prefix_space", false},
                              {"trim_offsets", false},
                              {"use_regex", false}}}}};
  json["added_tokens"].push_back(Added(4096, "<think>", true));
}

TEST(TokenizerTest, IdsAreThePublishedImplementations) {
  const auto gpt2 = Tokenizer::Load(kTinyLm);
  ASSERT_TRUE(gpt2.ok()) << gpt2.status();
  const auto qwen = LoadChanged(MakeQwen);
  ASSERT_TRUE(qwen.ok()) << qwen.status();
  const nlohmann::json rows = Fixture()["rows"];
  ASSERT_GT(rows.size(), 200u);
  for (const nlohmann::json& row : rows) {
    const std::string text = row["text"];
    EXPECT_EQ((*gpt2)->Encode(text), row["gpt2"].get<std::vector<int32_t>>()) << row["text"];
    EXPECT_EQ((*qwen)->Encode(text), row["qwen"].get<std::vector<int32_t>>()) << row["text"];
  }
}

// Loads one of the forms that fixtures/make_family_fixtures.py describes.
absl::StatusOr<std::unique_ptr<Tokenizer>> LoadForm(const nlohmann::json& form) {
  return LoadChanged([&](nlohmann::json& json) {
    for (const auto& [key, value] : form.items()) {
      if (key == "without") {
        for (const std::string text : value) json["model"]["vocab"].erase(text);
      } else if (key == "model") {
        json["model"].update(value);
      } else {
        json[key] = value;
      }
    }
  });
}

TEST(TokenizerTest, IdsOfFamiliesAreThePublishedImplementations) {
  const nlohmann::json fixture = ReadJson("tests/models/fixtures/tokenizers.json");
  ASSERT_GE(fixture["files"].size(), 4u);
  ASSERT_GT(fixture["files"]["lacking"]["without"].size(), 20u);
  for (const auto& [name, form] : fixture["files"].items()) {
    SCOPED_TRACE(name);
    const auto tokenizer = LoadForm(form);
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    for (const nlohmann::json& row : fixture["rows"]) {
      EXPECT_EQ((*tokenizer)->Encode(row["text"].get<std::string>()),
                row[name].get<std::vector<int32_t>>())
          << row["text"];
    }
    const auto begin = fixture["llama3_begin"].get<std::vector<int32_t>>();
    EXPECT_EQ((*tokenizer)->begin(), name == "llama3" ? begin : std::vector<int32_t>());
  }
}

TEST(TokenizerTest, AnyBytesComeBack) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  const auto gpt2 = Tokenizer::Load(kTinyLm);
  const auto qwen = LoadChanged(MakeQwen);
  ASSERT_TRUE(gpt2.ok() && qwen.ok());
  for (int round = 0; round < 2000; ++round) {
    std::string text;
    const bool ascii = round % 2 == 0;
    for (int i = random() % 60; i > 0; --i) {
      text += static_cast<char>(ascii ? random() % 128 : random());
    }
    ASSERT_EQ((*gpt2)->Decode((*gpt2)->Encode(text)), text);
    ASSERT_EQ((*qwen)->Decode((*qwen)->Encode(text)), ToNfc(text));
  }
}

TEST(TokenizerTest, OlderMergesWithABlankBetween) {
  const auto pairs = Tokenizer::Load(kTinyLm);
  const auto strings = LoadChanged([](nlohmann::json& json) {
    for (nlohmann::json& merge : json["model"]["merges"]) {
      merge = merge[0].get<std::string>() + " " + merge[1].get<std::string>();
    }
  });
  ASSERT_TRUE(strings.ok()) << strings.status();
  const std::string text = ReadText("LICENSE");
  EXPECT_EQ((*strings)->Encode(text), (*pairs)->Encode(text));
}

TEST(TokenizerTest, TheLongestAddedTokenWins) {
  const auto tokenizer = LoadChanged([](nlohmann::json& json) {
    json["added_tokens"].push_back(Added(4096, "<a>", false));
    json["added_tokens"].push_back(Added(4097, "<a><b>", false));
  });
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_THAT((*tokenizer)->Encode("<a><b><a><|endoftext|>"), ElementsAre(4097, 4096, 0));
  EXPECT_EQ((*tokenizer)->Decode(std::vector<int32_t>{4097, 4096, 0}), "<a><b><a><|endoftext|>");
  EXPECT_EQ((*tokenizer)->size(), 4098);
}

TEST(TokenizerTest, UnknownIdsDecodeToNothing) {
  const auto tokenizer = Tokenizer::Load(kTinyLm);
  ASSERT_TRUE(tokenizer.ok());
  EXPECT_EQ((*tokenizer)->Decode(std::vector<int32_t>{-1, 1, 1 << 30, 4096}), "!");
}

const nlohmann::json kText = {{"Sequence", {{"id", "A"}, {"type_id", 0}}}};
const nlohmann::json kSpecial = {{"SpecialToken", {{"id", "<|endoftext|>"}, {"type_id", 0}}}};

// Sets a post-processor of these parts.
Change Template(const std::vector<nlohmann::json>& parts) {
  return [=](nlohmann::json& json) {
    json["post_processor"] = {
        {"type", "TemplateProcessing"},
        {"single", parts},
        {"special_tokens", {{"<|endoftext|>", {{"ids", {0}}}}, {"bad", {{"ids", {-1}}}}}}};
  };
}

// Sets a pre-tokenizer of `digits` and ByteLevel.
Change Digits(const nlohmann::json& digits, bool regex) {
  return [=](nlohmann::json& json) {
    json["pre_tokenizer"] = {
        {"type", "Sequence"},
        {"pretokenizers",
         {digits, {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", regex}}}}};
  };
}

TEST(TokenizerTest, NamesWhatItDoesNotSupport) {
  struct Case {
    const char* name;
    Change change;
    const char* in_message;
  };
  const auto model = [](const char* key, nlohmann::json value) -> Change {
    return [=](nlohmann::json& j) { j["model"][key] = value; };
  };
  const auto top = [](const char* key, nlohmann::json value) -> Change {
    return [=](nlohmann::json& j) { j[key] = value; };
  };
  const auto added = [](const char* key, nlohmann::json value) -> Change {
    return [=](nlohmann::json& j) { j["added_tokens"][0][key] = value; };
  };
  const Case cases[] = {
      {"model type", model("type", "Unigram"), "Unigram"},
      {"no model", [](auto& j) { j.erase("model"); }, "model"},
      {"dropout", model("dropout", 0.1), "dropout"},
      {"prefix", model("continuing_subword_prefix", "##"), "continuing_subword_prefix"},
      {"fallback", model("byte_fallback", true), "byte_fallback"},
      {"vocab", model("vocab", nlohmann::json::array()), "vocab"},
      {"id", [](auto& j) { j["model"]["vocab"]["!"] = -1; }, "!"},
      {"huge id", [](auto& j) { j["model"]["vocab"]["!"] = 2147483647; }, "!"},
      {"same id", [](auto& j) { j["model"]["vocab"]["!"] = 2; }, "two tokens have id 2"},
      {"unknown", model("unk_token", "<unk>"), "<unk>"},
      {"fused unknown",
       [](auto& j) {
         j["model"]["unk_token"] = "!";
         j["model"]["fuse_unk"] = true;
       },
       "fuse_unk"},
      {"merge", [](auto& j) { j["model"]["merges"][7] = "ab"; }, "merge 7"},
      {"merge of three",
       [](auto& j) {
         j["model"]["merges"][3] = {"a", "b", "c"};
       },
       "merge 3"},
      {"merge of numbers",
       [](auto& j) {
         j["model"]["merges"][3] = {1, 2};
       },
       "merge 3"},
      {"merge to nothing",
       [](auto& j) {
         j["model"]["merges"][2] = {"Q", "\""};
       },
       "merge 2"},
      {"normalizer", top("normalizer", {{"type", "Lowercase"}}), "Lowercase"},
      {"pre", top("pre_tokenizer", {{"type", "Metaspace"}}), "Metaspace"},
      {"no pre", top("pre_tokenizer", nullptr), "null"},
      {"post", top("post_processor", {{"type", "BertProcessing"}}), "BertProcessing"},
      {"post template", top("post_processor", {{"type", "TemplateProcessing"}}), "single"},
      {"post end", Template({kText, kSpecial}), "before one Sequence"},
      {"post without text", Template({kSpecial}), "before one Sequence"},
      {"post of two texts", Template({kText, kText}), "before one Sequence"},
      {"post nothing", Template({nullptr, kText}), "before one Sequence"},
      {"post unknown", Template({{{"SpecialToken", {{"id", "<s>"}}}}, kText}), "<s>"},
      {"post ids", Template({{{"SpecialToken", {{"id", "bad"}}}}, kText}), "ids"},
      {"post steps",
       top("post_processor", {{"type", "Sequence"}, {"processors", {{{"type", "Strip"}}}}}),
       "Strip"},
      {"digits", Digits({{"type", "Digits"}, {"individual_digits", false}}, true), "Digits"},
      {"digits alone", Digits({{"type", "Digits"}, {"individual_digits", true}}, false),
       "use_regex"},
      {"digits as text", Digits({{"type", "Digits"}, {"individual_digits", "yes"}}, true),
       "individual_digits"},
      {"decoder", top("decoder", {{"type", "WordPiece"}}), "WordPiece"},
      {"prefix space", [](auto& j) { j["pre_tokenizer"]["add_prefix_space"] = true; }, "prefix"},
      {"pattern",
       [](auto& j) {
         MakeQwen(j);
         j["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "\\w+";
       },
       "\\w+"},
      {"behavior",
       [](auto& j) {
         MakeQwen(j);
         j["pre_tokenizer"]["pretokenizers"][0]["behavior"] = "Removed";
       },
       "Removed"},
      {"sequence",
       [](auto& j) {
         MakeQwen(j);
         j["pre_tokenizer"]["pretokenizers"].erase(0);
       },
       "[\"ByteLevel\"]"},
      {"added tokens", top("added_tokens", 3), "added_tokens"},
      {"added strip", added("lstrip", true), "lstrip"},
      {"added empty", added("content", ""), "has no text"},
      {"added id", added("id", 5), "two tokens have id 5"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    const absl::Status status = LoadChanged(c.change).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("tokenizer.json"));
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.in_message));
  }
}

TEST(TokenizerTest, DamagedAndMissingFiles) {
  ModelFolder folder;
  EXPECT_EQ(Tokenizer::Load(folder.path()).status().code(), absl::StatusCode::kNotFound);
  const std::string whole = ReadText(std::string(kTinyLm) + "/tokenizer.json");
  for (const size_t size :
       {size_t{0}, size_t{1}, size_t{300}, whole.size() / 2, whole.size() - 3}) {
    folder.Write("tokenizer.json", whole.substr(0, size));
    EXPECT_EQ(Tokenizer::Load(folder.path()).status().code(), absl::StatusCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace crumb::models
