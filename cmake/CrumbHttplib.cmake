# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
# crumb::httplib: cpp-httplib with the switches that its library was compiled with (they change the
# layout of its classes), or its header alone where there is no compiled library.

pkg_check_modules(PC_HTTPLIB QUIET IMPORTED_TARGET GLOBAL cpp-httplib)
if(NOT TARGET crumb::httplib)
  if(PC_HTTPLIB_FOUND)
    add_library(crumb::httplib ALIAS PkgConfig::PC_HTTPLIB)
  else()
    add_library(crumb_httplib INTERFACE)
    add_library(crumb::httplib ALIAS crumb_httplib)
    target_include_directories(crumb_httplib SYSTEM INTERFACE ${CRUMB_HTTPLIB_INCLUDE_DIR})
  endif()
endif()
