#pragma once

#include <benchmark/benchmark.h>

#include <memory>
#include <string>

#include "flash_dmattn/flash_dmattn.h"

// Shared by the programs, which use Google Benchmark. A benchmark is named <case>/<dtype>/<part>.
namespace flash_dmattn::bench {

inline std::string name(const std::string& title, DType dtype, const char* part) {
  const char* type = dtype == DType::f32    ? "float32"
                     : dtype == DType::bf16 ? "bfloat16"
                                            : "float16";
  return title + "/" + type + "/" + part;
}

// The name of a case of attention in benchmarks/harness/case.py.
inline std::string title(const std::string& kind, const Problem& p, std::int64_t window) {
  std::string text = kind + " B" + std::to_string(p.batch) + " H" + std::to_string(p.heads_q);
  if (p.heads_kv != p.heads_q) text += " Hkv" + std::to_string(p.heads_kv);
  text += " N" + std::to_string(p.seqlen_k) + " D" + std::to_string(p.head_dim);
  return window > 0 ? text + " w" + std::to_string(window) : text;
}

// Runs what has been registered, as the options of Google Benchmark say; the exit status.
inline int run_all(int argc, char** argv) {
  ::benchmark::Initialize(&argc, argv);
  if (::benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  ::benchmark::RunSpecifiedBenchmarks();
  return 0;
}

// The set-up of a case, kept until another case asks for its own: all repetitions and parts of a case use one.
template <class Setup, class Case>
Setup& setup_of(const Case& c) {
  static const Case* made = nullptr;
  static std::unique_ptr<Setup> setup;
  if (made != &c) {
    setup.reset();
    setup = std::make_unique<Setup>(c);
    made = &c;
  }
  return *setup;
}

}  // namespace flash_dmattn::bench
