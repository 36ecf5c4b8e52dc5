#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "arguments.h"
#include "device.h"

// The operators of KV caches (kv_cache.h). A cache is six tensors that the operators change in place, of which the slots
// beyond those of the rule are for pending tokens:
//
//   k_cache           [B, Hkv, slots, D], rows dense
//   v_cache           [B, Hkv, slots, Dv], rows dense, Dv <= D
//   score_cache       float32 [B, Hkv, slots]
//   positions         int32 [B, Hkv, slots]
//   counts            int32 [B, Hkv, 8], the members of a SlotCount
//   seen              int32 [B]
//
// If heads have windows of different sizes, the first four are [B, total, ...], head by head.
//
// Rows are dense, but may be any distance apart, except in kv_append, kv_pending_intervals and kv_commit. If an operator
// takes `rows`, int32 [B], row b of its other arguments belongs to row rows[b] of the cache. A negative number is no row
// (CacheRows in kv_cache.h).
//
// The rule of a cache is two arguments: integers {sink_tokens, recent_window, recent_competes, windows...}, with one window
// or one for each kv head, and score_threshold.
namespace flash_dmattn::binding {
namespace {

// Throws unless the tensor has this shape and type, and the device of a cache.
void expect(const Tensor& tensor, const char* name, Shape shape, ScalarType type,
            const Tensor& k_cache) {
  binding::expect(tensor, name, shape, type, k_cache, "k_cache");
}

// Does what binding::expect does, and returns the stride of a row. Throws if the rows are not contiguous, too: the array
// is changed in place, so that no copy can replace it.
std::int64_t expect_dense_rows(const Tensor& tensor, const char* name, Shape shape, ScalarType type,
                               const Tensor& like) {
  expect(tensor, name, shape, type, like);
  std::int64_t stride = 1;
  for (std::int64_t d = tensor.dim() - 1; d > 0; --d) {
    if (tensor.size(d) > 1 && tensor.stride(d) != stride) {
      throw InvalidArgument(name, "rows that are not contiguous", "contiguous ones");
    }
    stride *= tensor.size(d);
  }
  return tensor.size(0) > 1 ? tensor.stride(0) : stride;
}

// Throws as well unless the array is contiguous.
void expect_dense(const Tensor& tensor, const char* name, Shape shape, ScalarType type,
                  const Tensor& like) {
  expect(tensor, name, shape, type, like);
  if (!tensor.is_contiguous()) {
    throw InvalidArgument(name, "a tensor that is not contiguous", "a contiguous one");
  }
}

struct CacheTensors {
  const Tensor& k;
  const Tensor& v;
  const Tensor& scores;
  const Tensor& positions;
  const Tensor& counts;
  const Tensor& seen;
};

template <class T>
T* data_of(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

// A rule from an operator's arguments, which it may point to.
SelectionRule rule_of(const std::vector<std::int64_t>& rule, double score_threshold,
                      std::int64_t heads) {
  const auto windows = static_cast<std::int64_t>(rule.size()) - 3;
  if (windows < 1 || (windows != 1 && windows != heads)) {
    throw InvalidArgument("rule", std::to_string(windows) + " windows",
                          "one, or one for each of " + std::to_string(heads) + " kv heads");
  }
  const std::int64_t* const sizes = rule.data() + 3;
  return {.window = *std::max_element(sizes, sizes + windows),
          .recent_window = rule[1],
          .recent_competes = rule[2] != 0,
          .sink_tokens = rule[0],
          .score_threshold = score_threshold,
          .head_windows = windows > 1 ? sizes : nullptr};
}

// The number of kv heads. The slots of heads with different numbers of slots have no dimension for them.
std::int64_t heads_of(const CacheTensors& c) {
  if (c.k.dim() == 4) return c.k.size(1);
  if (c.counts.dim() != 3)
    throw InvalidArgument("counts", shape_text(c.counts), "shape [B, Hkv, 8]");
  return c.counts.size(1);
}

// Slots [B, Hkv, slots, D] or [B, total, D].
Tensor4 slots_view(const Tensor& t) {
  if (t.dim() == 4) return mutable_view4(t);
  return {t.mutable_data_ptr(), {t.stride(0), 0, t.stride(1), 1}};
}

// Sets the number of pending tokens for which the tensors have slots.
void set_chunk(KvCacheShape& shape, const Tensor& k) {
  const bool equal = shape.has_equal_heads();
  if (equal != (k.dim() == 4)) {
    throw InvalidArgument("k_cache", shape_text(k),
                          equal
                              ? "shape [B, Hkv, slots, D]"
                              : "shape [B, total, D], since heads have windows of different sizes");
  }
  const std::int64_t slots = equal ? k.size(2) : k.size(1);
  const std::int64_t places = equal ? shape.most_places() : shape.total_slots();
  if (slots < places) {
    throw InvalidArgument(
        "k_cache", std::to_string(slots) + " slots",
        "at least " + std::to_string(places) + ": the sinks, the window and the recent keys");
  }
  const std::int64_t shares = equal ? 1 : shape.heads_kv;
  if ((slots - places) % shares != 0) {
    throw InvalidArgument("k_cache", std::to_string(slots) + " slots",
                          std::to_string(places) + " and a multiple of " + std::to_string(shares) +
                              ": as many for pending tokens in each head");
  }
  shape.chunk = (slots - places) / shares;
}

// The rows of the tensors, [R, ...].
CacheRows rows_of(const CacheTensors& c, const OptionalTensor& index) {
  constexpr std::int64_t numbers = sizeof(SlotCount) / sizeof(std::int32_t);
  const std::int64_t count = c.k.size(0), heads = heads_of(c);
  const auto expect_slots = [&](const Tensor& tensor, const char* name, ScalarType type) {
    return c.k.dim() == 3 ? expect_dense_rows(tensor, name, {count, c.k.size(1)}, type, c.k)
                          : expect_dense_rows(tensor, name, {count, heads, c.k.size(2)}, type, c.k);
  };
  CacheRows rows{.count = count};
  rows.slot_stride = expect_slots(c.scores, "score_cache", ScalarType::Float);
  const std::int64_t position_stride = expect_slots(c.positions, "positions", ScalarType::Int);
  if (position_stride != rows.slot_stride) {
    throw InvalidArgument("positions",
                          std::to_string(position_stride) + " elements from row to row",
                          std::to_string(rows.slot_stride) + ", as in score_cache");
  }
  const std::int64_t counts_stride =
      expect_dense_rows(c.counts, "counts", {count, heads, numbers}, ScalarType::Int, c.k);
  if (counts_stride % numbers != 0) {
    throw InvalidArgument("counts", std::to_string(counts_stride) + " elements from row to row",
                          "a multiple of " + std::to_string(numbers));
  }
  rows.count_stride = counts_stride / numbers;
  rows.seen_stride = expect_dense_rows(c.seen, "seen", {count}, ScalarType::Int, c.k);
  if (!index) return rows;
  if (index->dim() != 1) throw InvalidArgument("rows", shape_text(*index), "one dimension");
  expect(*index, "rows", {index->size(0)}, ScalarType::Int, c.k);
  rows.index = static_cast<const std::int32_t*>(index->const_data_ptr());
  rows.index_stride = index->stride(0);
  return rows;
}

KvCache cache_of(const CacheTensors& c, const CallDevice& device,
                 const std::vector<std::int64_t>& rule, double score_threshold,
                 std::int64_t pending, const OptionalTensor& index = {}) {
  const std::int64_t last = c.k.dim() - 1;
  if (last != 3 && last != 2) {
    throw InvalidArgument("k_cache", shape_text(c.k), "shape [B, Hkv, slots, D] or [B, total, D]");
  }
  const std::int64_t count = c.k.size(0), heads = heads_of(c), columns = c.k.size(last);
  const std::int64_t value_dim = c.v.dim() == last + 1 ? c.v.size(last) : columns;
  if (last == 3) {
    expect(c.v, "v_cache", {count, heads, c.k.size(2), value_dim}, c.k.scalar_type(), c.k);
  } else {
    expect(c.v, "v_cache", {count, c.k.size(1), value_dim}, c.k.scalar_type(), c.k);
    for (const auto& [tensor, name] : {std::pair(&c.k, "k_cache"), std::pair(&c.v, "v_cache")}) {
      if (tensor->size(2) > 1 && tensor->stride(2) != 1) {
        throw InvalidArgument(name, "columns that are not contiguous", "contiguous ones");
      }
    }
  }
  if (value_dim == 0) throw InvalidArgument("v_cache", shape_text(c.v), "columns");
  const CacheRows rows = rows_of(c, index);
  KvCacheShape shape{.batch = index ? index->size(0) : count,
                     .heads_kv = heads,
                     .rule = rule_of(rule, score_threshold, heads),
                     .head_dim = columns,
                     .value_dim = value_dim,
                     .dtype = dtype_of(c.k, "k_cache"),
                     .device = device.device()};
  set_chunk(shape, c.k);
  return {.shape = shape,
          .k = slots_view(c.k),
          .v = slots_view(c.v),
          .scores = data_of<float>(c.scores),
          .positions = data_of<std::int32_t>(c.positions),
          .counts = data_of<SlotCount>(c.counts),
          .seen = data_of<std::int32_t>(c.seen),
          .rows = rows,
          .pending = pending};
}

// New tokens of a cache: k [B, n, Hkv, D], v [B, n, Hkv, Dv], scores [B, Hkv, n], mask [B, n].
struct Tokens {
  std::int64_t length;
  Tensor dense_k, dense_v;  // keep the memory that the views point to
  ConstTensor4 k, v;
  ScoreRows scores;
  TokenMask mask;

  Tokens(const KvCache& cache, const Tensor& k_, const Tensor& v_, const Tensor& scores_,
         const OptionalTensor& mask_, const Tensor& like)
      : length(k_.dim() == 4 ? k_.size(1) : 0),
        dense_k(with_dense_rows(checked(cache, k_, "key", cache.shape.head_dim, like))),
        dense_v(with_dense_rows(checked(cache, v_, "value", value_dim_of(cache.shape), like))),
        k(view4(dense_k)),
        v(view4(dense_v)) {
    const KvCacheShape& s = cache.shape;
    expect(scores_, "scores", {s.batch, s.heads_kv, length}, ScalarType::Float, like);
    scores = {static_cast<const float*>(scores_.const_data_ptr()),
              {scores_.stride(0), scores_.stride(1), scores_.stride(2)}};
    if (!mask_) return;
    expect(*mask_, "mask", {s.batch, length}, ScalarType::Bool, like);
    mask = {static_cast<const std::uint8_t*>(mask_->const_data_ptr()),
            {mask_->stride(0), mask_->stride(1)}};
  }

 private:
  const Tensor& checked(const KvCache& cache, const Tensor& tensor, const char* name,
                        std::int64_t columns, const Tensor& like) const {
    const KvCacheShape& s = cache.shape;
    expect(tensor, name, {s.batch, length, s.heads_kv, columns}, like.scalar_type(), like);
    return tensor;
  }
};

// int32 [B] on the device of the cache, or null.
const std::int32_t* row_numbers(const OptionalTensor& tensor, const char* name, std::int64_t rows,
                                const Tensor& like) {
  if (!tensor) return nullptr;
  expect_dense(*tensor, name, {rows}, ScalarType::Int, like);
  return static_cast<const std::int32_t*>(tensor->const_data_ptr());
}

// Elementary operations of a call that touches `tokens` rows of every head.
std::int64_t work_of(const KvCache& cache, std::int64_t tokens) {
  return cache.shape.batch * cache.shape.heads_kv * cache.shape.head_dim * tokens;
}

// ---- The operators -------------------------------------------------------------------------------

void fill_op(const Tensor& k_cache, const Tensor& v_cache, const Tensor& score_cache,
             const Tensor& positions, const Tensor& counts, const Tensor& seen,
             const OptionalTensor& rows, std::vector<std::int64_t> rule, double score_threshold,
             const Tensor& k, const Tensor& v, const Tensor& scores, const Tensor& key_intervals,
             const OptionalTensor& lengths, const OptionalTensor& mask, std::int64_t query_length,
             std::string backend) {
  const CallDevice device(k_cache);
  const KvCache cache = cache_of({k_cache, v_cache, score_cache, positions, counts, seen}, device,
                                 rule, score_threshold, 0, rows);
  const KvCacheShape& s = cache.shape;
  const Tokens tokens(cache, k, v, scores, mask, k_cache);
  expect(key_intervals, "key_intervals", {s.batch, s.heads_kv, tokens.length, 2}, ScalarType::Int,
         k_cache);
  const Tensor intervals = as_contiguous(key_intervals);
  const FillArgs args{
      .cache = cache,
      .seqlen_k = tokens.length,
      .k = tokens.k,
      .v = tokens.v,
      .scores = tokens.scores,
      .intervals = {.data = static_cast<const KeyInterval*>(intervals.const_data_ptr())},
      .seqlen_q = query_length,
      .lengths = row_numbers(lengths, "lengths", s.batch, k_cache),
      .mask = tokens.mask};
  fill_cache(args, device.execution(work_of(cache, s.most_places())), backend);
}

void append_op(const Tensor& k_cache, const Tensor& v_cache, const Tensor& score_cache,
               const Tensor& positions, const Tensor& counts, const Tensor& seen,
               std::vector<std::int64_t> rule, double score_threshold, std::int64_t pending,
               const Tensor& k, const Tensor& v, const Tensor& scores, const OptionalTensor& mask,
               std::string backend) {
  const CallDevice device(k_cache);
  const KvCache cache = cache_of({k_cache, v_cache, score_cache, positions, counts, seen}, device,
                                 rule, score_threshold, pending);
  const Tokens tokens(cache, k, v, scores, mask, k_cache);
  append_tokens({.cache = cache,
                 .seqlen = tokens.length,
                 .k = tokens.k,
                 .v = tokens.v,
                 .scores = tokens.scores,
                 .mask = tokens.mask},
                device.execution(work_of(cache, tokens.length)), backend);
}

Tensor pending_intervals_op(const Tensor& k_cache, const Tensor& v_cache, const Tensor& score_cache,
                            const Tensor& positions, const Tensor& counts, const Tensor& seen,
                            std::vector<std::int64_t> rule, double score_threshold,
                            std::int64_t pending, std::int64_t query_length,
                            const OptionalTensor& kept_tokens, std::string backend) {
  const CallDevice device(k_cache);
  const KvCache cache = cache_of({k_cache, v_cache, score_cache, positions, counts, seen}, device,
                                 rule, score_threshold, pending);
  const KvCacheShape& s = cache.shape;
  const Tensor intervals =
      s.has_equal_heads()
          ? allocate({s.batch, s.heads_kv, s.most_places() + pending, 2}, ScalarType::Int, k_cache)
          : allocate({s.batch, 1, s.total_slots(), 2}, ScalarType::Int, k_cache);
  const PendingIntervalsArgs args{
      .cache = cache,
      .seqlen_q = query_length,
      .intervals = data_of<KeyInterval>(intervals),
      .kept_tokens = row_numbers(kept_tokens, "kept_tokens", s.batch, k_cache)};
  const Execution execution = device.execution(s.batch * s.total_slots());
  run(PendingIntervalsCall(args, execution, backend), k_cache);
  return intervals;
}

void commit_op(const Tensor& k_cache, const Tensor& v_cache, const Tensor& score_cache,
               const Tensor& positions, const Tensor& counts, const Tensor& seen,
               std::vector<std::int64_t> rule, double score_threshold, std::int64_t pending,
               const OptionalTensor& kept_tokens, std::string backend) {
  const CallDevice device(k_cache);
  const KvCache cache = cache_of({k_cache, v_cache, score_cache, positions, counts, seen}, device,
                                 rule, score_threshold, pending);
  const CommitArgs args{
      .cache = cache,
      .kept_tokens = row_numbers(kept_tokens, "kept_tokens", cache.shape.batch, k_cache)};
  run(CommitCall(args, device.execution(work_of(cache, pending)), backend), k_cache);
}

void copy_rows_op(const Tensor& k_cache, const Tensor& v_cache, const Tensor& score_cache,
                  const Tensor& positions, const Tensor& counts, const Tensor& seen,
                  const OptionalTensor& rows, const Tensor& from_k, const Tensor& from_v,
                  const Tensor& from_scores, const Tensor& from_positions,
                  const Tensor& from_counts, const Tensor& from_seen,
                  std::vector<std::int64_t> rule, double score_threshold, std::int64_t pending,
                  const Tensor& index, std::string backend) {
  const CallDevice device(k_cache);
  const KvCache to = cache_of({k_cache, v_cache, score_cache, positions, counts, seen}, device,
                              rule, score_threshold, pending, rows);
  expect_on_device_of(from_k, "from_k", k_cache, "k_cache");
  const KvCache from =
      cache_of({from_k, from_v, from_scores, from_positions, from_counts, from_seen}, device, rule,
               score_threshold, pending);
  copy_rows({.from = from, .to = to, .index = row_numbers(index, "index", to.shape.batch, k_cache)},
            device.execution(work_of(to, to.shape.most_places() + to.shape.chunk)), backend);
}

std::tuple<Tensor, Tensor> decode_step_op(
    const Tensor& k_cache, const Tensor& v_cache, const Tensor& score_cache,
    const Tensor& positions, const Tensor& counts, const Tensor& seen, const OptionalTensor& rows,
    std::vector<std::int64_t> rule, double score_threshold, const Tensor& q, const Tensor& k,
    const Tensor& v, const Tensor& scores, const OptionalTensor& mask, double scale, double softcap,
    bool saturate, bool scores_are_bias, std::string backend) {
  const CallDevice device(k_cache);
  const KvCache cache = cache_of({k_cache, v_cache, score_cache, positions, counts, seen}, device,
                                 rule, score_threshold, 0, rows);
  const KvCacheShape& s = cache.shape;
  const Tokens tokens(cache, k, v, scores, mask, k_cache);
  if (tokens.length != 1) throw InvalidArgument("key", shape_text(k), "one token of every row");
  const std::int64_t heads_q = q.dim() == 4 ? q.size(2) : 0;
  expect(q, "query", {s.batch, 1, heads_q, s.head_dim}, k_cache.scalar_type(), k_cache);
  const Tensor dense_q = with_dense_rows(q);
  const Tensor out = allocate({s.batch, 1, heads_q, value_dim_of(s)}, q.scalar_type(), q);
  const Tensor lse = allocate({s.batch, heads_q, 1}, ScalarType::Float, q);
  const DecodeStepArgs args{
      .cache = cache,
      .heads_q = heads_q,
      .scale = scale,
      .softcap = softcap,
      .nonfinite = saturate ? NonFinite::saturate : NonFinite::propagate,
      .score_use = scores_are_bias ? ScoreUse::choose_and_bias : ScoreUse::choose,
      .q = view4(dense_q),
      .k = tokens.k,
      .v = tokens.v,
      .scores = tokens.scores,
      .mask = tokens.mask,
      .out = mutable_view4(out),
      .lse = data_of<float>(lse)};
  run(DecodeStepCall(args, device.execution(work_of(cache, s.most_places())), backend), k_cache);
  return {out, lse};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(FLASH_DMATTN_NAMESPACE, m) {
  m.def(
      "kv_fill(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!) score_cache, Tensor(d!) "
      "positions, Tensor(e!) counts, Tensor(f!) seen, Tensor? rows, SymInt[] rule, float "
      "score_threshold, Tensor k, Tensor v, Tensor scores, Tensor key_intervals, Tensor? lengths, "
      "Tensor? mask, "
      "SymInt query_length, str backend) -> ()");
  m.def(
      "kv_append(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!) score_cache, Tensor(d!) "
      "positions, Tensor counts, Tensor seen, SymInt[] rule, float score_threshold, SymInt "
      "pending, Tensor k, Tensor v, Tensor scores, Tensor? mask, str backend) -> ()");
  m.def(
      "kv_pending_intervals(Tensor k_cache, Tensor v_cache, Tensor score_cache, Tensor "
      "positions, Tensor counts, Tensor seen, SymInt[] rule, float score_threshold, SymInt "
      "pending, SymInt query_length, Tensor? kept_tokens, str backend) -> Tensor");
  m.def(
      "kv_commit(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!) score_cache, Tensor(d!) "
      "positions, Tensor(e!) counts, Tensor(f!) seen, SymInt[] rule, float score_threshold, "
      "SymInt pending, Tensor? kept_tokens, str backend) -> ()");
  m.def(
      "kv_copy_rows(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!) score_cache, Tensor(d!) "
      "positions, Tensor(e!) counts, Tensor(f!) seen, Tensor? rows, Tensor from_k, Tensor from_v, "
      "Tensor "
      "from_scores, Tensor from_positions, Tensor from_counts, Tensor from_seen, SymInt[] "
      "rule, float score_threshold, SymInt pending, Tensor index, str backend) -> ()");
  m.def(
      "kv_decode_step(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!) score_cache, "
      "Tensor(d!) positions, Tensor(e!) counts, Tensor(f!) seen, Tensor? rows, SymInt[] rule, "
      "float "
      "score_threshold, Tensor q, Tensor k, Tensor v, Tensor scores, Tensor? mask, float "
      "scale, float softcap, bool saturate, bool scores_are_bias, str backend) -> (Tensor out, "
      "Tensor lse)");
}

// Every device has one set of functions: the library finds the backend.
static void implement(auto& m) {
  m.impl("kv_fill", TORCH_BOX(&fill_op));
  m.impl("kv_append", TORCH_BOX(&append_op));
  m.impl("kv_pending_intervals", TORCH_BOX(&pending_intervals_op));
  m.impl("kv_commit", TORCH_BOX(&commit_op));
  m.impl("kv_copy_rows", TORCH_BOX(&copy_rows_op));
  m.impl("kv_decode_step", TORCH_BOX(&decode_step_op));
}

STABLE_TORCH_LIBRARY_IMPL(FLASH_DMATTN_NAMESPACE, CPU, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(FLASH_DMATTN_NAMESPACE, CUDA, m) { implement(m); }

}  // namespace flash_dmattn::binding
