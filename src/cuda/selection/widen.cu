#include "cuda/selection/widen.h"

#include <algorithm>
#include <cstdint>

#include "common/arguments.h"
#include "common/selection_rule.h"
#include "cuda/primitives/block.cuh"
#include "cuda/selection/scored_keys.cuh"

namespace flash_dmattn::cuda {
namespace {

// A row is one (batch, kv head).
struct KeyMask {
  const std::uint8_t* data = nullptr;  // null: every key is present
  std::int64_t stride[3] = {};

  explicit KeyMask(const SelectionArgs& args) : data(args.key_mask) {
    std::copy(args.key_mask_stride.begin(), args.key_mask_stride.end(), stride);
  }

  __device__ bool is_present(int batch, int head, int key) const {
    return data == nullptr || data[batch * stride[0] + head * stride[1] + key * stride[2]] != 0;
  }
};

// The keys before a row's end of sinks are sinks where they are present.
struct SinkEnds {
  int sinks = 0;
  const std::int32_t* ends = nullptr;  // [rows]; null: all are `sinks`

  __device__ int operator[](int row) const { return ends == nullptr ? sinks : ends[row]; }
};

// A block scans a row of the mask for the first present key that is no sink.
struct FindSinkEnds {
  static constexpr int threads = 1024;
  static constexpr int min_blocks = 1;

  struct Params {
    KeyMask mask;
    int heads;
    int seqlen_k;
    int sinks;
    std::int32_t* ends;  // [rows]
  };
  using Numbers = BlockNumbers<threads>;
  using SharedStorage = Numbers::Storage;

  __device__ void operator()(const Params& p, SharedStorage& shared) const {
    const int row = static_cast<int>(blockIdx.x);
    int found = 0;
    for (int begin = 0; begin < p.seqlen_k; begin += threads) {
      const int key = begin + static_cast<int>(threadIdx.x);
      const bool is_present =
          key < p.seqlen_k && p.mask.is_present(row / p.heads, row % p.heads, key);
      int count;
      const int number = found + Numbers::number(shared, is_present, count);
      if (is_present && number == p.sinks) p.ends[row] = key;
      found += count;
      if (found > p.sinks) return;
    }
    if (threadIdx.x == 0) p.ends[row] = p.seqlen_k;
  }
};

// The keys of a block of the following kernels, four for each thread.
constexpr int block_threads = 256;
constexpr int block_keys = 4 * block_threads;

// Calls body(row, key) for the keys of this block.
template <class Body>
__device__ void for_keys_of_block(int seqlen_k, const Body& body) {
  const int blocks_per_row = ceil_div(seqlen_k, block_keys);
  const int row = static_cast<int>(blockIdx.x) / blocks_per_row;
  const int begin = static_cast<int>(blockIdx.x) % blocks_per_row * block_keys;
  const int end = min(begin + block_keys, seqlen_k);
  for (int key = begin + static_cast<int>(threadIdx.x); key < end; key += block_threads) {
    body(row, key);
  }
}

// Writes the mask of the keys that compete: those that are present and no sinks.
struct MaskSinks {
  static constexpr int threads = block_threads;
  static constexpr int min_blocks = 1;

  struct Params {
    KeyMask mask;
    SinkEnds sink_ends;
    int heads;
    int seqlen_k;
    std::uint8_t* competes;  // [rows, Sk]
  };
  struct SharedStorage {};

  __device__ void operator()(const Params& p, SharedStorage&) const {
    for_keys_of_block(p.seqlen_k, [&](int row, int key) {
      const bool competes =
          key >= p.sink_ends[row] && p.mask.is_present(row / p.heads, row % p.heads, key);
      p.competes[static_cast<std::int64_t>(row) * p.seqlen_k + key] = competes ? 1 : 0;
    });
  }
};

// The intervals of the selection among the keys that compete, which are consecutive: [begin, begin + keys).
struct Chosen {
  const KeyInterval* intervals = nullptr;
  std::int64_t stride_batch = 0;
  std::int64_t stride_head = 0;
  int begin = 0;
  int keys = 0;

  __device__ KeyInterval at(int batch, int head, int key) const {
    const int index = key - begin;
    if (static_cast<unsigned>(index) >= static_cast<unsigned>(keys)) return {0, 0};
    return intervals[batch * stride_batch + head * stride_head + index];
  }
};

// Adds the recent keys and the sinks to the chosen ones.
struct AddUnchosen {
  static constexpr int threads = block_threads;
  static constexpr int min_blocks = 1;

  struct Params {
    Chosen chosen;
    KeyMask mask;
    SinkEnds sink_ends;
    QueryClip queries;
    int recent;
    int heads;
    int seqlen_k;
    KeyInterval* intervals;  // [rows, Sk]
  };
  struct SharedStorage {};

  __device__ void operator()(const Params& p, SharedStorage&) const {
    for_keys_of_block(p.seqlen_k, [&](int row, int key) {
      store(&p.intervals[static_cast<std::int64_t>(row) * p.seqlen_k + key],
            interval_of(p, row, key));
    });
  }

