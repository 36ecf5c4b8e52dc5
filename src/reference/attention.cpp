#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

#include "common/float_types.h"
#include "common/plan_content.h"
#include "common/tasks.h"
#include "reference/kernels.h"
#include "reference/scores.h"

// The definition in attention.h as plain loops in double: the oracle of the tests, and the backend
// that runs everything.
//
// Where double can hold what the dtypes cannot, the limits of attention.h apply where they are stated:
//   scores     to the range of fp32 (of double for f64); a NaN score to its lower end; propagate: a score that
//              an inf or NaN of q, k or bias enters is NaN, and so are out and lse of its row
//   ds         saturate: to the range of fp32 (of double), as it enters dbias
//   dt         saturate: to the gradient limit of the dtype, as it enters dq and dk
//   gradients  saturate: to the gradient limit of their dtype, on store
//   out        saturate: to the maximum of the dtype, on store
// An element that is not visible contributes to nothing, whatever its operands hold, and where gradients saturate
// neither does a visible one with p = 0. propagate: 0 * inf is NaN there.
namespace flash_dmattn::reference {
namespace {

// ---- Parallel shape ------------------------------------------------------------------------------

// The heads of a problem in `batch` x `heads` units of work that write to different places: unit
// (ub, uh) is made of the (b, hkv) with b = ub mod batch and hkv = uh mod heads, computed in ascending
// order by one worker. The sums are the same for any number of workers.
struct Units {
  std::int64_t batch;
  std::int64_t heads;

