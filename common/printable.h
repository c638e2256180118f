// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace crumb {

// Text from callers and other nodes as it may stand in a log line, a metric's label or a terminal:
// what could end the line, start an escape sequence, reverse the text's direction or be no text at
// all becomes a visible escape. These are control characters (C0, DEL and C1), line and paragraph
// separators, bidirectional controls and bytes that are not UTF-8; they are written as \n, \t, \xNN
// or \uNNNN. Everything else, backslashes included, stays as it is. Of a longer text the first
// `bytes_max` bytes of output stay, followed by "..." and the number of bytes left out.
std::string Printable(std::string_view text, size_t bytes_max = 4096);

// As Printable, without a bound and with line feeds kept: for output that consists of lines.
std::string PrintableLines(std::string_view text);

}  // namespace crumb
