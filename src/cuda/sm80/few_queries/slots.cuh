#pragma once

#include <climits>

#include "cuda/primitives/tile_copy.cuh"
#include "cuda/sm80/few_queries/combine.cuh"
#include "cuda/sm80/few_queries/elements.cuh"
#include "cuda/sm80/few_queries/pipeline.cuh"

// Attends to the slots of a KV cache. While they are read, the kernel inserts a token and collects victim, free slot and
// leaving key for the next step.
namespace flash_dmattn::cuda::sm80::few_queries {

// The data of a block, in shared memory.
struct SlotStorage {
  static constexpr int most_warps = 2;  // warps that load key info

  SlotScan scans[most_warps];
};

// The key info of slots, with the interface of KeyInfoLoader. The changes by the token follow from its score and the
// SlotCount, so rows and key info are loaded at the same time.
class SlotInfo {
 public:
  struct Key {
    float score;
    std::int32_t entry;
    std::int32_t slot;
  };

  // row: of the arrays.
  __device__ SlotInfo(const StepParams& p, const GroupRows& rows, int row)
      : p_(p),
        batch_(rows.batch),
        kv_head_(rows.kv_head),
        row_(row),
        rows_before_(static_cast<int>(p.rule[rows.kv_head].rows_before)),
        first_(p.first_slot(row, rows.kv_head)) {}

  // Loads, before the rows, the data for the decision.
  __device__ void load_token() {
    before_ = p_.count(row_, kv_head_);
    seen_ = p_.seen[row_ * p_.rows.seen_stride];
    score_new_ = __ldg(p_.new_scores.data + batch_ * p_.new_scores.stride[0] +
                       kv_head_ * p_.new_scores.stride[1]);
    if (p_.mask.data != nullptr) mask_ = __ldg(p_.mask.data + batch_ * p_.mask.stride[0]);
  }
  // Decides how the step changes the slots. Rows and key info need not wait for it.
  __device__ void prepare() {
    change_ = change_of_step(p_.rule.head_rule(kv_head_), before_, seen_, score_new_, mask_ != 0);
  }

  __device__ bool has_values() const { return true; }
  // The slot for the token, or -1 if there is none.
  __device__ int target() const { return change_.target; }
  // Slots from here on hold no key after the step.
  __device__ int count() const { return change_.count; }
  __device__ int2 counts_after() const { return {change_.count, change_.competed}; }
  __device__ int row() const { return row_; }
  // Where the state of the cache is stored, and the number of this (batch, kv head) in the call.
  __device__ SlotCount& slot_count() const { return p_.count(row_, kv_head_); }
  __device__ std::int64_t index() const {
    return static_cast<std::int64_t>(batch_) * p_.shape.heads_kv + kv_head_;
  }
  __device__ const SlotScan& scan() const { return scan_; }
  // Whether a slot before count() holds a key.
  __device__ SlotsWithKeys present() const {
    return {p_.positions + first_, row_ - batch_, rows_before_};
  }
  // The row of k and v of the head's slot 0.
  __device__ int rows_before() const { return rows_before_; }

  // key: a row of k and v.
  __device__ Key read(int key, bool valid) const {
    if (!valid) return {0, no_key, INT_MAX};
    const int slot = key - rows_before_;
    const std::int64_t at = first_ + slot;
    return {p_.scores[at], p_.positions[at], slot};
  }

  template <int N>
  __device__ void store(Key key, KeyInfoTile<N>& tile, int column, int, int) {
    change(key);
    const bool is_taken = key.slot < change_.count;
    if (is_taken) scan_.add({p_.rule.common, seen_ + 1}, key.score, key.entry, key.slot);
    const bool biased = p_.score.bias.data != nullptr;
    const bool visible =
        is_taken && key.entry != no_key && (!biased || key.score > p_.score.mask_value);
    tile.range[column] = {0, visible ? 1 : 0};
    tile.bias[column] = visible && biased ? fminf(key.score, largest_key_bias) : 0.0f;
    tile.store_state(column, visible, visible);
  }

