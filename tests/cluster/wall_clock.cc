// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// For LD_PRELOAD: the wall clock of a process is off by the seconds in the file that
// CRUMB_TEST_WALL_CLOCK names, as they are at each moment. Its monotonic clock is left alone. Waits
// until an instant of the wall clock, as Abseil's are, end when that clock says so: libfaketime
// leaves those to the kernel's. x86-64.
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <cstdlib>

namespace {

long Offset() {
  const char* const path = std::getenv("CRUMB_TEST_WALL_CLOCK");
  if (path == nullptr) return 0;
  const int file = ::open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return 0;
  char text[32] = {};
  const ssize_t size = ::read(file, text, sizeof(text) - 1);
  ::close(file);
  return size > 0 ? std::strtol(text, nullptr, 10) : 0;
}

long Kernel(long number, long a, long b, long c, long d = 0, long e = 0, long f = 0) {
  long result = number;
  register long r10 asm("r10") = d;
  register long r8 asm("r8") = e;
  register long r9 asm("r9") = f;
  asm volatile("syscall"
               : "+a"(result)
               : "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
               : "rcx", "r11", "memory");
  if (result >= 0) return result;
  errno = static_cast<int>(-result);
  return -1;
}

}  // namespace

extern "C" {

long syscall(long number, ...) noexcept {
  long arguments[6] = {};
  va_list list;
  va_start(list, number);
  for (long& argument : arguments) argument = va_arg(list, long);
  va_end(list);
  timespec until{};
  if (number == SYS_futex && (arguments[1] & FUTEX_CLOCK_REALTIME) != 0 && arguments[3] != 0) {
    until = *reinterpret_cast<const timespec*>(arguments[3]);
    until.tv_sec -= Offset();
    arguments[3] = reinterpret_cast<long>(&until);
  }
  return Kernel(number, arguments[0], arguments[1], arguments[2], arguments[3], arguments[4],
                arguments[5]);
}

int clock_gettime(clockid_t clock, timespec* now) noexcept {
  const long result = Kernel(SYS_clock_gettime, clock, reinterpret_cast<long>(now), 0);
  if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
    now->tv_sec += Offset();
  }
  return static_cast<int>(result);
}

int gettimeofday(timeval* now, void*) noexcept {
  timespec precise{};
  clock_gettime(CLOCK_REALTIME, &precise);
  now->tv_sec = precise.tv_sec;
  now->tv_usec = precise.tv_nsec / 1000;
  return 0;
}

time_t time(time_t* now) noexcept {
  timespec precise{};
  clock_gettime(CLOCK_REALTIME, &precise);
  if (now != nullptr) *now = precise.tv_sec;
  return precise.tv_sec;
}

}  // extern "C"