  int workers(const Execution& execution) const {
    return static_cast<int>(std::min<std::int64_t>(execution.workers, batch * heads));
  }
};

Units forward_units(const Problem& p) { return {p.batch, p.heads_kv}; }

// Heads that share elements of the bias add to the same dbias.
Units backward_units(const Problem& p) {
  const bool has_bias = p.bias_shape != BroadcastShape{};
  return {has_bias && p.bias_shape[0] == 1 ? std::min<std::int64_t>(p.batch, 1) : p.batch,
          has_bias && p.bias_shape[1] == 1 ? std::min<std::int64_t>(p.heads_kv, 1) : p.heads_kv};
}

// Calls body(batch, kv_head, worker) for all of them.
template <class Body>
void for_each_kv_head(const Problem& p, Units units, const Execution& execution, const Body& body) {
  for_each_task(execution, units.batch * units.heads, [&](std::int64_t unit, int worker) {
    for (std::int64_t b = unit / units.heads; b < p.batch; b += units.batch) {
      for (std::int64_t h = unit % units.heads; h < p.heads_kv; h += units.heads)
        body(b, h, worker);
    }
  });
}

// Calls body(row) for every query row of every head that uses one kv head.
template <class Body>
void for_each_row(const Problem& p, std::int64_t batch, std::int64_t kv_head, const Body& body) {
  const std::int64_t group = p.heads_q / p.heads_kv;
  for (std::int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
    for (std::int64_t i = 0; i < p.seqlen_q; ++i) body(Row{batch, h, kv_head, i});
  }
}

std::size_t doubles(std::int64_t count) { return static_cast<std::size_t>(count) * sizeof(double); }

// ---- Forward -------------------------------------------------------------------------------------

// Doubles of a worker: k [Sk, D], v [Sk, Dv], scores and slopes [Sk].
std::int64_t forward_scratch(const Problem& p) {
  return p.seqlen_k * (p.head_dim + value_dim_of(p) + 2);
}

void forward_row(const ForwardArgs& args, const Row& row, const double* k, const double* v,
                 double* weights, double* slopes) {
  const Problem& p = args.problem;
  HeadVector q;
  load_row(args.in.q, p.dtype, offset_of(args.in.q.stride, row.batch, row.query, row.head),
           p.head_dim, q);
  score_row(p, args.in, row, q, k, weights, slopes);

  double max = -infinity;
  for (std::int64_t j = 0; j < p.seqlen_k && !std::isnan(max); ++j) {
    max = weights[j] <= max ? max : weights[j];
  }
  const bool empty = max == -infinity;
  double sum = 0;
  for (std::int64_t j = 0; j < p.seqlen_k; ++j) {
    if (weights[j] == -infinity) continue;
    weights[j] = std::exp(weights[j] - max);
    sum += weights[j];
  }
  const std::int64_t value_dim = value_dim_of(p);
  HeadVector out = {};
  for (std::int64_t j = 0; j < p.seqlen_k; ++j) {
    if (weights[j] == -infinity || multiplies_nothing(p, weights[j])) continue;
    const double probability = weights[j] / sum;
    for (std::int64_t d = 0; d < value_dim; ++d) out[d] += probability * v[j * value_dim + d];
  }

  const std::int64_t out_offset = offset_of(args.out.stride, row.batch, row.query, row.head);
  for (std::int64_t d = 0; d < value_dim; ++d) {
    store_limited(args.out, p.dtype, p.nonfinite, largest(p.dtype), out_offset + d, out[d]);
  }
  const DType lse_dtype = softmax_dtype(p.dtype);
  const std::int64_t index = (row.batch * p.heads_q + row.head) * p.seqlen_q + row.query;
  store(args.lse.data, lse_dtype, index, empty ? -infinity : max + std::log(sum));
  if (args.lse_low.data == nullptr) return;
  // max - lse is exact where the two are close, which is where lse has lost something.
  const double low = empty ? 0 : (max - load(args.lse.data, lse_dtype, index)) + std::log(sum);
  store(args.lse_low.data, lse_dtype, index, low);
}

std::size_t forward_workspace_size(const ForwardArgs& args, const Execution& execution) {
  const int workers = forward_units(args.problem).workers(execution);
  return doubles(workers * forward_scratch(args.problem));
}

void forward(const ForwardArgs& args, const Execution& execution) {
  const Problem& p = args.problem;
  for_each_kv_head(p, forward_units(p), execution, [&](std::int64_t b, std::int64_t h, int worker) {
    double* const k = static_cast<double*>(execution.workspace) + worker * forward_scratch(p);
    double* const v = k + p.seqlen_k * p.head_dim;
    double* const scores = v + p.seqlen_k * value_dim_of(p);
    load_head(p, args.in.k, p.head_dim, b, h, k);
    load_head(p, args.in.v, value_dim_of(p), b, h, v);
    for_each_row(p, b, h, [&](const Row& row) {
      forward_row(args, row, k, v, scores, scores + p.seqlen_k);
    });
  });
}

// ---- Backward ------------------------------------------------------------------------------------

// The scratch of a worker.
struct BackwardScratch {
  double* k;       // [Sk, D]
  double* v;       // [Sk, Dv]
  double* dk;      // [Sk, D] sums, of dk / scale
  double* dv;      // [Sk, Dv] sums
  double* scores;  // [Sk]
  double* slopes;  // [Sk]

  static std::int64_t size(const Problem& p) {
    return p.seqlen_k * (2 * (p.head_dim + value_dim_of(p)) + 2);
  }