 private:
  __device__ void change(Key& key) const {
    const std::int64_t at = first_ + key.slot;
    if (key.slot == change_.target) {
      key.score = score_new_;
      key.entry = change_.entry;
      p_.scores[at] = key.score;
      p_.positions[at] = key.entry;
    } else if (key.slot == change_.other) {
      key.entry = change_.other_entry;
      p_.positions[at] = key.entry;
    }
  }

  const StepParams& p_;
  int batch_;
  int kv_head_;
  int row_;
  int rows_before_;
  std::int64_t first_;
  SlotCount before_{};
  int seen_ = 0;
  float score_new_ = 0;
  std::uint8_t mask_ = 1;
  StepChange change_;
  SlotScan scan_ = SlotScan::nothing();
};

// The new rows of K and V, with a chunk of 16 bytes in each of the first threads. Every block loads them with its first
// tiles, before the block with the target slot is known.
template <class Tile, class Group>
class TokenRows {
 public:
  __device__ TokenRows(const StepParams& p, const GroupRows& rows)
      : is_value_(rank() >= Tile::chunks), chunk_(rank() % Tile::chunks) {
    const int columns = is_value_ ? p.shape.value_dim : p.shape.head_dim;
    exists_ = rank() < 2 * Tile::chunks && chunk_ < columns / 8;
    const InputRows& from = is_value_ ? p.new_v : p.new_k;
    from_ = from.data + rows.batch * from.batch + rows.kv_head * from.head + chunk_ * 16;
    aligned_ = from.aligned;
  }

  __device__ void load() {
    if (!exists_) return;
    data_ = aligned_ ? __ldg(reinterpret_cast<const uint4*>(from_)) : load_unaligned_chunk(from_);
  }

  // Stores the new rows to row `column` of the tiles and to row `key` of k and v.
  __device__ void store(const StepParams& p, const GroupRows& rows, int row, int key, int column,
                        std::uint32_t k_tile, std::uint32_t v_tile) const {
    if (!exists_) return;
    store_shared_16((is_value_ ? v_tile : k_tile) + Tile::offset(column, chunk_), data_);
    const OutputRows& to = is_value_ ? p.v_slots : p.k_slots;
    std::byte* const data =
        to.data + row * to.batch + key * to.row + rows.kv_head * to.head + chunk_ * 16;
    store_chunk(data, {data_.x, data_.y, data_.z, data_.w}, to.aligned);
  }

 private:
  static __device__ int rank() { return static_cast<int>(threadIdx.x); }

  bool is_value_;
  int chunk_;
  bool exists_;
  bool aligned_;
  const std::byte* from_;
  uint4 data_{};
};

// The counterpart of TensorKeys for slots.
template <class T>
struct SlotKeys {
  using Params = StepParams;
  using Info = SlotInfo;
  using Elements = NoElements;
  using Storage = SlotStorage;
  static constexpr bool has_idle_blocks = true;
  template <class Pipeline>
  using Extra = TokenRows<typename Pipeline::RowTile, typename Pipeline::Group>;

  static long blocks(const Params& p) {
    const long batch = p.shape.batch;
    return batch * (p.rule.by_head
                        ? p.head_blocks.first[p.shape.heads_kv]
                        : static_cast<long>(p.shape.heads_kv) * p.split.row_tiles * p.split.splits);
  }
  static __device__ BlockPart part(const Params& p, int block) {
    return p.rule.by_head ? BlockPart(p, p.head_blocks, block) : BlockPart(p, block);
  }
  // The row of k and v for that of the call, or -1. An index may be the previous kernel's result.
  static __device__ int key_row(const Params& p, int batch) {
    if (p.rows.index != nullptr) wait_for_previous_kernel();
    return p.rows(batch);
  }
  static __device__ Info info(const Params& p, const GroupRows& rows, int row) {
    return {p, rows, row};
  }
  static __device__ TileKeys tile_keys(const Params& p, const GroupRows& rows) {
    const int first = static_cast<int>(p.rule[rows.kv_head].rows_before);
    return {first, first + p.rule[rows.kv_head].places};
  }
  static __device__ int count(const Params&, const Info& info) { return info.count(); }
  static __device__ SlotsWithKeys present(const Info& info) { return info.present(); }

