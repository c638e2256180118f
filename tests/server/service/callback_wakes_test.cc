// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/service/callback_wakes.h"

#include <sys/syscall.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/clock.h"
#include "grpcpp/generic/async_generic_service.h"
#include "grpcpp/health_check_service_interface.h"
#include "grpcpp/server_builder.h"
#include "gtest/gtest.h"

namespace crumb::server {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// gRPC's callback threads of this process.
std::vector<std::filesystem::path> CallbackThreads() {
  std::vector<std::filesystem::path> threads;
  for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(thread.path() / "comm"), name);
    if (name == "nexting_thread") threads.push_back(thread.path());
  }
  return threads;
}

// Whether the thread is in a sleep that nothing but time ends.
bool Sleeps(const std::filesystem::path& thread) {
  long call = -1;  // none while it runs
  std::ifstream(thread / "syscall") >> call;
  return call == SYS_clock_nanosleep || call == SYS_nanosleep;
}

bool AllSleep() {
  const auto threads = CallbackThreads();
  const auto all = [&] { return std::all_of(threads.begin(), threads.end(), Sleeps); };
  // gRPC has two at least; a sleep that ended between two looks does not count.
  return threads.size() >= 2 && all() && all();
}

// Looks until all sleep, or for `most`.
bool SawAllSleep(Duration most) {
  const TimePoint end = Clock::Real().Now() + most;
  while (Clock::Real().Now() < end) {
    if (AllSleep()) return true;
    std::this_thread::sleep_for(milliseconds(2));
  }
  return false;
}

// With a service of the callback kind, as crumbd's are.
std::unique_ptr<grpc::Server> HealthServer(grpc::CallbackGenericService& service) {
  grpc::EnableDefaultHealthCheckService(true);
  grpc::ServerBuilder builder;
  builder.RegisterCallbackGenericService(&service);
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  return builder.BuildAndStart();
}

TEST(CallbackWakesTest, AThreadIsAlwaysThere) {
  grpc::CallbackGenericService service;
  const auto server = HealthServer(service);
  ASSERT_NE(server, nullptr);
  // Without the wakes threads must sleep: else this test would see nothing.
  ASSERT_TRUE(SawAllSleep(seconds(60))) << "this gRPC's idle callback threads do not sleep";
  CallbackWakes wakes(*server);
  // From the end of one of these sleeps on: that thread takes the first call.
  while (AllSleep()) std::this_thread::sleep_for(milliseconds(2));
  EXPECT_FALSE(SawAllSleep(seconds(4)));
}

TEST(CallbackWakesTest, EndsBeforeItsServer) {
  grpc::CallbackGenericService service;
  const auto server = HealthServer(service);
  ASSERT_NE(server, nullptr);
  for (int i = 0; i < 20; ++i) CallbackWakes wakes(*server);
  server->Shutdown();
}

}  // namespace
}  // namespace crumb::server
