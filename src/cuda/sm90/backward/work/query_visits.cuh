#pragma once

#include "cuda/primitives/integers.h"
#include "cuda/sm90/backward/params.h"
#include "cuda/sm90/backward/policy.h"

namespace flash_dmattn::cuda::sm90 {

// A block of keys or of slots of a kv head, and the query tiles that it visits.
struct BackwardWork {
  int batch;
  int kv_head;
  int key;  // first key or slot
  int tile_begin;
  int tile_end;      // counts visits instead of tiles with a dense mask or bias
  int part = 0;      // SlotPart::id
  int position = 0;  // SlotPart::position

  __device__ bool has_tiles() const { return tile_end > tile_begin; }
};

// The index in arrays with one element for each query tile of each head.
__device__ inline std::int64_t tile_index(const Shape& shape, int rows, int batch, int head,
                                          int tile) {
  return (std::int64_t{batch} * shape.heads_q + head) * ceil_div(shape.seqlen_q, rows) + tile;
}

// Iterates over the query tiles of a work, in all heads of the group. With neighbouring keys it visits one head after
// another, because heads may differ in mask and bias. With slots it visits the heads of a tile together, because slots
// change keys between tiles.
template <BackwardVariant Variant>
class QueryVisits {
 public:
  __device__ QueryVisits(const BackwardKernelParams& p, const BackwardWork& work)
      : tile_(work.tile_begin),
        head_(work.kv_head * p.backward.shape.group_heads()),
        tile_begin_(work.tile_begin),
        tile_end_(work.tile_end),
        head_begin_(head_),
        group_(p.backward.shape.group_heads()),
        left_(group_ * (work.tile_end - work.tile_begin)) {}

  __device__ int tile() const { return tile_; }
  __device__ int head() const { return head_; }

  __device__ bool has() const { return left_ > 0; }
  __device__ bool is_last() const { return left_ == 1; }
  __device__ bool is_last_of_head() const { return tile_ + 1 == tile_end_; }

  __device__ bool is_first_head() const { return head_ == head_begin_; }
  __device__ bool is_last_head() const { return head_ + 1 == head_begin_ + group_; }

  // Moves to the next visit and returns whether there is one.
  __device__ bool advance() {
    const bool has_next = !is_last();
    --left_;
    if constexpr (Variant.has_slots()) {
      if (is_last_head()) {
        ++tile_;
        head_ = head_begin_;
      } else {
        ++head_;
      }
    } else if (++tile_ == tile_end_) {
      tile_ = tile_begin_;
      ++head_;
    }
    return has_next;
  }

 private:
  int tile_;
  int head_;
  int tile_begin_;
  int tile_end_;
  int head_begin_;
  int group_;
  int left_;
};

// A visit that the loader passes to the consumers, which have no registers to read the list.
struct alignas(16) LoadedVisit {
  QueryVisit visit;
  bool is_last_of_head;
  bool is_last;
  // Whether the next visit has another mask or bias than this visit, and whether it is masked.
  bool loads_next;
  bool next_masked;
  int next_head;  // after the last visit, the visit's own head
};

// Iterates over the visits of a list in memory, with a dense mask or bias. Each visit is read one visit ahead.
template <BackwardVariant Variant>
  requires(Variant.has_dense())
class QueryVisits<Variant> {
 public:
  __device__ QueryVisits(const BackwardKernelParams& p, const BackwardWork& work)
      : left_(work.tile_end) {
    const QueryVisitLists& lists = p.visits;
    next_at_ = lists.visits + lists.list(p.backward.shape, work.batch, work.kv_head, work.key) *
                                  std::int64_t{lists.capacity};
    if (left_ > 0) next_ = load();
    take_next();
  }

  __device__ int tile() const { return visit_.tile; }
  __device__ int head() const { return static_cast<int>(visit_.head); }
  __device__ bool masked() const { return visit_.masked != 0; }

  __device__ bool has() const { return left_ > 0; }
  __device__ bool is_last() const { return left_ == 1; }
  __device__ bool is_last_of_head() const { return is_last() || next_.head != visit_.head; }
  __device__ bool is_first_of_two() const { return visit_.first_of_two != 0; }
  __device__ bool is_second_of_two() const { return visit_.second_of_two != 0; }
  __device__ bool has_same_dense() const { return visit_.same_dense != 0; }
  __device__ LoadedVisit loaded() const {
    return {.visit = visit_,
            .is_last_of_head = is_last_of_head(),
            .is_last = is_last(),
            .loads_next = !is_last() && next_.same_dense == 0,
            .next_masked = next_.masked != 0,
            .next_head = is_last() ? head() : static_cast<int>(next_.head)};
  }

  __device__ void advance() {
    --left_;
    take_next();
  }

 private:
  __device__ void take_next() {
    visit_ = next_;
    ++next_at_;
    if (left_ > 1) next_ = load();
  }

  __device__ QueryVisit load() const {
    const int2 words = __ldg(reinterpret_cast<const int2*>(next_at_));
    return reinterpret_cast<const QueryVisit&>(words);
  }

  const QueryVisit* next_at_;
  QueryVisit visit_ = {};
  QueryVisit next_ = {};
  int left_;
};

}  // namespace flash_dmattn::cuda::sm90
