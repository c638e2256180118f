// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace crumb {

// Makes text from callers and other nodes safe for a log line, a metric's label or a terminal.
// Control characters (C0, DEL and C1), line and paragraph separators, bidirectional controls and
// bytes that are not UTF-8 could end the line, start an escape sequence or reverse the text's
// direction; they are written as \n, \t, \xNN or \uNNNN. All other characters, backslashes
// included, stay as they are. Output longer than `bytes_max` bytes is cut there, followed by "..."
// and the number of bytes left out.
std::string Printable(std::string_view text, size_t bytes_max = 4096);

// Printable without a bound that keeps line feeds, for output that consists of lines.
std::string PrintableLines(std::string_view text);

}  // namespace crumb
