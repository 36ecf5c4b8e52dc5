#pragma once

#include <cstddef>
#include <cstdint>

#include "flash_dmattn/execution.h"
#include "flash_dmattn/selection.h"

// Selection and plan on the GPU: the results of the functions of the same names in
// flash_dmattn/selection.h, from and to device memory. Every call enqueues kernels on
// execution.stream and returns: nothing is allocated, nothing waits for the device, and all of it
// can be captured in a CUDA graph. All sizes follow from shapes and PlanArgs::bound. Bad arguments
// throw InvalidArgument, failures of the CUDA runtime std::runtime_error.
namespace flash_dmattn::cuda {

// ---- Selection ----------------------------------------------------------------------------------

// Throws InvalidArgument unless the scores are such as a GPU sorts.
void validate(const SelectionArgs& args);

// Scores f32, bf16 or f16; Sk <= 2^23; `intervals` aligned to 8 bytes.
std::size_t select_workspace_size(const SelectionArgs& args);
void select_key_intervals(const SelectionArgs& args, const Execution& execution);

std::int64_t key_list_stride(const SelectionArgs& args);
std::size_t select_list_workspace_size(const SelectionArgs& args);
KeyList select_key_list(const SelectionArgs& args, std::int32_t* keys, std::int32_t* count,
                        const Execution& execution);

// The keys of all rows of scores in their order, [batch, heads, Sk], and its inverse: -1 and Sk for keys that
// are never chosen.
std::size_t order_workspace_size(const SelectionArgs& args);
void order_keys(const SelectionArgs& args, std::int32_t* key_of_rank, std::int32_t* rank_of_key,
                const Execution& execution);

std::size_t rank_workspace_size(const RankArgs& args);
void rank_keys(const RankArgs& args, const Execution& execution);

// ---- Plan ---------------------------------------------------------------------------------------

// Length of a tile's list in PlanBuffers::keys, a multiple of plan_block. The list of tile t of row
// r begins at (r * tiles + t) * plan_capacity.
//
// From count up to the next multiple of plan_block a list is filled with key 0 (in the plan of a
// KeyList, with other keys), so that blocks of keys can be loaded without a test of each index.
//
// Both groups of a list ascend, so n entries of one group are a run of consecutive positions
// exactly when keys[n - 1] - keys[0] == n - 1: sliding windows and packed documents need no search
// for runs.
inline constexpr std::int64_t plan_block = 128;
std::int64_t plan_capacity(const PlanArgs& args);

// batch * heads * tiles * plan_capacity.
std::int64_t plan_entries(const PlanArgs& args);

// A plan has at most 32767 tiles.
std::size_t plan_workspace_size(const PlanArgs& args);

// If the intervals break the bound, lists lose keys, but nothing outside the buffers is written.
Plan build_plan(const PlanArgs& args, const PlanBuffers& buffers, const Execution& execution);

// The one function here that waits for the device.
std::size_t measure_workspace_size(const PlanArgs& args);
KeyBound measure_key_bound(const PlanArgs& args, const Execution& execution);

// ---- Slots --------------------------------------------------------------------------------------

// The schedule of a key-major kernel. A key lives in a slot from the first tile that sees it to the
// last, as a value lives in a register; the keys of a block of consecutive slots are a dense key
// tile of which only few change from one query tile to the next.
//
// Number the keys of a row by their first tile, and among equals by position: the arrivals; and by
// their last tile: the departures. Arrival n takes slot n if n < slots, else the slot of departure
// n - slots. No tile sees more than `slots` keys, so that departure was in an earlier tile. The
// keys of a slot are thus a chain: slot s begins with arrival s, and successor leads on.
//
// The tiles may be cut into segments that are worked on independently: slot s of segment g begins
// with arrival starts[g][s], which may have arrived before the segment or arrive within or after
// it. A key that crosses a cut appears in both segments.
struct SlotSchedule {
  int slots = 0;     // plan_capacity
  int segments = 1;  // of ceil(tiles / segments) tiles
  // [batch, heads, Sk] keys, -1 after the last.
  std::int32_t* arrivals = nullptr;
  // [batch, heads, Sk] by arrival number; -1 for the last of its slot, unwritten after the last.
  std::int32_t* successor = nullptr;
  // [batch, heads] arrivals.
  std::int32_t* count = nullptr;
  // [batch, heads, segments, slots]; -1: empty from there on.
  std::int32_t* starts = nullptr;
};

std::size_t slot_workspace_size(const PlanArgs& args);

// Fills the arrays of `schedule`, whose slots and segments are given.
void assign_slots(const PlanArgs& args, const SlotSchedule& schedule, const Execution& execution);

}  // namespace flash_dmattn::cuda
