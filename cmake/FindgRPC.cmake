# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
# gRPC through pkg-config, for distributions that ship no CMake package (Debian).
# Targets: gRPC::grpc++, gRPC::reflection. Variables: gRPC_CPP_PLUGIN, gRPC_VERSION.

find_package(PkgConfig REQUIRED)
pkg_check_modules(PC_GRPCPP QUIET IMPORTED_TARGET grpc++)
find_library(gRPC_REFLECTION_LIBRARY grpc++_reflection)
find_program(gRPC_CPP_PLUGIN grpc_cpp_plugin)
set(gRPC_VERSION "${PC_GRPCPP_VERSION}")

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(gRPC
  REQUIRED_VARS PC_GRPCPP_LIBRARIES gRPC_REFLECTION_LIBRARY gRPC_CPP_PLUGIN
  VERSION_VAR gRPC_VERSION
  REASON_FAILURE_MESSAGE "install libgrpc++-dev and protobuf-compiler-grpc, or run deploy/install_packages.sh")

if(gRPC_FOUND AND NOT TARGET gRPC::grpc++)
  add_library(gRPC::grpc++ ALIAS PkgConfig::PC_GRPCPP)
  add_library(gRPC::reflection UNKNOWN IMPORTED)
  set_target_properties(gRPC::reflection PROPERTIES
    IMPORTED_LOCATION "${gRPC_REFLECTION_LIBRARY}"
    INTERFACE_LINK_LIBRARIES gRPC::grpc++)
endif()
