# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
# Decides whether CUDA code is built. Sets CRUMB_HAVE_CUDA.

set(CRUMB_HAVE_CUDA OFF)
if(NOT CRUMB_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(CRUMB_HAVE_CUDA ON)
  elseif(CRUMB_CUDA STREQUAL "ON")
    message(FATAL_ERROR "CRUMB_CUDA=ON but no CUDA compiler was found; put nvcc on PATH or set CUDACXX")
  endif()
endif()
message(STATUS "CUDA back end: ${CRUMB_HAVE_CUDA}")
