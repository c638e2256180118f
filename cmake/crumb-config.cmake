# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
# find_package(crumb) gives crumb::client, the embedded library with its headers "crumb/...".
include(CMakeFindDependencyMacro)
list(PREPEND CMAKE_MODULE_PATH "${CMAKE_CURRENT_LIST_DIR}")  # FindgRPC
find_dependency(Threads)
find_dependency(Protobuf)
find_dependency(gRPC)
find_dependency(absl)
find_dependency(spdlog)
find_dependency(fmt)
find_dependency(OpenSSL)
find_dependency(nlohmann_json)
list(POP_FRONT CMAKE_MODULE_PATH)
include("${CMAKE_CURRENT_LIST_DIR}/crumb-targets.cmake")
