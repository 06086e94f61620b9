// A small test framework: self-registering cases, throwing checks, selection by name.
//
//   CASE(heap_gives_back) { CHECK(heap.take(1) == 0); }
//
// Include it in one source file per executable. `executable text...` runs the cases whose names
// contain one of the texts; `--list` prints all names.
#pragma once

#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/error.h"

namespace fastdist::test {

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Case {
  const char* name;
  void (*run)();
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

struct Registration {
  Registration(const char* name, void (*run)()) { cases().push_back({name, run}); }
};

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  throw Failure(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

// Runs `call`, which must throw an Error with `code`, and returns the error.
template <class Call>
Error check_throws(ErrorCode code, const char* file, int line, const char* text, Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    if (error.code() == code) return error;
    fail(file, line, std::string(text) + " threw another error: " + error.what());
  }
  fail(file, line, std::string(text) + " did not throw");
}

inline int run_cases(int argc, char** argv) {
  const auto is_wanted = [&](const char* name) {
    for (int i = 1; i < argc; ++i) {
      if (std::strstr(name, argv[i]) != nullptr) return true;
    }
    return argc == 1;
  };
  if (argc == 2 && std::strcmp(argv[1], "--list") == 0) {
    for (const Case& c : cases()) std::printf("%s\n", c.name);
    return 0;
  }
  std::setvbuf(stdout, nullptr, _IONBF, 0);  // print before a case crashes or hangs
  int ran = 0;
  int failed = 0;
  for (const Case& c : cases()) {
    if (!is_wanted(c.name)) continue;
    ++ran;
    std::printf("%-56s ", c.name);
    const auto start = std::chrono::steady_clock::now();
    std::string problem;
    try {
      c.run();
    } catch (const std::exception& error) {
      problem = error.what();
    }
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    std::printf("%s %.2f s\n", problem.empty() ? "ok" : "FAILED", took.count());
    if (problem.empty()) continue;
    ++failed;
    std::printf("  %s\n", problem.c_str());
  }
  std::printf("%d of %d cases failed\n", failed, ran);
  return failed == 0 && ran > 0 ? 0 : 1;
}

}  // namespace fastdist::test

#define CASE(name)                                                                     \
  static void case_##name();                                                           \
  static const ::fastdist::test::Registration registration_##name{#name, case_##name}; \
  static void case_##name()

#define CHECK(condition)                                                      \
  do {                                                                        \
    if (!(condition)) ::fastdist::test::fail(__FILE__, __LINE__, #condition); \
  } while (false)

// `detail` is streamed into the message: CHECK_THAT(a == b, "at " << i).
#define CHECK_THAT(condition, detail)                            \
  do {                                                           \
    if (!(condition)) {                                          \
      std::ostringstream detail_;                                \
      detail_ << #condition << ": " << detail;                   \
      ::fastdist::test::fail(__FILE__, __LINE__, detail_.str()); \
    }                                                            \
  } while (false)

#define CHECK_THROWS(code, expression) \
  ::fastdist::test::check_throws(code, __FILE__, __LINE__, #expression, [&] { expression; })

int main(int argc, char** argv) { return fastdist::test::run_cases(argc, argv); }
