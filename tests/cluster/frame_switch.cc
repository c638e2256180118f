// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// An Ethernet switch in user space whose links are long and lossy, for kernels without netem.
//   frame_switch PORTS SEED
// makes TAP interfaces tap0, tap1, ... in the network namespace that it runs in (they may be moved
// to others), prints "ready" and passes frames between them until its input ends. Port i is the
// host with the address 02:00:00:00:00:XX with XX = i + 1. A TAP takes no segmentation offload, so
// that a frame is one packet of the interface's MTU.
//
// Each line of input is a rule, for frames from then on; the response is a line of JSON with the
// counts of all frames so far:
//   delay MS      each frame is held back so long on the link of the port it came from
//   loss SHARE    each is lost with this probability
//   cut PORT      nothing passes from or to the port
//   join PORT     it does again
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <sstream>
#include <string>

#include "common/unique_fd.h"
#include "nlohmann/json.hpp"
#include "tests/cluster/slow_link.h"

namespace crumb {
namespace {

constexpr size_t kFrameBytesMax = 9216;
constexpr size_t kFramesMax = 16'384;  // held back on a link
constexpr int kFramesATurn = 64;       // read from a port before the others have theirs
constexpr size_t kPortsMax = 64;

struct Port {
  UniqueFd tap;
  SlowLink link;  // link from the port to the switch
  bool cut = false;
};

UniqueFd OpenTap(const std::string& name) {
  UniqueFd fd(::open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC));
  ifreq request{};
  request.ifr_flags = IFF_TAP | IFF_NO_PI;
  name.copy(request.ifr_name, IFNAMSIZ - 1);
  if (fd.get() < 0 || ::ioctl(fd.get(), TUNSETIFF, &request) != 0) {
    std::perror(("frame_switch: " + name).c_str());
    std::exit(1);
  }
  return fd;
}

class FrameSwitch {
 public:
  FrameSwitch(size_t ports, uint64_t seed) {
    for (size_t i = 0; i < ports; ++i) {
      ports_.push_back({OpenTap("tap" + std::to_string(i)), SlowLink(seed + i, kFramesMax)});
    }
  }

  // Passes frames until a rule is to be read; false: the input has ended.
  bool WaitForRule() {
    std::vector<pollfd> polled = {{STDIN_FILENO, POLLIN, 0}};
    for (const Port& port : ports_) polled.push_back({port.tap.get(), POLLIN, 0});
    while (true) {
      const timespec wait = UntilDue();
      if (::ppoll(polled.data(), polled.size(), &wait, nullptr) < 0 && errno != EINTR) return false;
      for (size_t i = 0; i < ports_.size(); ++i) {
        if (polled[i + 1].revents != 0) ReadFrom(ports_[i]);
      }
      for (Port& port : ports_) PassOn(port);
      if (polled[0].revents != 0) return true;
    }
  }

  // False: it is none.
  bool Obey(const std::string& rule) {
    std::istringstream words(rule);
    std::string what;
    double value = 0;
    if (!(words >> what >> value) || value < 0) return false;
    const auto number = static_cast<size_t>(value);
    if (what == "delay") {
      const std::chrono::duration<double, std::milli> delay(value);
      for (Port& port : ports_) port.link.SetDelay(std::chrono::duration_cast<Duration>(delay));
    } else if (what == "loss" && value <= 1) {
      for (Port& port : ports_) port.link.SetLoss(value);
    } else if ((what == "cut" || what == "join") && number < ports_.size()) {
      ports_[number].cut = what == "cut";
    } else {
      return false;
    }
    return true;
  }

  nlohmann::json Counts() const {
    SlowLink::Counts sum;
    for (const Port& port : ports_) {
      sum.passed += port.link.counts().passed;
      sum.lost += port.link.counts().lost;
      sum.overflowed += port.link.counts().overflowed;
    }
    return {{"passed", sum.passed},
            {"lost", sum.lost},
            {"overflowed", sum.overflowed},
            {"refused", refused_}};
  }

 private:
  static TimePoint Now() { return Clock::Real().Now(); }

  timespec UntilDue() const {
    Duration wait = std::chrono::seconds(1);
    const TimePoint now = Now();
    for (const Port& port : ports_) {
      if (const auto due = port.link.next_due()) wait = std::min(wait, *due - now);
    }
    const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(wait).count();
    return {.tv_sec = 0, .tv_nsec = std::clamp<long>(left, 0, 999'999'999)};
  }

  static void ReadFrom(Port& port) {
    std::byte buffer[kFrameBytesMax];
    for (int turn = 0; turn < kFramesATurn; ++turn) {
      const ssize_t bytes = ::read(port.tap.get(), buffer, sizeof(buffer));
      if (bytes <= 0) return;
      if (!port.cut) port.link.Offer(Frame(buffer, buffer + bytes), Now());
    }
  }

  void PassOn(Port& from) {
    while (const auto frame = from.link.Take(Now())) {
      if (frame->size() < 6) continue;
      const bool to_all = ((*frame)[0] & std::byte{1}) != std::byte{0};
      const size_t addressed = std::to_integer<size_t>((*frame)[5]) - 1;
      for (size_t i = 0; i < ports_.size(); ++i) {
        if (&ports_[i] == &from || ports_[i].cut || !(to_all || i == addressed)) continue;
        // An interface that is down or has no room for it drops it.
        if (::write(ports_[i].tap.get(), frame->data(), frame->size()) < 0) ++refused_;
      }
    }
  }

  std::vector<Port> ports_;
  uint64_t refused_ = 0;
};

int Main(int argc, char** argv) {
  const size_t ports = argc == 3 ? std::strtoull(argv[1], nullptr, 10) : 0;
  if (ports < 2 || ports > kPortsMax) {
    std::cerr << "usage: frame_switch PORTS SEED, 2 to " << kPortsMax << " ports" << std::endl;
    return 2;
  }
  FrameSwitch frames(ports, std::strtoull(argv[2], nullptr, 10));
  std::cout << "ready" << std::endl;
  std::string rule;
  while (frames.WaitForRule()) {
    // One line is written, and read, at a time: nothing stays in the stream's buffer.
    if (!std::getline(std::cin, rule)) return 0;
    if (!frames.Obey(rule)) {
      std::cerr << "frame_switch: no rule: " << rule << std::endl;
      return 2;
    }
    std::cout << frames.Counts().dump() << std::endl;
  }
  return 1;
}

}  // namespace
}  // namespace crumb

int main(int argc, char** argv) { return crumb::Main(argc, argv); }
