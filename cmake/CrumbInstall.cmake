# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
# cmake --install, the CMake package crumb (find_package(crumb) -> crumb::client) and, through CPack, a
# Debian package. Included last, because it reads the parts of the client library from its targets.

include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(CRUMB_INSTALL_HEADERS "${CMAKE_INSTALL_INCLUDEDIR}/libcrumb")
set(CRUMB_INSTALL_PACKAGE "${CMAKE_INSTALL_LIBDIR}/cmake/crumb")

# Every target of ours that `target` links, itself included.
function(crumb_link_closure target result)
  set(found "")
  set(waiting ${target})
  while(waiting)
    list(POP_FRONT waiting next)
    get_target_property(real ${next} ALIASED_TARGET)
    if(real)
      set(next ${real})
    endif()
    if(next IN_LIST found OR NOT next MATCHES "^crumb_")
      continue()
    endif()
    list(APPEND found ${next})
    get_target_property(type ${next} TYPE)
    set(property LINK_LIBRARIES)
    if(type STREQUAL "INTERFACE_LIBRARY")
      set(property INTERFACE_LINK_LIBRARIES)
    endif()
    get_target_property(links ${next} ${property})
    foreach(link IN LISTS links)
      if(TARGET "${link}")
        list(APPEND waiting ${link})
      endif()
    endforeach()
  endwhile()
  set(${result} ${found} PARENT_SCOPE)
endfunction()

# The project's headers that the public ones include, as paths from the root.
function(crumb_header_closure result)
  file(GLOB waiting RELATIVE "${PROJECT_SOURCE_DIR}" "${PROJECT_SOURCE_DIR}/client/api/crumb/*.h")
  set(found "")
  while(waiting)
    list(POP_FRONT waiting header)
    file(STRINGS "${PROJECT_SOURCE_DIR}/${header}" lines REGEX "^#include \"")
    foreach(line IN LISTS lines)
      string(REGEX REPLACE "^#include \"([^\"]+)\".*" "\\1" included "${line}")
      if(NOT included IN_LIST found AND EXISTS "${PROJECT_SOURCE_DIR}/${included}")
        list(APPEND found "${included}")
        list(APPEND waiting "${included}")
      endif()
    endforeach()
  endwhile()
  set(${result} ${found} PARENT_SCOPE)
endfunction()

crumb_link_closure(crumb_client crumb_client_parts)
foreach(part IN LISTS crumb_client_parts)
  # crumb_client -> crumb::client
  string(REGEX REPLACE "^crumb_" "" name "${part}")
  set_target_properties(${part} PROPERTIES EXPORT_NAME "${name}")
endforeach()
target_include_directories(crumb_settings INTERFACE
  "$<INSTALL_INTERFACE:${CRUMB_INSTALL_HEADERS}>")
install(TARGETS ${crumb_client_parts} EXPORT crumb ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}/crumb")
install(EXPORT crumb NAMESPACE crumb:: FILE crumb-targets.cmake DESTINATION "${CRUMB_INSTALL_PACKAGE}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/crumb-config-version.cmake"
  COMPATIBILITY SameMinorVersion)
install(FILES cmake/crumb-config.cmake cmake/FindgRPC.cmake
  "${PROJECT_BINARY_DIR}/crumb-config-version.cmake" DESTINATION "${CRUMB_INSTALL_PACKAGE}")
install(DIRECTORY client/api/crumb DESTINATION "${CRUMB_INSTALL_HEADERS}")
crumb_header_closure(crumb_headers)
foreach(header IN LISTS crumb_headers)
  get_filename_component(folder "${header}" DIRECTORY)
  install(FILES "${header}" DESTINATION "${CRUMB_INSTALL_HEADERS}/${folder}")
endforeach()

# The C library; without a namelink of the core, which programs do not link.
install(TARGETS crumb_c LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}")
install(TARGETS crumb_c_core LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}" NAMELINK_SKIP)
install(FILES client/api/crumb.h client/api/crumb_blocks.h client/api/crumb_device.h
  client/api/crumb_transfer.h DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")

install(TARGETS crumbd crumb RUNTIME)
install(FILES deploy/config/crumbd.yaml DESTINATION "${CMAKE_INSTALL_SYSCONFDIR}/crumb")
install(FILES deploy/systemd/crumbd.service DESTINATION lib/systemd/system)
install(FILES deploy/systemd/crumb.sysusers.conf DESTINATION lib/sysusers.d RENAME crumb.conf)
install(FILES deploy/systemd/crumb.tmpfiles.conf DESTINATION lib/tmpfiles.d RENAME crumb.conf)
install(DIRECTORY deploy/prometheus deploy/grafana DESTINATION "${CMAKE_INSTALL_DATADIR}/crumb"
  PATTERN "*.py" EXCLUDE)
install(FILES LICENSE docs/config.md docs/metrics.md docs/operations.md
  DESTINATION "${CMAKE_INSTALL_DATADIR}/doc/crumb")

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME crumb)
set(CPACK_PACKAGE_VENDOR "The Crumb authors")
set(CPACK_PACKAGE_CONTACT "The Crumb authors <crumb@localhost>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "${PROJECT_DESCRIPTION}")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION net)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_SUGGESTS
  "libgrpc++-dev, libprotobuf-dev, libabsl-dev, libspdlog-dev, libfmt-dev, libssl-dev, nlohmann-json3-dev")
set(CPACK_DEBIAN_PACKAGE_CONTROL_EXTRA
  "${PROJECT_SOURCE_DIR}/deploy/debian/conffiles;${PROJECT_SOURCE_DIR}/deploy/debian/postinst;${PROJECT_SOURCE_DIR}/deploy/debian/prerm")
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
set(CPACK_PRE_BUILD_SCRIPTS "${PROJECT_SOURCE_DIR}/cmake/move_etc.cmake")
include(CPack)