  BackwardScratch(const Problem& p, double* begin) {
    const std::int64_t keys = p.seqlen_k * p.head_dim;
    const std::int64_t values = p.seqlen_k * value_dim_of(p);
    k = begin;
    v = k + keys;
    dk = v + values;
    dv = dk + keys;
    scores = dv + values;
    slopes = scores + p.seqlen_k;
  }
};

// Elements of the bias, each of which has a sum in the workspace, in the order of a dense array.
std::int64_t bias_elements(const Problem& p) {
  return p.bias_shape[0] * p.bias_shape[1] * p.bias_shape[2] * p.bias_shape[3];
}

double& dbias_sum(const Problem& p, const Row& row, std::int64_t key, double* sums) {
  const BroadcastShape& shape = p.bias_shape;
  const std::int64_t b = shape[0] == 1 ? 0 : row.batch;
  const std::int64_t i = shape[2] == 1 ? 0 : row.query;
  const std::int64_t j = shape[3] == 1 ? 0 : key;
  const std::int64_t h = broadcast_head(p, shape, row);
  return sums[((b * shape[1] + h) * shape[2] + i) * shape[3] + j];
}

void load_dout(const BackwardArgs& args, const Row& row, double* dout) {
  const Problem& p = args.problem;
  load_row(args.dout, p.dtype, offset_of(args.dout.stride, row.batch, row.query, row.head),
           value_dim_of(p), dout);
  if (p.nonfinite == NonFinite::propagate) return;
  for (std::int64_t d = 0; d < value_dim_of(p); ++d) {
    if (!std::isfinite(dout[d])) dout[d] = 0;
  }
}

void store_gradient_row(const Problem& p, const Tensor4& tensor, std::int64_t dim,
                        std::int64_t offset, double factor, const double* row) {
  if (tensor.data == nullptr) return;
  for (std::int64_t d = 0; d < dim; ++d) {
    store_limited(tensor, p.dtype, p.nonfinite, gradient_limit(p.dtype), offset + d,
                  factor * row[d]);
  }
}

double load_dlse(const BackwardArgs& args, std::int64_t index) {
  const Problem& p = args.problem;
  if (args.dlse.data == nullptr) return 0;
  const double dlse = load(args.dlse.data, softmax_dtype(p.dtype), index);
  return p.nonfinite == NonFinite::saturate && !std::isfinite(dlse) ? 0 : dlse;
}

// Writes one row of dq and adds to the sums of dk, dv and dbias; dbias_sums is null without a bias.
void backward_row(const BackwardArgs& args, const Row& row, const BackwardScratch& scratch,
                  double* dbias_sums) {
  const Problem& p = args.problem;
  const DType lse_dtype = softmax_dtype(p.dtype);
  const std::int64_t value_dim = value_dim_of(p);
  HeadVector q, out, dout;
  HeadVector dq = {};
  load_row(args.in.q, p.dtype, offset_of(args.in.q.stride, row.batch, row.query, row.head),
           p.head_dim, q);
  load_row(args.out, p.dtype, offset_of(args.out.stride, row.batch, row.query, row.head), value_dim,
           out);
  load_dout(args, row, dout);
  score_row(p, args.in, row, q, scratch.k, scratch.scores, scratch.slopes);

  const std::int64_t index = (row.batch * p.heads_q + row.head) * p.seqlen_q + row.query;
  const double lse = load(args.lse.data, lse_dtype, index);
  const double lse_low =
      args.lse_low.data == nullptr ? 0 : load(args.lse_low.data, lse_dtype, index);
  const double delta = dot(dout, out, value_dim) - load_dlse(args, index);
  for (std::int64_t j = 0; j < p.seqlen_k; ++j) {
    if (scratch.scores[j] == -infinity) continue;
    const double probability = std::exp((scratch.scores[j] - lse) - lse_low);
    if (multiplies_nothing(p, probability)) continue;
    const std::int64_t key = j * p.head_dim;
    const std::int64_t value = j * value_dim;
    const double ds = probability * (dot(dout, scratch.v + value, value_dim) - delta);
    if (dbias_sums != nullptr && has_bias(p, row, j)) dbias_sum(p, row, j, dbias_sums) += ds;
    const double dt = ds * scratch.slopes[j];
    for (std::int64_t d = 0; d < p.head_dim; ++d) {
      dq[d] += dt * scratch.k[key + d];
      scratch.dk[key + d] += dt * q[d];
    }
    for (std::int64_t d = 0; d < value_dim; ++d) scratch.dv[value + d] += probability * dout[d];
  }
  store_gradient_row(p, args.dq, p.head_dim,
                     offset_of(args.dq.stride, row.batch, row.query, row.head), p.scale, dq);
}

void store_dbias(const BackwardArgs& args, const double* sums) {
  const Problem& p = args.problem;
  const BroadcastShape& shape = p.bias_shape;
  const double limit = gradient_limit(p.bias_dtype);
  for (std::int64_t b = 0; b < shape[0]; ++b) {
    for (std::int64_t h = 0; h < shape[1]; ++h) {
      for (std::int64_t i = 0; i < shape[2]; ++i) {
        for (std::int64_t j = 0; j < shape[3]; ++j) {
          store_limited(args.dbias, p.bias_dtype, p.nonfinite, limit,
                        offset_of(args.dbias.stride, b, h, i, j), *sums++);
        }
      }
    }
  }
}

std::size_t backward_workspace_size(const BackwardArgs& args, const Execution& execution) {
  const Problem& p = args.problem;
  const int workers = backward_units(p).workers(execution);
  return doubles(bias_elements(p) + workers * BackwardScratch::size(p));
}

void backward(const BackwardArgs& args, const Execution& execution) {
  const Problem& p = args.problem;
  double* const dbias_sums =
      args.dbias.data == nullptr ? nullptr : static_cast<double*>(execution.workspace);
  if (dbias_sums != nullptr) std::fill_n(dbias_sums, bias_elements(p), 0.0);
  double* const workers_begin = static_cast<double*>(execution.workspace) + bias_elements(p);

  for_each_kv_head(
      p, backward_units(p), execution, [&](std::int64_t b, std::int64_t h, int worker) {
        const BackwardScratch scratch(p, workers_begin + worker * BackwardScratch::size(p));
        load_head(p, args.in.k, p.head_dim, b, h, scratch.k);
        load_head(p, args.in.v, value_dim_of(p), b, h, scratch.v);
        std::fill_n(scratch.dk, p.seqlen_k * p.head_dim, 0.0);
        std::fill_n(scratch.dv, p.seqlen_k * value_dim_of(p), 0.0);
        for_each_row(p, b, h,
                     [&](const Row& row) { backward_row(args, row, scratch, dbias_sums); });
        for (std::int64_t j = 0; j < p.seqlen_k; ++j) {
          store_gradient_row(p, args.dk, p.head_dim, offset_of(args.dk.stride, b, j, h), p.scale,
                             scratch.dk + j * p.head_dim);
          store_gradient_row(p, args.dv, value_dim_of(p), offset_of(args.dv.stride, b, j, h), 1,
                             scratch.dv + j * value_dim_of(p));
        }
      });
  if (dbias_sums != nullptr) store_dbias(args, dbias_sums);
}

template <class Content, class Args>
PlanFunction<Args> find_plan(const Problem& p, std::string& reason) {
  reason = decline_other_device(p, "reference", Device::cpu);
  return reason.empty() ? make_plan<Content, Args> : nullptr;
}

struct ForwardPlan : DirectPlan<ForwardArgs, forward_workspace_size, forward> {
  using DirectPlan::DirectPlan;
  std::string kernel_name() const { return "reference forward"; }
};

struct BackwardPlan : DirectPlan<BackwardArgs, backward_workspace_size, backward> {
  using DirectPlan::DirectPlan;
  std::string kernel_name() const { return "reference backward"; }
};

}  // namespace

}  // namespace flash_dmattn::reference

namespace flash_dmattn {

const Backend reference_backend = {
    .name = "reference",
    .device = Device::cpu,
    .info = [] { return BackendInfo{"reference", true, "loops in double"}; },
    .find_forward = reference::find_plan<reference::ForwardPlan, ForwardArgs>,
    .find_backward = reference::find_plan<reference::BackwardPlan, BackwardArgs>,
    .find_score_projection = reference::find_score_projection,
    .kernels = [] { return std::vector<std::string>{"reference forward", "reference backward"}; },
    .kv = &reference::kv_backend,
};

}  // namespace flash_dmattn
