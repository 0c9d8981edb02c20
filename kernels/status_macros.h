// Three macros that keep absl::Status code readable.
//
//   SP_RETURN_IF_ERROR(expr);            returns expr's status from this function unless it is OK
//   SP_ASSIGN_OR_RETURN(auto x, expr);   the same for a StatusOr, else binds its value
//   SP_CHECK(condition);                a broken invariant of ours: prints and aborts in all builds
#pragma once

#include <cstdio>
#include <cstdlib>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define SP_RETURN_IF_ERROR(expr)             \
  do {                                       \
    ::absl::Status sp_status_ = (expr);      \
    if (!sp_status_.ok()) return sp_status_; \
  } while (false)

#define SP_CONCAT_INNER_(a, b) a##b
#define SP_CONCAT_(a, b) SP_CONCAT_INNER_(a, b)

#define SP_ASSIGN_OR_RETURN(lhs, expr) \
  SP_ASSIGN_OR_RETURN_IMPL_(SP_CONCAT_(sp_status_or_, __LINE__), lhs, expr)
#define SP_ASSIGN_OR_RETURN_IMPL_(name, lhs, expr) \
  auto name = (expr);                              \
  if (!name.ok()) return std::move(name).status(); \
  lhs = std::move(name).value()

#define SP_CHECK(condition)                                                                  \
  do {                                                                                       \
    if (!(condition)) {                                                                      \
      std::fprintf(stderr, "%s:%d: broken invariant: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                          \
    }                                                                                        \
  } while (false)
