// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "gtest/gtest.h"
#include "tests/common/temporary_folder.h"

namespace crumb {

// A temporary folder of certificates, made with the openssl command; gone on destruction.
class TestCertificates {
 public:
  // Paths of NAME.pem and NAME.key of a certificate that was made.
  std::string cert(const std::string& name) const { return folder_.File(name + ".pem"); }
  std::string key(const std::string& name) const { return folder_.File(name + ".key"); }
  std::string path(const std::string& name) const { return folder_.File(name); }

  // A new authority.
  void MakeAuthority(const std::string& name) const {
    Run("req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=" + name +
        " -keyout " + key(name) + " -out " + cert(name));
  }

  // A certificate of `authority`, for 127.0.0.1 and the DNS name `dns`. `dates`: empty, or
  // openssl's -not_before/-not_after as `openssl ca` knows them.
  void Make(const std::string& name, const std::string& authority, const std::string& dns,
            const std::string& dates = "") const {
    std::ofstream(path("names")) << "subjectAltName=IP:127.0.0.1,DNS:" << dns << "\n";
    Run("req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=" + name + " -keyout " +
        key(name) + " -out " + path("request"));
    std::ofstream(path("ca.cnf")) << "[ca]\ndefault_ca=d\n[d]\ndatabase=" << path("index")
                                  << "\nnew_certs_dir=" << folder_.path()
                                  << "\nrand_serial=1\nunique_subject=no\ndefault_md="
                                     "sha256\npolicy=p\n[p]\ncommonName=supplied\n";
    std::ofstream(path("index"), std::ios::app).flush();
    Run("ca -batch -notext -config " + path("ca.cnf") + " -extfile " + path("names") + " -cert " +
        cert(authority) + " -keyfile " + key(authority) + " -in " + path("request") + " -out " +
        cert(name) + (dates.empty() ? " -days 2" : " " + dates));
  }

  // Puts one certificate and its key in the place of another.
  void Replace(const std::string& name, const std::string& with) const {
    std::filesystem::rename(key(with), key(name));
    std::filesystem::rename(cert(with), cert(name));
  }

 private:
  void Run(const std::string& arguments) const {
    const std::string log = path("openssl.log");
    const std::string command = "openssl " + arguments + " >" + log + " 2>&1";
    if (std::system(command.c_str()) == 0) return;
    std::ifstream text(log);
    ADD_FAILURE() << command << "\n" << text.rdbuf();
  }

  const TemporaryFolder folder_;
};

}  // namespace crumb
