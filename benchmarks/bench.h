#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "flash_dmattn/flash_dmattn.h"

// Shared by the programs: medians and output rows. A program prints rows of the records
// (benchmarks/harness/record.py), one line of JSON each; `bench.py run --case kernels` reads them.
namespace flash_dmattn::benchmark {

inline double median(std::vector<double> times) {
  const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
  std::nth_element(times.begin(), middle, times.end());
  return *middle;
}

inline constexpr double not_measured = std::numeric_limits<double>::quiet_NaN();

struct Row {
  std::string title;
  const char* side = "cuda";
  DType dtype = no_dtype;
  const char* unit = "ms";
  double forward = not_measured;
  double backward = not_measured;
  std::vector<std::pair<const char*, double>> parts;
};

inline void print(const Row& row) {
  const auto json = [](double time) {
    return std::isnan(time) ? std::string("null") : std::to_string(time);
  };
  const char* dtype = row.dtype == DType::f32    ? "float32"
                      : row.dtype == DType::bf16 ? "bfloat16"
                                                 : "float16";
  std::printf(
      R"({"case": "%s", "side": "%s", "dtype": "%s", "unit": "%s", "forward": %s, "backward": %s)",
      row.title.c_str(), row.side, dtype, row.unit, json(row.forward).c_str(),
      json(row.backward).c_str());
  const char* separator = R"(, "parts": {)";
  for (const auto& [name, time] : row.parts) {
    std::printf(R"(%s"%s": %s)", separator, name, json(time).c_str());
    separator = ", ";
  }
  std::puts("}}");
  std::fflush(stdout);
}

// The name of a case of attention in benchmarks/harness/cases.py.
inline std::string title(const std::string& kind, const Problem& p, std::int64_t window) {
  std::string text = kind + " B" + std::to_string(p.batch) + " H" + std::to_string(p.heads_q);
  if (p.heads_kv != p.heads_q) text += " Hkv" + std::to_string(p.heads_kv);
  text += " N" + std::to_string(p.seqlen_k) + " D" + std::to_string(p.head_dim);
  return window > 0 ? text + " w" + std::to_string(window) : text;
}

// Runs a program; prints an exception as one line and returns 1.
template <class Body>
int run_main(Body&& body) {
  try {
    body();
    return EXIT_SUCCESS;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return EXIT_FAILURE;
  }
}

}  // namespace flash_dmattn::benchmark
