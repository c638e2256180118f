// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Files of a model's folder: config.json, tokenizer.json, tokenizer_config.json and conversations.
// The first byte says which.
#include <fstream>

#include "models/chat.h"
#include "models/config.h"
#include "models/rope.h"
#include "models/tokenizer.h"
#include "tests/common/temporary_folder.h"
#include "tests/fuzz/fuzz_target.h"

namespace crumb::fuzz {
namespace {

constexpr char kText[] = "It's 2024: na\xc3\xafve\t\xff 12345\n\n<|end|> ";

// Writes the text as the only file of a folder, which lives until the next input.
std::string FolderWith(const char* name, const std::string& text) {
  static const TemporaryFolder folder;
  for (const char* other : {"config.json", "tokenizer.json", "tokenizer_config.json"}) {
    ::unlink(folder.File(other).c_str());
  }
  std::ofstream(folder.File(name), std::ios::binary) << text;
  return folder.path();
}

void RunConfig(const std::string& text) {
  const auto config = models::LoadModelConfig(FolderWith("config.json", text));
  if (!config.ok()) return;
  Check(config->head_dim >= 2 && config->head_dim % 2 == 0);
  Check(config->q_heads % config->kv_heads == 0);
  constexpr int kHeadDimMax = 1024;  // larger ones take memory without another path
  if (config->head_dim > kHeadDimMax) return;
  const models::Rope rope(config->rope, config->head_dim);
  Check(rope.frequencies().size() == static_cast<size_t>(config->head_dim) / 2);
  Check(!models::DescribeRope(config->rope).empty());
}

void RunTokenizer(const std::string& text) {
  const auto tokenizer = models::Tokenizer::Load(FolderWith("tokenizer.json", text));
  if (!tokenizer.ok()) return;
  const std::vector<int32_t> ids = (*tokenizer)->Encode(kText);
  for (const int32_t id : ids) Check(id >= 0 && id < (*tokenizer)->size());
  (*tokenizer)->Decode(ids);
}

void RunChat(const std::string& text) {
  const auto chat = models::ChatTemplate::Load(FolderWith("tokenizer_config.json", text));
  if (!chat.ok()) return;
  const std::vector<models::ChatMessage> messages = {{"user", kText}};
  const auto rendered = chat->Render(messages);
  Check(rendered.ok() && rendered->find("2024") != std::string::npos);
}

void RunMessages(const std::string& text) {
  const auto messages = models::ParseChatMessages(text, "fuzz");
  const auto chat = models::ChatTemplate::Recognise("<|im_start|><|im_end|>", "");
  Check(chat.ok());
  if (messages.ok()) chat->Render(*messages).IgnoreError();
}

void Run(std::span<const std::byte> input) {
  if (input.empty()) return;
  const std::string text = TextOf(input.subspan(1));
  constexpr void (*kRuns[])(const std::string&) = {RunConfig, RunTokenizer, RunChat, RunMessages};
  kRuns[static_cast<unsigned>(input[0]) % std::size(kRuns)](text);
}

std::vector<std::string> Seeds() {
  const std::string sizes =
      R"("vocab_size":9,"hidden_size":8,"intermediate_size":8,"num_hidden_layers":1,)"
      R"("num_attention_heads":2,"num_key_value_heads":1,"head_dim":4,"rms_norm_eps":1e-5,)"
      R"("max_position_embeddings":64,"rope_theta":1e4,)";
  const std::string llama3 =
      R"("rope_scaling":{"rope_type":"llama3","factor":8,"low_freq_factor":1,)"
      R"("high_freq_factor":4,"original_max_position_embeddings":32}})";
  const std::string yarn = R"("rope_parameters":{"rope_type":"yarn","factor":4,"rope_theta":1e4,)"
                           R"("original_max_position_embeddings":32},"eos_token_id":[1,2]})";
  const std::string model =
      R"("decoder":{"type":"ByteLevel"},"model":{"type":"BPE","unk_token":"I",)"
      R"("vocab":{"I":0,"t":1,"2":2,"It":3},"merges":["I t"]},)"
      R"("added_tokens":[{"id":4,"content":"<|end|>","normalized":true}],)";
  const std::string digits =
      R"("pre_tokenizer":{"type":"Sequence","pretokenizers":[{"type":"Digits",)"
      R"("individual_digits":true},{"type":"ByteLevel","add_prefix_space":false}]},)";
  const std::string begin =
      R"("post_processor":{"type":"Sequence","processors":[{"type":"ByteLevel"},)"
      R"({"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"b"}},)"
      R"({"Sequence":{"id":"A"}}],"special_tokens":{"b":{"ids":[1]}}}]}})";
  const std::string zero("\0", 1);
  return {zero + R"({"architectures":["LlamaForCausalLM"],)" + sizes + llama3,
          zero + R"({"architectures":["Qwen2ForCausalLM"],)" + sizes + yarn,
          "\1{" + model + digits + begin,
          "\1{" + model +
              R"("normalizer":{"type":"NFC"},"pre_tokenizer":{"type":"ByteLevel",)"
              R"("add_prefix_space":false}})",
          "\2{\"bos_token\":{\"content\":\"<s>\"},\"chat_template\":\"{{ bos_token }}"
          "<|im_start|>system\\nBe brief.<|im_end|></think>\"}",
          "\2{\"chat_template\":[{\"name\":\"default\",\"template\":\"<|start_header_id|>"
          "<|end_header_id|><|eot_id|>\"}]}",
          "\3[{\"role\":\"system\",\"content\":\"a\"},{\"role\":\"user\",\"content\":\"b\"}]"};
}

}  // namespace

const FuzzTarget kModelTarget = {"model", Run, Seeds};

}  // namespace crumb::fuzz
