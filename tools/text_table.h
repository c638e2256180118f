// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

// Plain text for people: aligned columns, and numbers with units.
namespace crumb::tools {

// Rows of cells under one line of headings. Columns that hold only numbers are right-aligned.
class TextTable {
 public:
  explicit TextTable(std::vector<std::string> headings) : headings_(std::move(headings)) {}

  // `cells` are at most as many as the headings; missing ones are empty.
  void AddRow(std::vector<std::string> cells);

  bool empty() const { return rows_.empty(); }
  // Every line ends in a line feed, without blanks before it.
  std::string ToString() const;

 private:
  std::vector<std::string> headings_;
  std::vector<std::vector<std::string>> rows_;
};

// "1.50 GiB"; below 1 KiB "17 B".
std::string FormatBytes(uint64_t bytes);

// "3d 04:05:06", "04:05:06".
std::string FormatUptime(double seconds);

// "12.3 %"; "-" when `whole` is 0.
std::string FormatPercent(double part, double whole);

}  // namespace crumb::tools
