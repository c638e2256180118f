// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tools/commands.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <optional>
#include <ostream>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

#include "common/errno_status.h"
#include "common/status_macros.h"
#include "fmt/format.h"
#include "nlohmann/json.hpp"
#include "tools/fragment_view.h"
#include "tools/stats_view.h"
#include "tools/text_table.h"

namespace crumb::tools {
namespace {

using nlohmann::json;

// The gRPC socket in crumbd's socket folder.
constexpr const char* kSocketName = "crumbd.sock";
constexpr size_t kKeysMax = 16384;  // of one request: proto/crumb/v1/cache_service.proto

CommandResult Failed(absl::Status status) { return {"", json::object(), std::move(status)}; }

CommandResult Done(std::string text, json values) {
  return {std::move(text), std::move(values), absl::OkStatus()};
}

absl::StatusOr<std::string> KeyspaceBytes(const std::string& hex) {
  CRUMB_ASSIGN_OR_RETURN(const KeyspaceId id, KeyspaceId::FromHex(hex));
  return std::string(id.view());
}

absl::StatusOr<std::string> KeyBytes(const std::vector<std::string>& keys) {
  if (keys.size() > kKeysMax) {
    return absl::InvalidArgumentError(
        fmt::format("{} keys are more than a request may have, {}", keys.size(), kKeysMax));
  }
  std::string bytes;
  for (const std::string& hex : keys) {
    CRUMB_ASSIGN_OR_RETURN(const PageKey key, PageKey::FromHex(hex));
    bytes += key.view();
  }
  return bytes;
}

// Fills the two fields that every request about pages has.
template <typename Request>
absl::StatusOr<Request> RequestFor(const std::string& keyspace,
                                   const std::vector<std::string>& keys) {
  Request request;
  CRUMB_ASSIGN_OR_RETURN(*request.mutable_keyspace(), KeyspaceBytes(keyspace));
  CRUMB_ASSIGN_OR_RETURN(*request.mutable_keys(), KeyBytes(keys));
  return request;
}

absl::StatusOr<std::vector<int32_t>> ReadTokens(const std::string& path) {
  std::ifstream in(path);
  std::stringstream text;
  if (!(text << in.rdbuf()))
    return absl::InvalidArgumentError(path + " cannot be read or is empty");
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

absl::StatusOr<std::vector<std::string>> KeysOf(const LookupCommand& command) {
  if (!command.keys.empty()) return command.keys;
  CRUMB_ASSIGN_OR_RETURN(const KeyspaceId keyspace, KeyspaceId::FromHex(command.keyspace));
  CRUMB_ASSIGN_OR_RETURN(const std::vector<int32_t> tokens, ReadTokens(command.tokens_file));
  std::vector<std::string> keys;
  for (const PageKey& key : PageKeysOf(keyspace, tokens)) keys.push_back(key.ToHex());
  if (keys.empty()) {
    return absl::InvalidArgumentError(fmt::format("{} holds {} tokens; a page has {}",
                                                  command.tokens_file, tokens.size(), kPageTokens));
  }
  return keys;
}

absl::StatusOr<CommandResult> Run(const StatusCommand&, CrumbdConnection& crumbd) {
  CRUMB_ASSIGN_OR_RETURN(const std::string health, crumbd.Health());
  CRUMB_ASSIGN_OR_RETURN(const v1::StatsResponse stats, crumbd.Stats());
  return Done(StatusText(health, stats), StatusJson(health, stats));
}

absl::StatusOr<CommandResult> Run(const StatsCommand&, CrumbdConnection& crumbd) {
  CRUMB_ASSIGN_OR_RETURN(const v1::StatsResponse stats, crumbd.Stats());
  return Done(StatsText(stats), StatsJson(stats));
}

absl::StatusOr<CommandResult> Run(const LookupCommand& command, CrumbdConnection& crumbd) {
  CRUMB_ASSIGN_OR_RETURN(const std::vector<std::string> keys, KeysOf(command));
  CRUMB_ASSIGN_OR_RETURN(const auto request, RequestFor<v1::LookupRequest>(command.keyspace, keys));
  CRUMB_ASSIGN_OR_RETURN(const v1::LookupResponse response, crumbd.Lookup(request));
  TextTable table({"page", "key", "found in"});
  json rows = json::array();
  for (size_t i = 0; i < keys.size(); ++i) {
    const bool hit = static_cast<int>(i) < response.page_tiers_size();
    const std::string where =
        hit ? TierName(response.page_tiers(static_cast<int>(i))) : std::string("miss");
    table.AddRow({fmt::format("{}", i), keys[i], where});
    rows.push_back({{"page", i}, {"key", keys[i]}, {"tier", where}});
  }
  const std::string reason = MissReasonName(response.miss_reason());
  return Done(table.ToString() + fmt::format("\n{} of {} pages hit; first miss: {}\n",
                                             response.hit_pages(), keys.size(), reason),
              {{"hit_pages", response.hit_pages()},
               {"pages", keys.size()},
               {"miss_reason", reason},
               {"rows", std::move(rows)}});
}

absl::StatusOr<CommandResult> Run(const GetCommand& command, CrumbdConnection& crumbd) {
  CRUMB_ASSIGN_OR_RETURN(const KeyspaceId keyspace, KeyspaceId::FromHex(command.keyspace));
  CRUMB_ASSIGN_OR_RETURN(const PageKey key, PageKey::FromHex(command.key));
  CRUMB_ASSIGN_OR_RETURN(const std::vector<FragmentFile> fragments, crumbd.GetPage(keyspace, key));
  TextTable table({"file", "layers", "KV heads", "bytes"});
  json rows = json::array();
  for (size_t i = 0; i < fragments.size(); ++i) {
    const FragmentHeader& header = fragments[i].header;
    const std::string path = i == 0 ? command.out : fmt::format("{}.{}", command.out, i);
    CRUMB_RETURN_IF_ERROR(WriteFragmentFile(path, header, fragments[i].tiles));
    const size_t bytes = FragmentBytes(header.range.tiles(), header.tile_bytes);
    table.AddRow({path, fmt::format("[{}, {})", header.range.layers.begin, header.range.layers.end),
                  fmt::format("[{}, {})", header.range.heads.begin, header.range.heads.end),
                  fmt::format("{}", bytes)});
    rows.push_back({{"file", path},
                    {"layers", {header.range.layers.begin, header.range.layers.end}},
                    {"kv_heads", {header.range.heads.begin, header.range.heads.end}},
                    {"bytes", bytes}});
  }
  return Done(table.ToString(), {{"rows", std::move(rows)}});
}

const char* OutcomeName(v1::CommitOutcome outcome) {
  switch (outcome) {
    case v1::COMMIT_OUTCOME_STORED:
      return "stored";
    case v1::COMMIT_OUTCOME_DEDUPLICATED:
      return "there already";
    case v1::COMMIT_OUTCOME_REFUSED:
      return "refused";
    case v1::COMMIT_OUTCOME_NO_ROOM:
      return "no room";
    default:
      return "no answer";
  }
}

bool IsVisible(v1::CommitOutcome outcome) {
  return outcome == v1::COMMIT_OUTCOME_STORED || outcome == v1::COMMIT_OUTCOME_DEDUPLICATED;
}

absl::StatusOr<CommandResult> Run(const PutCommand& command, CrumbdConnection& crumbd) {
  CRUMB_ASSIGN_OR_RETURN(const KeyspaceId keyspace, KeyspaceId::FromHex(command.keyspace));
  std::vector<FragmentFile> fragments;
  for (const std::string& path : command.files) {
    CRUMB_ASSIGN_OR_RETURN(FragmentFile file, ReadFragmentFile(path));
    fragments.push_back(std::move(file));
  }
  CRUMB_ASSIGN_OR_RETURN(const v1::PutResponse response, crumbd.Put(keyspace, fragments));
  TextTable table({"file", "outcome"});
  CommandResult result = Done("", {{"rows", json::array()}});
  for (size_t i = 0; i < command.files.size(); ++i) {
    const v1::CommitOutcome outcome = static_cast<int>(i) < response.outcomes_size()
                                          ? response.outcomes(static_cast<int>(i))
                                          : v1::COMMIT_OUTCOME_UNSPECIFIED;
    table.AddRow({command.files[i], OutcomeName(outcome)});
    result.json["rows"].push_back({{"file", command.files[i]}, {"outcome", OutcomeName(outcome)}});
    if (!IsVisible(outcome) && result.status.ok()) {
      result.status = absl::FailedPreconditionError(
          fmt::format("{} was not stored: {}{}{}", command.files[i], OutcomeName(outcome),
                      response.first_error().empty() ? "" : ", ", response.first_error()));
    }
  }
  result.text = table.ToString();
  return result;
}

absl::StatusOr<CommandResult> Run(const DropCommand& command, CrumbdConnection& crumbd) {
  if (command.keys.empty()) {
    v1::DropKeyspaceRequest request;
    CRUMB_ASSIGN_OR_RETURN(*request.mutable_keyspace(), KeyspaceBytes(command.keyspace));
    CRUMB_ASSIGN_OR_RETURN(const v1::DropKeyspaceResponse response, crumbd.DropKeyspace(request));
    return Done(
        fmt::format("dropped the keyspace; its generation is now {}\n", response.generation()),
        {{"generation", response.generation()}});
  }
  CRUMB_ASSIGN_OR_RETURN(const auto request,
                         RequestFor<v1::DeleteRequest>(command.keyspace, command.keys));
  CRUMB_ASSIGN_OR_RETURN(const v1::DeleteResponse response, crumbd.Delete(request));
  return Done(
      fmt::format("deleted {} of {} pages\n", response.deleted_pages(), command.keys.size()),
      {{"deleted_pages", response.deleted_pages()}});
}

absl::StatusOr<CommandResult> Run(const FlushCommand&, CrumbdConnection& crumbd) {
  CRUMB_ASSIGN_OR_RETURN(const v1::FlushResponse response, crumbd.Flush());
  return Done(fmt::format("durable; {} pages are on the SSD tier\n", response.durable_pages()),
              {{"durable_pages", response.durable_pages()}});
}

absl::StatusOr<CommandResult> Run(const PinCommand& command, CrumbdConnection& crumbd) {
  CRUMB_ASSIGN_OR_RETURN(auto request, RequestFor<v1::PinRequest>(command.keyspace, command.keys));
  request.set_ttl_ms(static_cast<uint64_t>(command.ttl_seconds * 1000));
  CRUMB_ASSIGN_OR_RETURN(const v1::PinResponse response, crumbd.Pin(request));
  return Done(fmt::format("pinned {} of {} pages for {} s\n", response.pinned_pages(),
                          command.keys.size(), command.ttl_seconds),
              {{"pinned_pages", response.pinned_pages()}});
}

absl::StatusOr<CommandResult> Run(const UnpinCommand& command, CrumbdConnection& crumbd) {
  CRUMB_ASSIGN_OR_RETURN(const auto request,
                         RequestFor<v1::UnpinRequest>(command.keyspace, command.keys));
  CRUMB_ASSIGN_OR_RETURN(const v1::UnpinResponse response, crumbd.Unpin(request));
  return Done(
      fmt::format("unpinned {} of {} pages\n", response.unpinned_pages(), command.keys.size()),
      {{"unpinned_pages", response.unpinned_pages()}});
}

absl::StatusOr<CommandResult> Run(const KeyspaceStateCommand& command, CrumbdConnection& crumbd) {
  v1::SetKeyspaceStateRequest request;
  CRUMB_ASSIGN_OR_RETURN(*request.mutable_keyspace(), KeyspaceBytes(command.keyspace));
  request.set_state(command.state == "active" ? v1::KEYSPACE_STATE_ACTIVE
                                              : v1::KEYSPACE_STATE_BF16);
  request.set_who(fmt::format("crumb, uid {}", ::getuid()));
  request.set_reason(command.reason);
  CRUMB_RETURN_IF_ERROR(crumbd.SetKeyspaceState(request));
  return Done(fmt::format("the keyspace is {}\n", command.state), {{"state", command.state}});
}

absl::StatusOr<CommandResult> Run(const PageInspectCommand& command, CrumbdConnection&) {
  return RunPageInspect(command);
}

// Sleeps in short steps, so that an interrupt ends the wait.
void WaitFor(double seconds, const std::function<bool()>& interrupted) {
  const TimePoint end = Clock::Real().Now() + std::chrono::duration_cast<Duration>(
                                                  std::chrono::duration<double>(seconds));
  while (!interrupted() && Clock::Real().Now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
}

std::string TargetOf(const CommandLine& line) {
  return line.address.empty() ? "unix:" + line.socket_dir + "/" + kSocketName : line.address;
}

}  // namespace

CommandResult RunOnCrumbd(const Command& command, CrumbdConnection& crumbd) {
  auto result = std::visit([&crumbd](const auto& each) { return Run(each, crumbd); }, command);
  return result.ok() ? *std::move(result) : Failed(result.status());
}

CommandResult RunPageInspect(const PageInspectCommand& command) {
  const auto file = ReadFragmentFile(command.file);
  if (!file.ok()) return Failed(file.status());
  const FragmentReport report = InspectFragment(*file);
  CommandResult result;
  if (command.tile) {
    const auto rows = RowsOfTile(*file, command.tile->layer, command.tile->head);
    if (!rows.ok()) return Failed(rows.status());
    result = Done(TileRowsText(*rows), TileRowsJson(*rows));
  } else {
    result = Done(FragmentText(report), FragmentJson(report));
  }
  if (report.damaged_tiles > 0) {
    result.status = absl::DataLossError(fmt::format("{}: {} of {} tiles are damaged", command.file,
                                                    report.damaged_tiles, report.tiles.size()));
  }
  return result;
}

int PrintResult(const CommandResult& result, bool json, std::ostream& out, std::ostream& error) {
  if (json && (result.status.ok() || !result.json.empty())) {
    out << result.json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) << "\n";
  } else if (!json) {
    out << result.text;
  }
  out.flush();
  if (result.status.ok()) return 0;
  error << "crumb: " << std::string(result.status.message()) << "\n";
  return kExitFailure;
}

int RunCommandLine(const CommandLine& line, const std::function<bool()>& interrupted,
                   std::ostream& out, std::ostream& error) {
  if (const auto* inspect = std::get_if<PageInspectCommand>(&line.command)) {
    return PrintResult(RunPageInspect(*inspect), line.json, out, error);
  }
  const auto timeout =
      std::chrono::duration_cast<Duration>(std::chrono::duration<double>(line.timeout_seconds));
  const auto crumbd = CrumbdConnection::To(TargetOf(line), timeout);
  const auto* stats = std::get_if<StatsCommand>(&line.command);
  const double watch_seconds = stats == nullptr ? 0 : stats->watch_seconds;
  int code = PrintResult(RunOnCrumbd(line.command, *crumbd), line.json, out, error);
  while (watch_seconds > 0 && code == 0 && !interrupted()) {
    WaitFor(watch_seconds, interrupted);
    if (interrupted()) break;
    out << "\n";
    code = PrintResult(RunOnCrumbd(line.command, *crumbd), line.json, out, error);
  }
  return code;
}

}  // namespace crumb::tools
