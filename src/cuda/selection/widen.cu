#include "cuda/selection/widen.h"

#include <algorithm>
#include <cstdint>

#include "arguments.h"
#include "cuda/selection/scored_keys.cuh"
#include "cuda/selection/selection.h"
#include "selection/key_selection.h"

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

// A block scans a row of the mask for the key after the last sink.
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
  struct SharedStorage {};

  __device__ void operator()(const Params& p, SharedStorage&) const {
    const int row = static_cast<int>(blockIdx.x);
    const int thread = static_cast<int>(threadIdx.x);
    const auto is_present = [&](int key) {
      return key < p.seqlen_k && p.mask.is_present(row / p.heads, row % p.heads, key);
    };
    int found = 0;
    int begin = 0;
    // All keys of a step are sinks as long as there are no more than are missing.
    while (begin < p.seqlen_k) {
      const int count = __syncthreads_count(is_present(begin + thread));
      if (found + count > p.sinks) break;
      found += count;
      begin += threads;
    }
    if (thread != 0) return;
    int end = min(begin, p.seqlen_k);
    for (; found < p.sinks && end < p.seqlen_k; ++end) found += is_present(end) ? 1 : 0;
    p.ends[row] = end;
  }
};

// The number of keys of which a block of the following kernels has some in each thread.
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
      const int batch = row / p.heads;
      const int head = row % p.heads;
      KeyInterval result{0, 0};
      if (!p.mask.is_present(batch, head, key)) {
        // It stays invisible.
      } else if (key < p.sink_ends[row]) {
        result = p.queries.forever(key);
      } else {
        const int chosen_end = p.chosen.at(batch, head, key).last + p.queries.shift;
        const int recent_end = p.recent > 0 ? key + p.recent : p.queries.shift;
        result = p.queries.until(key, max(chosen_end, recent_end));
      }
      store(&p.intervals[static_cast<std::int64_t>(row) * p.seqlen_k + key], result);
    });
  }
};

// The keys that compete, as a selection of their own, and its memory.
//
// Keys that compete with a delay of W do so in the order in which they are written. So the query at position t chooses
// among the keys up to t - W, as the same queries do at the end of a row that is W keys shorter. The sinks of a row
// without a mask are its first keys, and the row of the others begins after them.
class WidenedSelection {
 public:
  WidenedSelection(const SelectionArgs& args, void* base) : args_(args) {
    const KeySelection& keep = args.keep;
    const std::int64_t rows = args.batch * args.heads;
    const bool masks_sinks = args.key_mask != nullptr && keep.sink_tokens > 0;
    begin_ = args.key_mask == nullptr ? std::min(keep.sink_tokens, args.seqlen_k) : 0;
    competing_.seqlen_k = std::max<std::int64_t>(args.seqlen_k - delay_of(keep) - begin_, 0);
    WorkspaceAllocator workspace(base);
    if (masks_sinks) {
      sink_ends_ = workspace.take<std::int32_t>(rows);
      competes_ = workspace.take<std::uint8_t>(rows * args.seqlen_k);
    }
    chosen_ = workspace.take<KeyInterval>(rows * competing_.seqlen_k);
    describe_competing();
    for_each_selection([&](const SelectionArgs& one) {
      step_bytes_ = std::max(step_bytes_, cuda::select_workspace_size(one));
    });
    step_ = workspace.take<char>(static_cast<std::int64_t>(step_bytes_));
    bytes_ = workspace.used();
  }

  std::size_t workspace_bytes() const { return bytes_; }

  void run(const Execution& execution) const {
    const auto stream = static_cast<cudaStream_t>(execution.stream);
    const int heads = static_cast<int>(args_.heads);
    const int seqlen_k = static_cast<int>(args_.seqlen_k);
    const std::int64_t rows = args_.batch * args_.heads;
    const std::int64_t blocks = rows * ceil_div(seqlen_k, block_keys);
    const int sinks = static_cast<int>(std::min(args_.keep.sink_tokens, args_.seqlen_k));
    const SinkEnds sink_ends{sinks, sink_ends_};
    const KeyMask mask(args_);
    if (sink_ends_ != nullptr) {
      launch<FindSinkEnds>(rows, {mask, heads, seqlen_k, sinks, sink_ends_}, stream);
      launch<MaskSinks>(blocks, {mask, sink_ends, heads, seqlen_k, competes_}, stream);
    }
    Execution step = execution;
    step.workspace = step_;
    step.workspace_bytes = step_bytes_;
    for_each_selection([&](const SelectionArgs& one) { cuda::select_key_intervals(one, step); });
    const std::int64_t keys = competing_.seqlen_k;
    const Chosen chosen{chosen_, by_head() ? keys : args_.heads * keys,
                        by_head() ? args_.batch * keys : keys, static_cast<int>(begin_),
                        static_cast<int>(keys)};
    launch<AddUnchosen>(
        blocks,
        {chosen, mask, sink_ends, QueryClip(args_), static_cast<int>(args_.keep.recent_window),
         heads, seqlen_k, args_.intervals},
        stream);
  }

 private:
  bool by_head() const { return args_.keep.head_windows != nullptr; }

  void describe_competing() {
    const std::int64_t keys = competing_.seqlen_k;
    competing_ = args_;
    competing_.seqlen_k = keys;
    competing_.keep = {.window = args_.keep.window,
                       .selection = args_.keep.selection,
                       .score_threshold = args_.keep.score_threshold};
    competing_.intervals = chosen_;
    competing_.scores =
        after(args_.scores, begin_ * args_.scores_stride[2], size_of(args_.scores_dtype));
    if (competes_ != nullptr) {
      competing_.key_mask = competes_;
      competing_.key_mask_stride = {args_.heads * args_.seqlen_k, args_.seqlen_k, 1};
    }
  }

  // Calls body(selection) for all rows, or for those of each head that has its own window.
  template <class Body>
  void for_each_selection(const Body& body) const {
    if (!by_head()) return body(competing_);
    for (std::int64_t h = 0; h < args_.heads; ++h) {
      SelectionArgs one = competing_;
      one.heads = 1;
      one.keep.window = args_.keep.head_windows[h];
      one.scores =
          after(competing_.scores, h * args_.scores_stride[1], size_of(args_.scores_dtype));
      one.key_mask = static_cast<const std::uint8_t*>(
          after(competing_.key_mask, h * competing_.key_mask_stride[1], 1));
      if (chosen_ != nullptr) one.intervals = chosen_ + h * args_.batch * competing_.seqlen_k;
      body(one);
    }
  }

  // The address of an element, or null where there is no array.
  static const void* after(const void* data, std::int64_t elements, std::int64_t element_size) {
    return data == nullptr ? nullptr : static_cast<const char*>(data) + elements * element_size;
  }

  SelectionArgs args_;
  SelectionArgs competing_;
  std::int64_t begin_ = 0;
  std::int32_t* sink_ends_ = nullptr;
  std::uint8_t* competes_ = nullptr;
  KeyInterval* chosen_ = nullptr;
  char* step_ = nullptr;
  std::size_t step_bytes_ = 0;
  std::size_t bytes_ = 0;
};

}  // namespace

std::size_t widened_workspace_size(const SelectionArgs& args) {
  return WidenedSelection(args, nullptr).workspace_bytes();
}

void select_widened(const SelectionArgs& args, const Execution& execution) {
  WidenedSelection(args, execution.workspace).run(execution);
}

}  // namespace flash_dmattn::cuda
