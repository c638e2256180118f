// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

// Returns from the enclosing function when `expr`, an absl::Status, is not OK.
#define CRUMB_RETURN_IF_ERROR(expr)                                 \
  do {                                                              \
    if (::absl::Status crumb_status = (expr); !crumb_status.ok()) { \
      return crumb_status;                                          \
    }                                                               \
  } while (false)

// Declares or assigns `lhs` from `expr`, an absl::StatusOr, or returns its status.
#define CRUMB_ASSIGN_OR_RETURN(lhs, expr) \
  CRUMB_ASSIGN_OR_RETURN_IMPL(CRUMB_STATUS_CONCAT(crumb_statusor_, __LINE__), lhs, expr)

#define CRUMB_STATUS_CONCAT_INNER(a, b) a##b
#define CRUMB_STATUS_CONCAT(a, b) CRUMB_STATUS_CONCAT_INNER(a, b)
#define CRUMB_ASSIGN_OR_RETURN_IMPL(result, lhs, expr) \
  auto result = (expr);                                \
  if (!result.ok()) return std::move(result).status(); \
  lhs = std::move(result).value()
