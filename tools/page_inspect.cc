// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tools/page_inspect.h"

#include "fmt/format.h"
#include "tools/fragment_view.h"

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

}  // namespace crumb::tools
