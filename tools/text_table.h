// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

// Text output: aligned columns, and numbers with units.
namespace crumb::tools {

// Rows of cells under one line of headings. Columns of numbers are right-aligned.
class TextTable {
 public:
  explicit TextTable(std::vector<std::string> headings) : headings_(std::move(headings)) {}

  // REQUIRES: there are at most as many cells as headings. Missing cells are empty.
  void AddRow(std::vector<std::string> cells);

  bool empty() const { return rows_.empty(); }
  // Returns the table. Every line ends with a line feed and has no blanks before it.
  std::string ToString() const;

 private:
  std::vector<std::string> headings_;
  std::vector<std::vector<std::string>> rows_;
};

// Returns "1.50 GiB", or "17 B" for fewer than 1 KiB.
std::string FormatBytes(uint64_t bytes);

// Returns "3d 04:05:06" or "04:05:06".
std::string FormatUptime(double seconds);

// Returns "12.3 %", or "-" if `whole` is 0.
std::string FormatPercent(double part, double whole);

}  // namespace crumb::tools