  __device__ static KeyInterval interval_of(const Params& p, int row, int key) {
    const int batch = row / p.heads;
    const int head = row % p.heads;
    if (!p.mask.is_present(batch, head, key)) return {0, 0};
    if (key < p.sink_ends[row]) return p.queries.interval_to_last_query(key);
    const int chosen_end = p.chosen.at(batch, head, key).last + p.queries.shift;
    const int recent_end = p.recent > 0 ? key + p.recent : p.queries.shift;
    return p.queries.interval_until(key, max(chosen_end, recent_end));
  }
};

bool has_head_windows(const SelectionArgs& args) { return args.rule.head_windows != nullptr; }

// The address of an element, or null where there is no array.
const void* offset_pointer(const void* data, std::int64_t elements, std::int64_t element_size) {
  return data == nullptr ? nullptr : static_cast<const char*>(data) + elements * element_size;
}

}  // namespace

WidenedSelection::WidenedSelection(const SelectionArgs& args, const Execution&) {
  if (args.batch * args.heads * args.seqlen_k == 0) return;
  const SelectionRule& rule = args.rule;
  begin_ = args.key_mask == nullptr ? std::min(rule.sink_tokens, args.seqlen_k) : 0;
  competing_ = args;
  competing_.seqlen_k = std::max<std::int64_t>(args.seqlen_k - delay_of(rule) - begin_, 0);
  competing_.rule = {
      .window = rule.window, .selection = rule.selection, .score_threshold = rule.score_threshold};
  by_head_ = has_head_windows(args) && !BestKeys::takes_windows(competing_);
  if (!by_head_) competing_.rule.head_windows = rule.head_windows;
  competing_.scores =
      offset_pointer(args.scores, begin_ * args.scores_stride[2], size_of(args.scores_dtype));
  if (by_head_) {
    for (std::int64_t h = 0; h < args.heads; ++h) {
      step_bytes_ = std::max(step_bytes_, BestKeys(competing_of_head(args, h)).bytes);
    }
  } else {
    best_ = BestKeys(competing_);
    step_bytes_ = best_.bytes;
  }
  bytes = place(args, nullptr);
}

void WidenedSelection::run(const SelectionArgs& args, const Execution& execution) const {
  if (args.batch * args.heads * args.seqlen_k == 0) return;
  WidenedSelection placed = *this;
  placed.place(args, execution.workspace);
  placed.launch_all(args, execution);
}

std::size_t WidenedSelection::place(const SelectionArgs& args, void* base) {
  const std::int64_t rows = args.batch * args.heads;
  WorkspaceAllocator workspace(base);
  if (args.key_mask != nullptr && args.rule.sink_tokens > 0) {
    sink_ends_ = workspace.take<std::int32_t>(rows);
    competes_ = workspace.take<std::uint8_t>(rows * args.seqlen_k);
    competing_.key_mask = competes_;
    competing_.key_mask_stride = {args.heads * args.seqlen_k, args.seqlen_k, 1};
  }
  chosen_ = workspace.take<KeyInterval>(rows * competing_.seqlen_k);
  competing_.intervals = chosen_;
  step_ = workspace.take<char>(static_cast<std::int64_t>(step_bytes_));
  return workspace.used();
}

void WidenedSelection::launch_all(const SelectionArgs& args, const Execution& execution) const {
  const auto stream = static_cast<cudaStream_t>(execution.stream);
  const int heads = static_cast<int>(args.heads);
  const int seqlen_k = static_cast<int>(args.seqlen_k);
  const std::int64_t rows = args.batch * args.heads;
  const std::int64_t blocks = rows * ceil_div(seqlen_k, block_keys);
  // At most seqlen_k, so that their sums with a position fit into 32 bits.
  const int sinks = static_cast<int>(std::min(args.rule.sink_tokens, args.seqlen_k));
  const int recent = static_cast<int>(std::min(args.rule.recent_window, args.seqlen_k));
  const SinkEnds sink_ends{sinks, sink_ends_};
  const KeyMask mask(args);
  if (sink_ends_ != nullptr) {
    launch<FindSinkEnds>(rows, {mask, heads, seqlen_k, sinks, sink_ends_}, stream);
    launch<MaskSinks>(blocks, {mask, sink_ends, heads, seqlen_k, competes_}, stream);
  }
  select_competing(args, execution);
  const std::int64_t keys = competing_.seqlen_k;
  const Chosen chosen{chosen_, by_head_ ? keys : args.heads * keys,
                      by_head_ ? args.batch * keys : keys, static_cast<int>(begin_),
                      static_cast<int>(keys)};
  launch<AddUnchosen>(
      blocks, {chosen, mask, sink_ends, QueryClip(args), recent, heads, seqlen_k, args.intervals},
      stream);
}

void WidenedSelection::select_competing(const SelectionArgs& args,
                                        const Execution& execution) const {
  Execution step = execution;
  step.workspace = step_;
  step.workspace_bytes = step_bytes_;
  if (!by_head_) return best_.run(competing_, step);
  for (std::int64_t h = 0; h < args.heads; ++h) {
    const SelectionArgs one = competing_of_head(args, h);
    BestKeys(one).run(one, step);
  }
}

SelectionArgs WidenedSelection::competing_of_head(const SelectionArgs& args,
                                                  std::int64_t head) const {
  SelectionArgs one = competing_;
  one.heads = 1;
  one.rule.window = args.rule.head_windows[head];
  one.scores = offset_pointer(one.scores, head * one.scores_stride[1], size_of(one.scores_dtype));
  one.key_mask = static_cast<const std::uint8_t*>(
      offset_pointer(one.key_mask, head * one.key_mask_stride[1], 1));
  if (chosen_ != nullptr) one.intervals = chosen_ + head * one.batch * one.seqlen_k;
  return one;
}

}  // namespace flash_dmattn::cuda
