// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tools/commands.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

#include "common/status_macros.h"
#include "crumb/client.h"
#include "fmt/format.h"
#include "tools/crumbd_views.h"
#include "tools/fragment_file.h"
#include "tools/text_table.h"

namespace crumb::tools {
namespace {

using nlohmann::json;

// Keys of one request at most (proto/crumb/v1/cache_service.proto).
constexpr size_t kKeysMax = 16384;

// The connection and the timeout of a command.
struct Context {
  client::Client& crumbd;
  Duration timeout;
};

absl::StatusOr<std::vector<PageKey>> ParseKeys(const std::vector<std::string>& keys) {
  if (keys.size() > kKeysMax) {
    return absl::InvalidArgumentError(
        fmt::format("{} keys are more than a request may have, {}", keys.size(), kKeysMax));
  }
  std::vector<PageKey> parsed;
  for (const std::string& hex : keys) {
    CRUMB_ASSIGN_OR_RETURN(const PageKey key, PageKey::FromHex(hex));
    parsed.push_back(key);
  }
  return parsed;
}

absl::StatusOr<std::vector<int32_t>> ReadTokens(const std::string& path) {
  std::ifstream in(path);
  std::stringstream text;
  if (!(text << in.rdbuf())) {
    return absl::InvalidArgumentError(path + " cannot be read or is empty");
  }
  std::string numbers = text.str();
  std::replace(numbers.begin(), numbers.end(), ',', ' ');
  std::istringstream words(numbers);
  std::vector<int32_t> tokens;
  int32_t token = 0;
  while (words >> token) tokens.push_back(token);
  if (!words.eof()) {
    return absl::InvalidArgumentError(
        fmt::format("{}: what follows token {} is no token id", path, tokens.size()));
  }
  return tokens;
}

absl::StatusOr<std::vector<PageKey>> KeysOf(const LookupCommand& command,
                                            const KeyspaceId& keyspace) {
  if (!command.keys.empty()) return ParseKeys(command.keys);
  CRUMB_ASSIGN_OR_RETURN(const std::vector<int32_t> tokens, ReadTokens(command.tokens_file));
  std::vector<PageKey> keys = PageKeysOf(keyspace, tokens);
  if (!keys.empty() && keys.size() <= kKeysMax) return keys;
  return absl::InvalidArgumentError(
      fmt::format("{} holds {} tokens; a page has {}, a lookup at most {} pages",
                  command.tokens_file, tokens.size(), kPageTokens, kKeysMax));
}

absl::StatusOr<CommandResult> Run(const StatusCommand&, const Context& context) {
  CRUMB_ASSIGN_OR_RETURN(const client::CacheStats stats, context.crumbd.Stats());
  return CommandResult::Done(StatusText(stats), StatusJson(stats));
}

absl::StatusOr<CommandResult> Run(const StatsCommand&, const Context& context) {
  CRUMB_ASSIGN_OR_RETURN(const client::CacheStats stats, context.crumbd.Stats());
  return CommandResult::Done(StatsText(stats), StatsJson(stats));
}

absl::StatusOr<CommandResult> Run(const LookupCommand& command, const Context& context) {
  CRUMB_ASSIGN_OR_RETURN(const KeyspaceId keyspace, KeyspaceId::FromHex(command.keyspace));
  CRUMB_ASSIGN_OR_RETURN(const std::vector<PageKey> keys, KeysOf(command, keyspace));
  CRUMB_ASSIGN_OR_RETURN(const client::LookupResult result, context.crumbd.Lookup(keyspace, keys));
  TextTable table({"page", "key", "found in", "node"});
  json rows = json::array();
  for (size_t i = 0; i < keys.size(); ++i) {
    const std::string where(i < result.page_tiers.size() ? client::TierName(result.page_tiers[i])
                                                         : std::string_view("miss"));
    const std::string node = i < result.page_nodes.size() ? result.page_nodes[i] : "";
    table.AddRow({fmt::format("{}", i), keys[i].ToHex(), where, node});
    rows.push_back({{"page", i}, {"key", keys[i].ToHex()}, {"tier", where}, {"node", node}});
  }
  const std::string reason(client::MissReasonName(result.miss_reason));
  return CommandResult::Done(
      table.ToString() + fmt::format("\n{} of {} pages hit; first miss: {}\n", result.hit_pages,
                                     keys.size(), reason),
      {{"hit_pages", result.hit_pages},
       {"pages", keys.size()},
       {"miss_reason", reason},
       {"rows", std::move(rows)}});
}

absl::StatusOr<CommandResult> Run(const PrefetchCommand& command, const Context& context) {
  CRUMB_ASSIGN_OR_RETURN(const KeyspaceId keyspace, KeyspaceId::FromHex(command.pages.keyspace));
  CRUMB_ASSIGN_OR_RETURN(const std::vector<PageKey> keys, KeysOf(command.pages, keyspace));
  CRUMB_ASSIGN_OR_RETURN(const uint32_t pages, context.crumbd.Prefetch(keyspace, keys));
  return CommandResult::Done(
      fmt::format("{} of {} pages are not in host memory and are brought there if they are found\n",
                  pages, keys.size()),
      {{"started_pages", pages}, {"pages", keys.size()}});
}

absl::StatusOr<std::vector<client::FragmentBytes>> GetPage(const GetCommand& command,
                                                           const Context& context) {
  CRUMB_ASSIGN_OR_RETURN(const KeyspaceId keyspace, KeyspaceId::FromHex(command.keyspace));
  CRUMB_ASSIGN_OR_RETURN(const PageKey key, PageKey::FromHex(command.key));
  std::vector<client::FragmentBytes> fragments;
  CRUMB_ASSIGN_OR_RETURN(const client::MissReason reason,
                         context.crumbd.Get(keyspace, {&key, 1}, context.timeout,
                                            [&fragments](client::FragmentBytes fragment) {
                                              fragments.push_back(std::move(fragment));
                                              return absl::OkStatus();
                                            }));
  if (!fragments.empty() && reason == client::MissReason::kNone) return fragments;
  return absl::NotFoundError(
      fmt::format("page {} is a miss: {}", command.key, client::MissReasonName(reason)));
}

absl::StatusOr<CommandResult> Run(const GetCommand& command, const Context& context) {
  CRUMB_ASSIGN_OR_RETURN(const auto fragments, GetPage(command, context));
  TextTable table({"file", "layers", "KV heads", "bytes"});
  json rows = json::array();
  for (size_t i = 0; i < fragments.size(); ++i) {
    const FragmentHeader& header = fragments[i].header;
    const std::string path = i == 0 ? command.out : fmt::format("{}.{}", command.out, i);
    CRUMB_RETURN_IF_ERROR(
        WriteFragmentFile(path, header, std::as_bytes(std::span(fragments[i].tiles))));
    const size_t bytes = FragmentBytes(header.range.tiles(), header.tile_bytes);
    const IndexRange layers = header.range.layers, heads = header.range.heads;
    table.AddRow({path, fmt::format("[{}, {})", layers.begin, layers.end),
                  fmt::format("[{}, {})", heads.begin, heads.end), fmt::format("{}", bytes)});
    rows.push_back({{"file", path},
                    {"layers", {layers.begin, layers.end}},
                    {"kv_heads", {heads.begin, heads.end}},
                    {"bytes", bytes}});
  }
  return CommandResult::Done(table.ToString(), {{"rows", std::move(rows)}});
}

const char* OutcomeName(client::CommitOutcome outcome) {
  switch (outcome) {
    case client::CommitOutcome::kStored:
      return "stored";
    case client::CommitOutcome::kDeduplicated:
      return "there already";
    case client::CommitOutcome::kRefused:
      return "refused";
    case client::CommitOutcome::kNoRoom:
      return "no room";
    case client::CommitOutcome::kUnknown:
      break;
  }
  return "no response";
}

bool IsVisible(client::CommitOutcome outcome) {
  return outcome == client::CommitOutcome::kStored ||
         outcome == client::CommitOutcome::kDeduplicated;
}

// Reads a fragment file and refuses a damaged one, because the damaged tile can be named here.
absl::StatusOr<client::FragmentBytes> LoadFragment(const std::string& path) {
  CRUMB_ASSIGN_OR_RETURN(const FragmentFile file, ReadFragmentFile(path));
  const absl::Status intact = VerifyTileSums(file.header, file.tiles);
  if (!intact.ok()) {
    return absl::Status(intact.code(), path + ": " + std::string(intact.message()));
  }
  client::FragmentBytes fragment;
  fragment.header = file.header;
  fragment.tiles.assign(reinterpret_cast<const char*>(file.tiles.data()), file.tiles.size());
  return fragment;
}

absl::StatusOr<CommandResult> Run(const PutCommand& command, const Context& context) {
  CRUMB_ASSIGN_OR_RETURN(const KeyspaceId keyspace, KeyspaceId::FromHex(command.keyspace));
  std::vector<client::FragmentBytes> fragments;
  for (const std::string& path : command.files) {
    CRUMB_ASSIGN_OR_RETURN(client::FragmentBytes fragment, LoadFragment(path));
    fragments.push_back(std::move(fragment));
  }
  CRUMB_ASSIGN_OR_RETURN(std::vector<client::CommitOutcome> outcomes,
                         context.crumbd.Put(keyspace, fragments, context.timeout));
  outcomes.resize(fragments.size(), client::CommitOutcome::kUnknown);
  TextTable table({"file", "outcome"});
  CommandResult result = CommandResult::Done("", {{"rows", json::array()}});
  for (size_t i = 0; i < outcomes.size(); ++i) {
    const char* outcome = OutcomeName(outcomes[i]);
    table.AddRow({command.files[i], outcome});
    result.json["rows"].push_back({{"file", command.files[i]}, {"outcome", outcome}});
    if (!IsVisible(outcomes[i]) && result.status.ok()) {
      result.status = absl::FailedPreconditionError(
          fmt::format("{} was not stored: {}", command.files[i], outcome));
    }
  }
  result.text = table.ToString();
  return result;
}

absl::StatusOr<CommandResult> Run(const DropCommand& command, const Context& context) {
  CRUMB_ASSIGN_OR_RETURN(const KeyspaceId keyspace, KeyspaceId::FromHex(command.keyspace));
  if (command.keys.empty()) {
    CRUMB_ASSIGN_OR_RETURN(const uint64_t generation, context.crumbd.DropKeyspace(keyspace));
    return CommandResult::Done(
        fmt::format("dropped the keyspace; its generation is now {}\n", generation),
        {{"generation", generation}});
  }
  CRUMB_ASSIGN_OR_RETURN(const std::vector<PageKey> keys, ParseKeys(command.keys));
  CRUMB_ASSIGN_OR_RETURN(const uint32_t deleted, context.crumbd.Delete(keyspace, keys));
  return CommandResult::Done(fmt::format("deleted {} of {} pages\n", deleted, keys.size()),
                             {{"deleted_pages", deleted}});
}

absl::StatusOr<CommandResult> Run(const FlushCommand&, const Context& context) {
  CRUMB_ASSIGN_OR_RETURN(const FlushReport report, context.crumbd.FlushPages(context.timeout));
  std::string text = fmt::format("{}{} pages are on the SSD tier\n",
                                 report.ToStatus().ok() ? "durable; " : "", report.durable_pages);
  if (report.unread_pages > 0) {
    text += fmt::format("{} pages are in memory only: the SSD tier admits pages that were read\n",
                        report.unread_pages);
  }
  // The counts of durable pages are shown, and the other pages are an error.
  return CommandResult{std::move(text),
                       {{"durable_pages", report.durable_pages},
                        {"tier_off_pages", report.tier_off_pages},
                        {"no_room_pages", report.no_room_pages},
                        {"lost_pages", report.lost_pages},
                        {"unread_pages", report.unread_pages}},
                       report.ToStatus()};
}

absl::StatusOr<CommandResult> Run(const PinCommand& command, const Context& context) {
  CRUMB_ASSIGN_OR_RETURN(const KeyspaceId keyspace, KeyspaceId::FromHex(command.keyspace));
  CRUMB_ASSIGN_OR_RETURN(const std::vector<PageKey> keys, ParseKeys(command.keys));
  const auto ttl = std::chrono::duration<double>(command.ttl_seconds);
  CRUMB_ASSIGN_OR_RETURN(
      const uint32_t pinned,
      context.crumbd.Pin(keyspace, keys, std::chrono::duration_cast<Duration>(ttl)));
  return CommandResult::Done(
      fmt::format("pinned {} of {} pages for {} s\n", pinned, keys.size(), command.ttl_seconds),
      {{"pinned_pages", pinned}});
}

absl::StatusOr<CommandResult> Run(const UnpinCommand& command, const Context& context) {
  CRUMB_ASSIGN_OR_RETURN(const KeyspaceId keyspace, KeyspaceId::FromHex(command.keyspace));
  CRUMB_ASSIGN_OR_RETURN(const std::vector<PageKey> keys, ParseKeys(command.keys));
  CRUMB_ASSIGN_OR_RETURN(const uint32_t unpinned, context.crumbd.Unpin(keyspace, keys));
  return CommandResult::Done(fmt::format("unpinned {} of {} pages\n", unpinned, keys.size()),
                             {{"unpinned_pages", unpinned}});
}

absl::StatusOr<CommandResult> Run(const KeyspaceStateCommand& command, const Context& context) {
  CRUMB_ASSIGN_OR_RETURN(const KeyspaceId keyspace, KeyspaceId::FromHex(command.keyspace));
  const client::KeyspaceState state =
      command.state == "active" ? client::KeyspaceState::kActive : client::KeyspaceState::kBf16;
  CRUMB_RETURN_IF_ERROR(context.crumbd.SetKeyspaceState(
      keyspace, state, fmt::format("crumb, uid {}", ::getuid()), command.reason));
  return CommandResult::Done(fmt::format("the keyspace is {}\n", command.state),
                             {{"state", command.state}});
}

absl::StatusOr<CommandResult> Run(const NodesCommand&, const Context& context) {
  CRUMB_ASSIGN_OR_RETURN(const client::NodeList list, context.crumbd.ListNodes());
  return CommandResult::Done(NodesText(list), NodesJson(list));
}

absl::StatusOr<CommandResult> Run(const WhereCommand& command, const Context& context) {
  KeyspaceId keyspace;
  if (!command.keyspace.empty()) {
    CRUMB_ASSIGN_OR_RETURN(keyspace, KeyspaceId::FromHex(command.keyspace));
  }
  CRUMB_ASSIGN_OR_RETURN(const PageKey key, PageKey::FromHex(command.key));
  CRUMB_ASSIGN_OR_RETURN(const client::PageLocation place,
                         context.crumbd.LocatePage(keyspace, key));
  return CommandResult::Done(PlaceText(place), PlaceJson(place));
}

// Returns the id of the only node whose id has this prefix.
absl::StatusOr<std::string> NodeNamed(const client::NodeList& list, const std::string& beginning) {
  std::vector<std::string> found;
  for (const auto& node : list.nodes) {
    if (node.id.starts_with(beginning)) found.push_back(node.id);
  }
  if (found.size() == 1) return found.front();
  return absl::NotFoundError(
      fmt::format("{} nodes have an id that begins with '{}'", found.size(), beginning));
}

absl::StatusOr<CommandResult> Run(const DrainCommand& command, const Context& context) {
  CRUMB_ASSIGN_OR_RETURN(client::NodeList list, context.crumbd.ListNodes());
  CRUMB_ASSIGN_OR_RETURN(const std::string id, NodeNamed(list, command.node));
  CRUMB_RETURN_IF_ERROR(context.crumbd.DrainNode(id));
  std::string state = "draining";
  while (command.wait && state != "drained") {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    CRUMB_ASSIGN_OR_RETURN(list, context.crumbd.ListNodes());
    const auto node = std::find_if(list.nodes.begin(), list.nodes.end(),
                                   [&](const auto& each) { return each.id == id; });
    if (node == list.nodes.end()) {
      return absl::AbortedError(fmt::format("node {} left the cluster before it was drained", id));
    }
    state = node->state;
  }
  return CommandResult::Done(fmt::format("node {} is {}\n", id, state),
                             {{"node", id}, {"state", state}});
}

// RunCommandLine runs the commands that need no crumbd.
template <typename Other>
absl::StatusOr<CommandResult> Run(const Other&, const Context&) {
  return absl::InternalError("this command needs no crumbd");
}

}  // namespace

CommandResult RunOnCrumbd(const Command& command, Duration timeout, client::Client& crumbd) {
  const Context context{crumbd, timeout};
  auto result = std::visit([&context](const auto& each) { return Run(each, context); }, command);
  return result.ok() ? *std::move(result) : CommandResult::Failed(result.status());
}

}  // namespace crumb::tools