  template <class Pipeline>
  static __device__ void complete(const Params& p, const GroupRows& rows, const Pipeline& kv, int n,
                                  const Storage&, const Extra<Pipeline>& token) {
    const int slot = kv.info().target();
    const int key = kv.info().rows_before() + slot;
    const int column = key - kv.tiles().first(n);
    if (slot < 0 || column < 0 || column >= Pipeline::RowTile::rows) return;
    token.store(p, rows, kv.info().row(), key, column, kv.k_tile(n), kv.v_tile(n));
    __syncthreads();
  }

  static __device__ void finish(const Info& info, Storage& storage) {
    if (warp_id() >= Storage::most_warps) return;
    const SlotScan scan = info.scan().warp_sum();
    if (lane_id() == 0) storage.scans[warp_id()] = scan;
  }
  static __device__ void store_cluster(const Params&, const GroupRows&, const Info& info,
                                       const Storage& storage, const BlockPart& part) {
    if (part.split != part.splits - 1 || warp_id() > 0) return;
    SlotScan scan = SlotScan::nothing();
    for (int n = lane_id(); n < part.splits; n += warp_size)
      scan.add(block_scan(*in_cluster_block(&storage, n)));
    scan = scan.warp_sum();
    const int2 after = info.counts_after();
    if (lane_id() == 0) info.slot_count() = scan.count(after.x, after.y);
  }
  static __device__ void store_split(const Params& p, const GroupRows&, const Info& info,
                                     const Storage& storage, int split) {
    if (threadIdx.x > 0) return;
    p.scans[info.index() * p.split.splits + split] = block_scan(storage);
    if (split == 0) p.counts_after[info.index()] = info.counts_after();
  }

 private:
  static __device__ SlotScan block_scan(const Storage& storage) {
    SlotScan scan = storage.scans[0];
    scan.add(storage.scans[1]);
    return scan;
  }
};

// The CombineKernel of a decode step, which also stores the new state of the cache.
template <class T, int D>
struct CombineStepKernel : CombineKernel<T, D> {
  using Params = StepParams;
  using Base = CombineKernel<T, D>;

  __device__ void operator()(const Params& p, typename Base::SharedStorage& shared) const {
    const QueryHead head = Base::head_of(p, blockIdx.x);
    const std::int64_t index = head.batch * p.shape.heads_kv + head.kv_head;
    const bool is_first_of_group = head.head % p.shape.group_heads() == 0;
    allow_next_kernel();
    wait_for_previous_kernel();
    const int row = p.rows(head.batch);
    if (row < 0) {
      if (warp_id() == 0) store_row<T, D>(p, head, 0, 0, AllKeys(), RowTotal<D>());
      return;
    }
    const int2 after = p.counts_after[index];
    const int splits = p.splits_of(head.kv_head);
    if (is_first_of_group && warp_id() == Base::warps - 1) {
      SlotScan scan = SlotScan::nothing();
      for (int n = lane_id(); n < splits; n += warp_size)
        scan.add(p.scans[index * p.split.splits + n]);
      scan = scan.warp_sum();
      if (lane_id() == 0) p.count(row, head.kv_head) = scan.count(after.x, after.y);
    }
    if (head.head == 0 && threadIdx.x == 0) ++p.seen[row * p.rows.seen_stride];
    const std::int32_t* const entries = p.positions + p.first_slot(row, head.kv_head);
    Base::add_splits(p, shared, splits, after.x,
                     SlotsWithKeys{entries, row - head.batch,
                                   static_cast<int>(p.rule[head.kv_head].rows_before)});
  }
};

// Counts the tokens of a row, if clusters compute the step, when no block of any head will read their number again. The
// kernel starts when all blocks of the step have called allow_next_kernel, and ends after them.
template <SharedClass S>
__global__ void __launch_bounds__(256) count_tokens(std::int32_t* seen, RowIndex rows, int batch) {
  allow_next_kernel();
  const int b = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const int row = b < batch ? rows(b) : -1;
  if (row >= 0) ++seen[row * rows.seen_stride];
  wait_for_previous_kernel();
}

}  // namespace flash_dmattn::cuda::sm80::few_queries
