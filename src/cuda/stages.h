#pragma once

#include <cuda_runtime.h>

#include "cuda/common/device_workspace.h"
#include "cuda/params.h"
#include "flash_dmattn/attention.h"

// The stages before and after a main loop that are the same for every family, each a launch or two.
namespace flash_dmattn::cuda {

// ---- Before the main loop -------------------------------------------------------------------------------

// The arguments of a call, with tile lists of query_tile_rows queries where it has a schedule; no workspace.
ForwardParams params_of(const ForwardArgs& args);

// Room for a packed mask, if the problem has a dense mask or ranks; none where the kernel follows a key list,
// and looks at single elements.
PackedMask allocate_packed_mask(const Problem& p, bool has_lists, WorkspaceAllocator& workspace);

// The same without bits, for kernels that read the mask's bytes, 16 at a time.
PackedMask allocate_mask_states(const Problem& p, WorkspaceAllocator& workspace);

struct PackMaskParams;

// Of the kernel that fills score.packed_mask from score.mask and the ranks.
PackMaskParams pack_mask_params(const Problem& p, const ScoreParams& score);

// Fills score.packed_mask, if there is one; without bits its states.
void pack_mask(const Problem& p, const ScoreParams& score, cudaStream_t stream);

// As for a forward. The family adds tile_lists and dbias.
BackwardParams params_of(const BackwardArgs& args);

struct KeyBlockQueries;

// Room for the key ranges of query tiles, where there are intervals of more than a few keys and no lists.
struct KeyRangeWorkspace {
  KeyBlockQueries* blocks = nullptr;
  KeyRange* ranges = nullptr;
};
KeyRangeWorkspace allocate_key_ranges(const Problem& p, const Inputs& in, bool has_lists,
                                      WorkspaceAllocator& workspace);

// The first and the last key that each query tile visits.
KeyRanges find_key_ranges(const Problem& p, const Inputs& in, const KeyRangeWorkspace& workspace,
                          cudaStream_t stream);

// delta, lse_log2 and the flags of a backward.
void preprocess_backward(const BackwardParams& params, DType dtype, cudaStream_t stream);

// ---- After it -------------------------------------------------------------------------------------------

// Shape of the fp32 sums that a dbias is made of. A bias without a query or a key dimension has sums for every
// head and batch element: then no two blocks add to the same sum in an order that varies.
BroadcastShape dbias_accum_shape(const Problem& p);

// Sums of that shape as what a main loop adds to or stores.
OutputBroadcast dbias_sums(const Problem& p, float* sums);

// dbias from `sums` of dbias_accum_shape, or zeros where `sums` is null.
void store_dbias(const BackwardArgs& args, const float* sums, cudaStream_t stream);

// Corrects gradients where an operand is not finite. Rows of dq that met such keys without seeing them are computed
// again; without saturation NaN is written to the dk, dv and dbias that such an element reaches. Before store_dbias.
void fix_gradients(const BackwardParams& params, DType dtype, cudaStream_t stream);

// The same of main loops without a slow path for extreme numbers: where they met any, every gradient is computed again
// in double.
void fix_or_recompute_gradients(const BackwardParams& params, DType dtype, cudaStream_t stream);

}  // namespace flash_dmattn::cuda
