// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// The program as it is started by hand or by systemd.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <memory>
#include <sstream>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/common/temporary_folder.h"
#include "tests/server/test_client.h"

namespace crumb::server {
namespace {

using testing::HasSubstr;

class CrumbdTest : public testing::Test {
 protected:
  CrumbdTest() {
    Write("listen:\n  socket_dir: " + folder_.path() +
          "\n  tcp: 127.0.0.1:0\nadmin:\n  listen: 127.0.0.1:0\nstore:\n  host:\n    bytes_max: "
          "32MiB\n    slab_bytes: 16MiB\n  ssd:\n    path: " +
          folder_.path() + "/data\n    bytes_max: 128MiB\n");
  }
  ~CrumbdTest() override {
    if (pid_ > 0) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
    }
  }

  void Write(const std::string& text) const { std::ofstream(config_) << text; }
  static std::string Text(const std::string& path) {
    std::stringstream text;
    text << std::ifstream(path).rdbuf();
    return text.str();
  }

  // Starts the program, whose output goes to output().
  void Start(std::vector<std::string> arguments) {
    pid_ = ::fork();
    if (pid_ != 0) return;
    arguments.insert(arguments.begin(), CRUMBD_PATH);
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    if (std::freopen(output_.c_str(), "w", stdout) == nullptr ||
        ::dup2(STDOUT_FILENO, STDERR_FILENO) < 0) {
      ::_exit(99);
    }
    ::execv(argv[0], argv.data());
    ::_exit(98);
  }
  // The exit code, or minus the signal that ended it.
  int Wait() {
    int status = 0;
    ::waitpid(pid_, &status, 0);
    pid_ = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }
  int Run(std::vector<std::string> arguments) {
    Start(std::move(arguments));
    return Wait();
  }
  std::string output() const { return Text(output_); }

  // Starts the daemon and waits until it serves.
  void Serve() {
    Start({"--config", config_});
    for (int i = 0; i < 30'000 && Text(endpoints_).empty(); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    ASSERT_THAT(Text(endpoints_), HasSubstr("crumbd.sock")) << output();
  }

  TemporaryFolder folder_;
  const std::string config_ = folder_.path() + "/crumbd.yaml";
  const std::string output_ = folder_.path() + "/output";
  const std::string endpoints_ = folder_.path() + "/crumbd.endpoints.json";
  pid_t pid_ = 0;
};

TEST_F(CrumbdTest, ChecksAndPrintsItsConfiguration) {
  EXPECT_EQ(Run({"--config", config_, "--check"}), 0) << output();
  EXPECT_EQ(Run({"--config", config_, "--print-config"}), 0);
  EXPECT_THAT(output(), HasSubstr("bytes_max: 32MiB"));
  EXPECT_THAT(output(), HasSubstr("unix: " + folder_.path()));
  EXPECT_EQ(Run({"--version"}), 0);
  EXPECT_THAT(output(), HasSubstr("crumbd "));
  EXPECT_EQ(Run({"--config", config_, "--check"}), 0);
  EXPECT_THAT(output(), HasSubstr("memory: the host tier takes 32MiB"));
  Write("listen:\n  socket_dir: /nonexistent/folder\n");
  EXPECT_EQ(Run({"--config", config_, "--check-config"}), 0) << output();
  Write("store:\n  host:\n    bytes_max: 1000TiB\n");
  EXPECT_EQ(Run({"--config", config_, "--check-config"}), 0) << output();
  Write("listen:\n  socket_dir: " + folder_.path() +
        "\nadmin:\n  listen: \"\"\nstore:\n  host:\n    bytes_max: 1000TiB\n");
  for (const char* flag : {"--check", "--print-config"}) {
    EXPECT_EQ(Run({"--config", config_, flag}), flag[2] == 'c' ? 1 : 0) << output();
  }
  EXPECT_EQ(Run({"--config", config_}), 1);
  EXPECT_THAT(output(), HasSubstr("store.host.bytes_max is 1000TiB"));
  Write("listen:\n  sockets: /x\n");
  EXPECT_EQ(Run({"--config", config_, "--check"}), 1);
  EXPECT_THAT(output(), HasSubstr(":2: unknown key listen.sockets"));
  Write("listen:\n  socket_dir: /nonexistent/folder\n");
  EXPECT_EQ(Run({"--config", config_, "--check"}), 1);
  EXPECT_THAT(output(), HasSubstr("/nonexistent/folder/ does not exist"));
  EXPECT_EQ(Run({"--config", "/nonexistent.yaml"}), 1);
  EXPECT_THAT(output(), HasSubstr("/nonexistent.yaml"));
  EXPECT_EQ(Run({"--nonsense"}), 2);
  EXPECT_THAT(output(), HasSubstr("crumbd: The following argument was not expected: --nonsense"));
}

TEST_F(CrumbdTest, ASecondOneSaysWhoIsInTheWay) {
  Serve();
  const pid_t first = std::exchange(pid_, 0);
  EXPECT_EQ(Run({"--config", config_}), 1);
  EXPECT_THAT(output(), HasSubstr("another process listens at " + folder_.path()));
  pid_ = first;
  ::kill(pid_, SIGTERM);
  EXPECT_EQ(Wait(), 0);
}

TEST_F(CrumbdTest, StopsCleanlyUnderLoadAndStartsAgainAfterAKill) {
  for (const int signal : {SIGTERM, SIGKILL, SIGINT}) {
    Serve();
    std::atomic<bool> stop{false};
    std::atomic<int> calls{0};
    std::thread load([&] {
      TestClient client(folder_.path() + "/crumbd.fd.sock",
                        "unix:" + folder_.path() + "/crumbd.sock");
      if (!client.OpenKeyspace().ok()) return;
      const auto context = client.Context();
      const auto stream = client.stub().Session(context.get());  // one that would last
      for (int i = 0; !stop.load(); ++i) {
        v1::CommitResponse committed;
        if (!client.Commit(client.Fragment(TestClient::Key(i), 1), &committed).ok()) break;
        v1::AcquireResponse found;
        if (!client.Acquire(TestClient::Keys(0, 64), &found).ok()) break;
        if (!client.Release(found.lease()).ok()) break;
        calls.fetch_add(1);
      }
      context->TryCancel();
      stream->Finish();
    });
    for (int i = 0; i < 10'000 && calls.load() < 50; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_GE(calls.load(), 50);
    ::kill(pid_, signal);
    EXPECT_EQ(Wait(), signal == SIGKILL ? -SIGKILL : 0) << output();
    stop.store(true);
    load.join();
    if (signal == SIGKILL) {
      EXPECT_EQ(std::remove(endpoints_.c_str()), 0);  // so that Serve waits for the next
    } else {
      EXPECT_EQ(Text(endpoints_), "");
      EXPECT_THAT(output(), HasSubstr("stopped"));
    }
  }
}

}  // namespace
}  // namespace crumb::server
