# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
# Compiler settings, dependencies, and the functions every folder declares its targets with.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/bin")
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()

# The compiler cache sees paths relative to the source folder, so clones in other folders share its results.
find_program(CRUMB_CCACHE ccache)
if(CRUMB_CCACHE)
  set(CRUMB_COMPILER_LAUNCHER "${CMAKE_COMMAND}" -E env "CCACHE_BASEDIR=${CMAKE_SOURCE_DIR}" CCACHE_NOHASHDIR=1
    "${CRUMB_CCACHE}")
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CRUMB_COMPILER_LAUNCHER})
endif()

find_package(Threads REQUIRED)
find_package(Protobuf REQUIRED)
find_package(gRPC REQUIRED)
find_package(absl REQUIRED)
find_package(RocksDB REQUIRED)
find_package(prometheus-cpp REQUIRED)
find_package(spdlog REQUIRED)
find_package(fmt REQUIRED)
find_package(yaml-cpp REQUIRED)
find_package(OpenSSL REQUIRED)
find_package(Eigen3 REQUIRED NO_MODULE)
find_package(nlohmann_json REQUIRED)
find_package(benchmark REQUIRED)
find_path(CRUMB_CLI11_INCLUDE_DIR CLI/CLI.hpp REQUIRED)
find_path(CRUMB_HTTPLIB_INCLUDE_DIR httplib.h REQUIRED)
find_package(ICU REQUIRED COMPONENTS uc)
find_package(ucx REQUIRED)
if(CRUMB_TESTS)
  find_package(GTest REQUIRED)
  include(GoogleTest)
endif()

# Every target of ours links this: warnings, sanitizers, include paths from the root.
add_library(crumb_settings INTERFACE)
target_include_directories(crumb_settings INTERFACE
  "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>")
target_compile_options(crumb_settings INTERFACE
  "$<BUILD_INTERFACE:-Wall;-Wextra;-Wshadow;-Wnon-virtual-dtor;-Woverloaded-virtual;-Werror>")
if(CRUMB_SANITIZE)
  target_compile_options(crumb_settings INTERFACE
    -fsanitize=${CRUMB_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  target_link_options(crumb_settings INTERFACE -fsanitize=${CRUMB_SANITIZE})
endif()
if(CRUMB_FUZZ)
  target_compile_options(crumb_settings INTERFACE -fsanitize=fuzzer-no-link)
endif()
if(CRUMB_THREAD_SAFETY)
  target_compile_options(crumb_settings INTERFACE "$<BUILD_INTERFACE:-Wthread-safety;-Werror=thread-safety>")
endif()

# crumb_library(NAME SOURCES a.cc... DEPS t...): static library crumb_NAME, alias crumb::NAME. With
# CRUMB_UNITY the compiler takes its sources in groups and reads the headers of libraries, which are
# most of its input, once for each group. Names in unnamed namespaces are unique in a library.
function(crumb_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS" ${ARGN})
  add_library(crumb_${name} STATIC ${ARG_SOURCES})
  add_library(crumb::${name} ALIAS crumb_${name})
  target_link_libraries(crumb_${name} PUBLIC crumb_settings ${ARG_DEPS})
  set_target_properties(crumb_${name} PROPERTIES
    UNITY_BUILD "${CRUMB_UNITY}" UNITY_BUILD_BATCH_SIZE 12)
endfunction()

# crumb_binary(NAME SOURCES a.cc... DEPS t...): program NAME in <build>/bin.
function(crumb_binary name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE crumb_settings ${ARG_DEPS})
endfunction()

# crumb_test(NAME SOURCES a.cc... DEPS t... LABELS l... TIMEOUT s ALONE): one GoogleTest program.
# ALONE: it judges times, so that ctest runs no other test beside it. Labels: unit (default),
# integration, slow, gpu; `grpc` marks programs that load libgrpc. Programs that need a GPU are
# called *_cuda_*_test: tests/gpu.sh runs those.
function(crumb_test name)
  cmake_parse_arguments(ARG "ALONE" "TIMEOUT" "SOURCES;DEPS;LABELS" ${ARGN})
  if(NOT ARG_LABELS)
    set(ARG_LABELS unit)
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  if(CRUMB_SANITIZE)  # several times slower
    math(EXPR ARG_TIMEOUT "3 * ${ARG_TIMEOUT}")
  endif()
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE crumb_settings ${ARG_DEPS} GTest::gmock GTest::gtest
    GTest::gtest_main)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/tests")
  add_test(NAME ${name} COMMAND ${name} WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}")
  set_tests_properties(${name} PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT ${ARG_TIMEOUT}
    RUN_SERIAL ${ARG_ALONE})
  if(gpu IN_LIST ARG_LABELS)
    if(NOT name MATCHES "_cuda_.*_test$")
      message(FATAL_ERROR "${name} has the label gpu: call it *_cuda_*_test, or tests/gpu.sh does not run it")
    endif()
    add_dependencies(crumb_gpu_programs ${name})
    # Without a GPU ctest reports Skipped, not Passed; a failure, which GoogleTest prints last, stays one.
    set_tests_properties(${name} PROPERTIES
      SKIP_REGULAR_EXPRESSION "needs a CUDA device.*\\[  SKIPPED \\] [^\n]*\n$")
  endif()
endfunction()
