#include "cpu/make_task.h"

#include "cpu/schedule.h"

namespace flash_dmattn::cpu {
namespace {

// Up to these limits a call is bound by memory bandwidth. Above them, packing a block of keys for fast products pays.
constexpr std::int64_t max_queries = 64;
constexpr std::int64_t max_rows = 64;

}  // namespace

Rows rows_of(const ConstTensor4& tensor) {
  return {const_cast<void*>(tensor.data), tensor.stride[0], tensor.stride[1], tensor.stride[2]};
}

Term term_of(const ConstTensor4& tensor, DType dtype, const Problem& p,
             const BroadcastShape& shape) {
  if (tensor.data == nullptr) return {};
  const std::int64_t group = p.heads_q / p.heads_kv;
  Term term{.data = const_cast<void*>(tensor.data), .dtype = dtype};
  term.batch = shape[0] == 1 ? 0 : tensor.stride[0];
  if (shape[1] != 1) {
    const bool per_query_head = shape[1] == p.heads_q;
    term.kv_head = tensor.stride[1] * (per_query_head ? group : 1);
    term.group_head = per_query_head && group > 1 ? tensor.stride[1] : 0;
  }
  term.query = shape[2] == 1 ? 0 : tensor.stride[2];
  term.key = shape[3] == 1 ? 0 : tensor.stride[3];
  return term;
}

Task task_of(const Problem& p, const Inputs& in) {
  Task t{};
  t.batch = p.batch;
  t.heads_kv = p.heads_kv;
  t.group = p.heads_q / p.heads_kv;
  t.seqlen_q = p.seqlen_q;
  t.seqlen_k = p.seqlen_k;
  t.head_dim = static_cast<int>(p.head_dim);
  t.value_dim = static_cast<int>(value_dim_of(p));
  t.head_dim_padded = (t.head_dim + 15) / 16 * 16;
  t.dtype = p.dtype;
  t.scale = static_cast<float>(p.scale);
  t.softcap = static_cast<float>(p.softcap);
  t.mask_value = static_cast<float>(mask_value(p.bias_dtype));
  t.bias_delay = p.bias_delay;
  t.causal = p.causal;
  t.saturate = p.nonfinite == NonFinite::saturate;
  t.q = rows_of(in.q);
  t.k = rows_of(in.k);
  t.v = rows_of(in.v);
  t.mask = term_of(in.mask, DType::f32, p, p.mask_shape);
  t.bias = term_of(in.bias, p.bias_dtype, p, p.bias_shape);
  t.intervals = in.visibility.intervals;
  t.tile_queries = static_cast<int>(tile_queries(p));
  t.tiles = (p.seqlen_q + t.tile_queries - 1) / t.tile_queries;
  t.few_queries = t.seqlen_q <= max_queries && t.tile_queries * t.group <= max_rows;
  return t;
}

bool shares_keys(const Task& t) { return t.intervals.data == nullptr && t.tiles > 1; }

std::int64_t all_key_blocks(const Task& t) { return t.batch * t.heads_kv * t.key_blocks(); }

bool is_empty(const Problem& p) { return p.batch == 0 || p.heads_q == 0 || p.heads_kv == 0; }

}  // namespace flash_dmattn::cpu
