# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
# Run by CPack on the staged files: configuration belongs into /etc, whatever the prefix.
set(etc "${CPACK_TEMPORARY_INSTALL_DIRECTORY}/usr/etc")
if(EXISTS "${etc}")
  file(RENAME "${etc}" "${CPACK_TEMPORARY_INSTALL_DIRECTORY}/etc")
endif()
