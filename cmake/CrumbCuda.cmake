# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
# Decides whether CUDA code is built. Sets CRUMB_HAVE_CUDA.

set(CRUMB_HAVE_CUDA OFF)
if(NOT CRUMB_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(CRUMB_HAVE_CUDA ON)
    # Machine code for Ampere and Hopper, PTX that newer devices compile when they load it.
    # The preset release-gpus adds machine code for Blackwell.
    if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES "80-real;90a-real;90-virtual")
    endif()
    set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
    if(CRUMB_CCACHE)
      set(CMAKE_CUDA_COMPILER_LAUNCHER ${CRUMB_COMPILER_LAUNCHER})
    endif()
    enable_language(CUDA)
    find_package(CUDAToolkit REQUIRED)
    find_path(CRUMB_CUBLAS_INCLUDE_DIR cublasLt.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
    if(NOT CRUMB_CUBLAS_INCLUDE_DIR)
      message(FATAL_ERROR "CUDA is here without cuBLAS's headers; install them (libcublas-dev-<version>) "
        "or build with -DCRUMB_CUDA=OFF")
    endif()
    # CMake 3.25 knows no C++20 of this nvcc and would leave the flag out.
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
    set(CMAKE_CUDA_STANDARD 20)
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    add_custom_target(crumb_gpu_programs)  # the programs that tests/gpu.sh runs
  elseif(CRUMB_CUDA STREQUAL "ON")
    message(FATAL_ERROR "CRUMB_CUDA=ON but no CUDA compiler was found; put nvcc on PATH or set CUDACXX")
  endif()
endif()
message(STATUS "CUDA back end: ${CRUMB_HAVE_CUDA}")
