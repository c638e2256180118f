// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tools/commands.h"

#include <unistd.h>

#include <chrono>
#include <fstream>
#include <memory>
#include <ostream>
#include <string>
#include <thread>

#include "common/printable.h"
#include "common/status_macros.h"
#include "crumb/client.h"
#include "fmt/format.h"
#include "tools/fragment_report.h"
#include "tools/progress_bar.h"

namespace crumb::tools {

CommandResult RunPageInspect(const PageInspectCommand& command) {
  const auto file = ReadFragmentFile(command.file);
  if (!file.ok()) return CommandResult::Failed(file.status());
  const FragmentReport report = InspectFragment(*file);
  CommandResult result;
  if (command.tile) {
    const auto rows = RowsOfTile(*file, command.tile->layer, command.tile->head);
    if (!rows.ok()) return CommandResult::Failed(rows.status());
    result = CommandResult::Done(TileRowsText(*rows), TileRowsJson(*rows));
  } else {
    result = CommandResult::Done(FragmentText(report), FragmentJson(report));
  }
  if (report.damaged_tiles > 0) {
    result.status = absl::DataLossError(fmt::format("{}: {} of {} tiles are damaged", command.file,
                                                    report.damaged_tiles, report.tiles.size()));
  }
  return result;
}

namespace {

// The socket in crumbd's socket folder to which clients connect first.
constexpr const char* kSocketName = "crumbd.fd.sock";

Duration FromSeconds(double seconds) {
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds));
}

// Reads a token, which is one word; white space around it is ignored.
absl::StatusOr<std::string> ReadToken(const std::string& path) {
  if (path.empty()) return std::string();
  std::ifstream file(path);
  std::string token;
  std::string more;
  if (!(file >> token) || (file >> more)) {
    return absl::InvalidArgumentError("--token-file: " + path +
                                      " cannot be read, or holds not exactly one token");
  }
  return token;
}

// Returns whether the command must look at every node: a page that is named without its prefix may
// be anywhere in its sequence, so its homes are unknown.
bool NeedsEveryNode(const Command& command) {
  if (const auto* lookup = std::get_if<LookupCommand>(&command)) return lookup->everywhere;
  if (const auto* prefetch = std::get_if<PrefetchCommand>(&command)) {
    return prefetch->pages.everywhere;
  }
  return std::holds_alternative<GetCommand>(command) || std::holds_alternative<PinCommand>(command);
}

absl::StatusOr<std::unique_ptr<client::Client>> Connect(const CommandLine& line) {
  client::ClientOptions options;
  options.socket_dir = line.socket_dir;
  options.address = line.address;
  options.tls_ca_file = line.tls_ca_file;
  options.tls_cert_file = line.tls_cert_file;
  options.tls_key_file = line.tls_key_file;
  options.tls_server_name = line.tls_server_name;
  CRUMB_ASSIGN_OR_RETURN(options.token, ReadToken(line.token_file));
  options.process_name = "crumb";
  options.query_every_node = NeedsEveryNode(line.command);
  options.staging_bytes = 0;
  options.connect_timeout = FromSeconds(line.timeout_seconds);
  options.call_timeout = options.connect_timeout;
  CRUMB_ASSIGN_OR_RETURN(auto crumbd, client::Client::Open(options));
  // Over TLS, the call of the command reports why there is no connection.
  if (crumbd->connected() || !line.tls_ca_file.empty()) return crumbd;
  const std::string where =
      line.address.empty() ? line.socket_dir + "/" + kSocketName : line.address;
  return absl::UnavailableError("no crumbd responds at " + where +
                                "; start crumbd, or name it with --socket-dir or --address" +
                                (line.address.empty() ? "" : "; does it want TLS (--tls-ca)?"));
}

// Sleeps in short steps, so that an interrupt ends the wait.
void WaitFor(double seconds, const std::function<bool()>& interrupted) {
  const TimePoint end = Clock::Real().Now() + FromSeconds(seconds);
  while (!interrupted() && Clock::Real().Now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
}

}  // namespace

int PrintResult(const CommandResult& result, bool json, std::ostream& out, std::ostream& error) {
  if (json && (result.status.ok() || !result.json.empty())) {
    // The output is ASCII, so that names from other callers of crumbd cannot control a terminal.
    out << result.json.dump(2, ' ', true, nlohmann::json::error_handler_t::replace) << "\n";
  } else if (!json) {
    out << PrintableLines(result.text);
  }
  out.flush();
  if (result.status.ok()) return 0;
  error << "crumb: " << PrintableLines(std::string(result.status.message())) << "\n";
  return kExitFailure;
}

int RunCommandLine(const CommandLine& line, const std::function<bool()>& interrupted,
                   std::ostream& out, std::ostream& error) {
  if (const auto* inspect = std::get_if<PageInspectCommand>(&line.command)) {
    return PrintResult(RunPageInspect(*inspect), line.json, out, error);
  }
  if (const auto* calibrate = std::get_if<CalibrateCommand>(&line.command)) {
    ProgressBar bar("calibrating", error, ProgressBar::StyleFor(STDERR_FILENO));
    const auto show = [&bar](double done) { bar.Show(done); };
    const CommandResult result = RunCalibrate(*calibrate, show);
    bar.End();
    return PrintResult(result, line.json, out, error);
  }
  if (const auto* absorb = std::get_if<AbsorbCommand>(&line.command)) {
    ProgressBar bar("absorbing", error, ProgressBar::StyleFor(STDERR_FILENO));
    const auto show = [&bar](double done) { bar.Show(done); };
    const CommandResult result = RunAbsorb(*absorb, show);
    bar.End();
    return PrintResult(result, line.json, out, error);
  }
  if (const auto* show = std::get_if<RotationShowCommand>(&line.command)) {
    return PrintResult(RunRotationShow(*show), line.json, out, error);
  }
  if (const auto* verify = std::get_if<RotationVerifyCommand>(&line.command)) {
    return PrintResult(RunRotationVerify(*verify), line.json, out, error);
  }
  if (const auto* convert = std::get_if<RotationConvertCommand>(&line.command)) {
    return PrintResult(RunRotationConvert(*convert), line.json, out, error);
  }
  const auto crumbd = Connect(line);
  if (!crumbd.ok()) {
    return PrintResult(CommandResult::Failed(crumbd.status()), line.json, out, error);
  }
  const Duration timeout = FromSeconds(line.timeout_seconds);
  const auto* stats = std::get_if<StatsCommand>(&line.command);
  const double watch_seconds = stats == nullptr ? 0 : stats->watch_seconds;
  int code = PrintResult(RunOnCrumbd(line.command, timeout, **crumbd), line.json, out, error);
  while (watch_seconds > 0 && code == 0 && !interrupted()) {
    WaitFor(watch_seconds, interrupted);
    if (interrupted()) break;
    out << "\n";
    code = PrintResult(RunOnCrumbd(line.command, timeout, **crumbd), line.json, out, error);
  }
  return code;
}

}  // namespace crumb::tools
