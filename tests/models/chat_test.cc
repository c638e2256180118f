// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "models/chat.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/models/model_folder.h"

namespace crumb::models {
namespace {

using ::testing::HasSubstr;

constexpr char kChatMl[] =
    "{{ '<|im_start|>' + role + '\\n' + content + '<|im_end|>\\n' }}{{ '<|im_start|>system\\nBe "
    "brief.<|im_end|>' }}";
constexpr char kLlama3[] =
    "{{ bos_token }}<|start_header_id|>{{ role }}<|end_header_id|>{{ content }}<|eot_id|>";

std::vector<ChatMessage> Messages(const nlohmann::json& list) {
  const auto messages = ParseChatMessages(list.dump(), "test");
  EXPECT_TRUE(messages.ok()) << messages.status();
  return messages.ok() ? *messages : std::vector<ChatMessage>();
}

TEST(ChatTest, TextsAreThoseOfTheTemplates) {
  const nlohmann::json rows = ReadJson("tests/models/fixtures/chat.json");
  ASSERT_GE(rows.size(), 16u);
  for (const nlohmann::json& row : rows) {
    SCOPED_TRACE(row["name"].get<std::string>() + " " + row["messages"].dump());
    const auto chat =
        ChatTemplate::Recognise(row["template"].get<std::string>(), "<|begin_of_text|>");
    ASSERT_TRUE(chat.ok()) << chat.status();
    const auto text = chat->Render(Messages(row["messages"]));
    ASSERT_TRUE(text.ok()) << text.status();
    EXPECT_EQ(*text, row["text"].get<std::string>());
  }
}

TEST(ChatTest, FindsTheTemplateInAModelsFolder) {
  const ModelFolder folder;
  EXPECT_EQ(ChatTemplate::Load(folder.path()).status().code(), absl::StatusCode::kNotFound);
  folder.Write("tokenizer_config.json", nlohmann::json{{"bos_token", "<s>"}});
  const absl::Status none = ChatTemplate::Load(folder.path()).status();
  EXPECT_EQ(none.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(none.message()), HasSubstr("no chat model"));

  folder.Write("tokenizer_config.json", nlohmann::json{{"chat_template", kChatMl}});
  const auto chat = ChatTemplate::Load(folder.path());
  ASSERT_TRUE(chat.ok()) << chat.status();
  EXPECT_EQ(chat->format(), ChatFormat::kChatMl);
  EXPECT_THAT(*chat->Render(std::vector<ChatMessage>{{"user", "a"}}), HasSubstr("Be brief."));
  EXPECT_EQ(chat->end_of_turn(), "<|im_end|>");

  folder.Write("tokenizer_config.json",
               nlohmann::json{{"bos_token", {{"content", "<begin>"}}},
                              {"chat_template",
                               {{{"name", "tool_use"}, {"template", "x"}},
                                {{"name", "default"}, {"template", kLlama3}}}}});
  const auto named = ChatTemplate::Load(folder.path());
  ASSERT_TRUE(named.ok()) << named.status();
  EXPECT_EQ(named->format(), ChatFormat::kLlama3);
  EXPECT_EQ(named->end_of_turn(), "<|eot_id|>");
  EXPECT_EQ(*named->Render(std::vector<ChatMessage>{{"user", "a"}}),
            "<begin><|start_header_id|>user<|end_header_id|>\n\na<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n");

  // Newer files keep the template apart.
  folder.Write("chat_template.jinja", std::string(kChatMl));
  const auto apart = ChatTemplate::Load(folder.path());
  ASSERT_TRUE(apart.ok()) << apart.status();
  EXPECT_EQ(apart->format(), ChatFormat::kChatMl);
}

TEST(ChatTest, RefusesTemplatesOfOtherForms) {
  const ModelFolder folder;
  for (const nlohmann::json& value :
       {nlohmann::json("[INST] {{ content }} [/INST]"), nlohmann::json(""), nlohmann::json(3),
        nlohmann::json::array(), nlohmann::json::object(),
        nlohmann::json::array({{{"name", "default"}}}), nlohmann::json::array({"text"}),
        nlohmann::json("<|im_start|>user<|im_sep|>x<|im_end|>"),
        nlohmann::json(std::string(kLlama3) + "Cutting Knowledge Date: December 2023")}) {
    SCOPED_TRACE(value.dump());
    folder.Write("tokenizer_config.json", nlohmann::json{{"chat_template", value}});
    const absl::Status status = ChatTemplate::Load(folder.path()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("tokenizer_config.json"));
  }
  folder.Write("tokenizer_config.json", std::string("{"));
  EXPECT_EQ(ChatTemplate::Load(folder.path()).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(ChatTest, RefusesConversationsThatCannotBeContinued) {
  const auto chat = ChatTemplate::Recognise(kChatMl, "");
  ASSERT_TRUE(chat.ok()) << chat.status();
  using Conversation = std::vector<ChatMessage>;
  for (const Conversation& messages : {Conversation{}, Conversation{{"assistant", "a"}},
                                       Conversation{{"user", "a"}, {"system", "b"}, {"user", "c"}},
                                       Conversation{{"tool", "a"}, {"user", "b"}}}) {
    EXPECT_EQ(chat->Render(messages).status().code(), absl::StatusCode::kInvalidArgument);
  }
}

TEST(ChatTest, RefusesFilesThatAreNoConversation) {
  for (const std::string text :
       {"", "{", "{}", "3", "[3]", "[{}]", "[{\"role\": \"user\"}]",
        "[{\"role\": 1, \"content\": \"a\"}]", "[{\"role\": \"user\", \"content\": null}]"}) {
    const absl::Status status = ParseChatMessages(text, "talk.json").status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(status.message()), HasSubstr("talk.json"));
  }
  EXPECT_EQ(ParseChatMessages("[]", "talk.json")->size(), 0u);
}

}  // namespace
}  // namespace crumb::models
