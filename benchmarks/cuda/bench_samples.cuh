#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "bench_problem.cuh"

// Sampled rows of a run against double.
namespace flash_dmattn::benchmark {

// The largest error of sampled rows, relative to the largest magnitude of the sample.
struct Check {
  double error = 0;
  double magnitude = 0;
  void add(double actual, double expected) {
    const double difference = std::abs(actual - expected);
    error = std::isnan(difference) ? INFINITY : std::max(error, difference);
    magnitude = std::max(magnitude, std::abs(expected));
  }
  double relative() const { return magnitude > 0 ? error / magnitude : error; }
};

struct Samples {
  Check out, lse, dq, dk, dv, dbias;
};

inline Samples check_samples(const Run& run) {
  const BenchCase& c = run.c;
  const auto q = run.q.host(), k = run.k.host(), v = run.v.host(), out = run.out.host();
  const auto dout = run.dout.host(), dq = run.dq.host(), dk = run.dk.host(), dv = run.dv.host();
  const auto bias = c.pair_window > 0 ? std::vector<Bf16>() : run.bias.host();
  const auto dbias = c.pair_window > 0 ? std::vector<Bf16>() : run.dbias.host();
  const auto lse = run.lse.host();
  const int d = c.head_dim, n = c.seqlen, group = c.heads_q / c.heads_kv;
  const double scale = default_scale(d);
  const auto row = [&](const std::vector<Bf16>& x, int b, int i, int h, int heads) {
    return x.data() + ((static_cast<std::int64_t>(b) * n + i) * heads + h) * d;
  };
  const auto dot = [&](const Bf16* a, const Bf16* b) {
    double sum = 0;
    for (int e = 0; e < d; ++e)
      sum +=
          static_cast<double>(__bfloat162float(a[e])) * static_cast<double>(__bfloat162float(b[e]));
    return sum;
  };
  std::vector<std::uint8_t> mask_row(static_cast<std::size_t>(n), 1);
  std::vector<Bf16> bias_row(static_cast<std::size_t>(n));
  const auto load_pair_row = [&](int b, int h, int i) {
    const std::size_t at = ((static_cast<std::size_t>(b) * c.heads_kv + h / group) * n + i) * n;
    check(cudaMemcpy(mask_row.data(), run.mask.data() + at, n, cudaMemcpyDeviceToHost), "copy");
    check(cudaMemcpy(bias_row.data(), run.bias.data() + at, n * 2, cudaMemcpyDeviceToHost), "copy");
  };
  const auto score = [&](int b, int h, int i, int j) {
    if (j > i) return -INFINITY + 0.0;
    double s = scale * dot(row(q, b, i, h, c.heads_q), row(k, b, j, h / group, c.heads_kv));
    if (c.shown != Shown::all) {
      const KeyInterval interval =
          run.host_intervals[(static_cast<std::size_t>(b) * c.heads_kv + h / group) * n + j];
      if (i < interval.first || i >= interval.last) return -INFINITY + 0.0;
    }
    if (c.bias)
      s += static_cast<double>(
          __bfloat162float(bias[(static_cast<std::size_t>(b) * c.heads_kv + h / group) * n + j]));
    if (c.pair_window > 0) {
      if (mask_row[j] == 0) return -INFINITY + 0.0;
      s += static_cast<double>(__bfloat162float(bias_row[j]));
    }
    return s;
  };
  Samples samples;
  // A row of the gradient of a dense bias, summed over the heads of the group.
  const auto check_pair_gradients = [&](int b, int hk, int i) {
    std::vector<double> gradient(n);
    for (int h = hk * group; h < (hk + 1) * group; ++h) {
      const Bf16* go = row(dout, b, i, h, c.heads_q);
      const double delta = dot(go, row(out, b, i, h, c.heads_q));
      const double row_lse =
          static_cast<double>(lse[(static_cast<std::size_t>(b) * c.heads_q + h) * n + i]);
      for (int j = 0; j <= i; ++j) {
        const double s = score(b, h, i, j);
        if (s == -INFINITY) continue;
        gradient[j] += std::exp(s - row_lse) * (dot(go, row(v, b, j, hk, c.heads_kv)) - delta);
      }
    }
    std::vector<Bf16> actual(static_cast<std::size_t>(n));
    const std::size_t at = ((static_cast<std::size_t>(b) * c.heads_kv + hk) * n + i) * n;
    check(cudaMemcpy(actual.data(), run.dbias.data() + at, n * 2, cudaMemcpyDeviceToHost), "copy");
    for (int j = 0; j < n; ++j)
      samples.dbias.add(static_cast<double>(__bfloat162float(actual[j])), gradient[j]);
  };
  for (int sample = 0; sample < 12; ++sample) {
    const int b = sample % c.batch, h = sample * 5 % c.heads_q;
    const int i = sample == 0 ? 0 : static_cast<int>(mix(sample) % n);
    if (c.pair_window > 0) load_pair_row(b, h, i);
    std::vector<double> p(n);
    double max = -INFINITY, sum = 0;
    for (int j = 0; j <= i; ++j) max = std::max(max, p[j] = score(b, h, i, j));
    for (int j = 0; j <= i; ++j) sum += p[j] = max == -INFINITY ? 0 : std::exp(p[j] - max);
    if (c.pair_window > 0) check_pair_gradients(b, h / group, i);
    std::vector<double> o(d), g(d);
    const Bf16* go = row(dout, b, i, h, c.heads_q);
    const double delta = dot(go, row(out, b, i, h, c.heads_q));
    for (int j = 0; j <= i; ++j) {
      if (p[j] == 0) continue;
      const double ds = p[j] / sum * (dot(go, row(v, b, j, h / group, c.heads_kv)) - delta);
      for (int e = 0; e < d; ++e) {
        o[e] += p[j] / sum *
                static_cast<double>(__bfloat162float(row(v, b, j, h / group, c.heads_kv)[e]));
        g[e] += ds * scale *
                static_cast<double>(__bfloat162float(row(k, b, j, h / group, c.heads_kv)[e]));
      }
    }
    for (int e = 0; e < d; ++e) {
      samples.out.add(static_cast<double>(__bfloat162float(row(out, b, i, h, c.heads_q)[e])), o[e]);
      samples.dq.add(static_cast<double>(__bfloat162float(row(dq, b, i, h, c.heads_q)[e])), g[e]);
    }
    if (sum > 0)
      samples.lse.add(
          static_cast<double>(lse[(static_cast<std::size_t>(b) * c.heads_q + h) * n + i]),
          max + std::log(sum));
  }
  if (c.pair_window > 0) return samples;
  for (int sample = 0; sample < 4; ++sample) {
    const int b = sample % c.batch, hk = sample * 3 % c.heads_kv;
    const int j = static_cast<int>(mix(sample + 100) % n);
    std::vector<double> gk(d), gv(d);
    double gb = 0;
    for (int h = hk * group; h < (hk + 1) * group; ++h) {
      for (int i = j; i < n; ++i) {
        const double s = score(b, h, i, j);
        if (s == -INFINITY) continue;
        const double p = std::exp(
            s - static_cast<double>(lse[(static_cast<std::size_t>(b) * c.heads_q + h) * n + i]));
        const Bf16* go = row(dout, b, i, h, c.heads_q);
        const double ds =
            p * (dot(go, row(v, b, j, hk, c.heads_kv)) - dot(go, row(out, b, i, h, c.heads_q)));
        gb += ds;
        for (int e = 0; e < d; ++e) {
          gv[e] += p * static_cast<double>(__bfloat162float(go[e]));
          gk[e] +=
              ds * scale * static_cast<double>(__bfloat162float(row(q, b, i, h, c.heads_q)[e]));
        }
      }
    }
    for (int e = 0; e < d; ++e) {
      samples.dk.add(static_cast<double>(__bfloat162float(row(dk, b, j, hk, c.heads_kv)[e])),
                     gk[e]);
      samples.dv.add(static_cast<double>(__bfloat162float(row(dv, b, j, hk, c.heads_kv)[e])),
                     gv[e]);
    }
    if (c.bias)
      samples.dbias.add(static_cast<double>(__bfloat162float(
                            dbias[(static_cast<std::size_t>(b) * c.heads_kv + hk) * n + j])),
                        gb);
  }
  return samples;
}

}  // namespace flash_dmattn::benchmark
