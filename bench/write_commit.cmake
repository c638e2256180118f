# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
# Writes OUT, a header with the commit of SOURCE, if its contents differ.
cmake_minimum_required(VERSION 3.25)  # a script has no policies of the project
execute_process(COMMAND git -C "${SOURCE}" describe --always --dirty --abbrev=12 --exclude *
  OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
if(NOT commit)
  set(commit "unknown")
endif()
file(CONFIGURE OUTPUT "${OUT}" CONTENT
"#pragma once
namespace crumb::bench {
inline constexpr const char* kCommit = \"@commit@\";
}
" @ONLY)
