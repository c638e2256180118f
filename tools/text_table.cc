// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tools/text_table.h"

#include <algorithm>
#include <cctype>

#include "common/printable.h"
#include "fmt/format.h"

namespace crumb::tools {
namespace {

// The characters of a number and its unit. An empty cell may be in any column.
bool LooksNumeric(const std::string& cell) {
  if (cell.empty() || cell == "-") return true;
  return std::isdigit(static_cast<unsigned char>(cell[0])) != 0 ||
         ((cell[0] == '-' || cell[0] == '+') && cell.size() > 1 &&
          std::isdigit(static_cast<unsigned char>(cell[1])) != 0);
}

void AppendLine(const std::vector<std::string>& cells, const std::vector<size_t>& widths,
                const std::vector<bool>& right, std::string* out) {
  std::string line;
  for (size_t i = 0; i < widths.size(); ++i) {
    const std::string cell = i < cells.size() ? cells[i] : std::string();
    if (i > 0) line += "  ";
    line +=
        right[i] ? fmt::format("{:>{}}", cell, widths[i]) : fmt::format("{:<{}}", cell, widths[i]);
  }
  line.erase(line.find_last_not_of(' ') + 1);
  *out += line + "\n";
}

}  // namespace

void TextTable::AddRow(std::vector<std::string> cells) {
  cells.resize(headings_.size());
  // A cell is one line without escapes, because names and reasons come from other callers of
  // crumbd.
  for (std::string& cell : cells) cell = Printable(cell);
  rows_.push_back(std::move(cells));
}

std::string TextTable::ToString() const {
  std::vector<size_t> widths;
  std::vector<bool> right;
  for (size_t i = 0; i < headings_.size(); ++i) {
    size_t width = headings_[i].size();
    bool numeric = !rows_.empty();
    for (const auto& row : rows_) {
      width = std::max(width, row[i].size());
      numeric = numeric && LooksNumeric(row[i]);
    }
    widths.push_back(width);
    right.push_back(numeric);
  }
  std::string out;
  AppendLine(headings_, widths, right, &out);
  for (const auto& row : rows_) AppendLine(row, widths, right, &out);
  return out;
}

std::string FormatBytes(uint64_t bytes) {
  constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (bytes < 1024) return fmt::format("{} B", bytes);
  double value = static_cast<double>(bytes) / 1024;
  size_t unit = 0;
  for (; value >= 1024 && unit + 1 < std::size(kUnits); ++unit) value /= 1024;
  return fmt::format("{:.2f} {}", value, kUnits[unit]);
}

std::string FormatUptime(double seconds) {
  const auto whole = static_cast<uint64_t>(std::max(seconds, 0.0));
  const std::string clock =
      fmt::format("{:02}:{:02}:{:02}", whole / 3600 % 24, whole / 60 % 60, whole % 60);
  const uint64_t days = whole / 86400;
  return days == 0 ? clock : fmt::format("{}d {}", days, clock);
}

std::string FormatPercent(double part, double whole) {
  return whole == 0 ? "-" : fmt::format("{:.1f} %", 100 * part / whole);
}

}  // namespace crumb::tools
