#pragma once

#include <cuda_runtime.h>

#include "cuda/attention/params.h"
#include "cuda/primitives/device_workspace.h"
#include "flash_dmattn/attention.h"

// The stages before and after a main loop that all families share. Each stage is one or two launches.
namespace flash_dmattn::cuda {

// ---- Before the main loop -------------------------------------------------------------------------------

// Makes parameters from the arguments of a call, without tile lists and workspace.
ForwardParams params_of(const ForwardArgs& args);

// Allocates a packed mask if the problem has a dense mask, unless the kernel follows tile lists and reads
// single elements.
PackedMask allocate_packed_mask(const Problem& p, bool has_lists, WorkspaceAllocator& workspace);

// Allocates the states without bits, for kernels that read the mask's bytes, 16 at a time.
PackedMask allocate_mask_states(const Problem& p, WorkspaceAllocator& workspace);

struct PackMaskParams;

// The parameters of the kernel that fills score.packed_mask from score.mask.
PackMaskParams pack_mask_params(const Problem& p, const ScoreParams& score);

// Fills score.packed_mask if there is one, or only its states if it has no bits.
void pack_mask(const Problem& p, const ScoreParams& score, cudaStream_t stream);

// Makes the parameters of a backward, to which the family adds tile lists, workspace and dbias.
BackwardParams params_of(const BackwardArgs& args);

struct KeyBlockQueries;

// The memory for key ranges of query tiles, used if there are intervals of more than a few keys and no lists.
struct KeyRangeWorkspace {
  KeyBlockQueries* blocks = nullptr;
  int2* groups = nullptr;
  KeyRange* ranges = nullptr;
};
KeyRangeWorkspace allocate_key_ranges(const Problem& p, const Inputs& in, bool has_lists,
                                      WorkspaceAllocator& workspace);

// Finds the first and the last key that each query tile visits.
KeyRanges find_key_ranges(const Problem& p, const Inputs& in, const KeyRangeWorkspace& workspace,
                          cudaStream_t stream);

// Computes delta, lse_log2 and the flags of a backward.
void preprocess_backward(const BackwardParams& params, DType dtype, cudaStream_t stream);

// ---- After it -------------------------------------------------------------------------------------------

// The shape of the fp32 sums for dbias. A bias without a query or a key dimension has sums for every head and batch
// element, so that no two blocks add to the same sum in a varying order.
BroadcastShape dbias_accum_shape(const Problem& p);

// A view of these sums to which a main loop adds or stores.
OutputBroadcast dbias_sums(const Problem& p, float* sums);

// Stores dbias from `sums` of dbias_accum_shape, or zeros if `sums` is null.
void store_dbias(const BackwardArgs& args, const float* sums, cudaStream_t stream);

// Corrects gradients where an operand is not finite; called before store_dbias. It recomputes rows of dq to which such
// keys contributed that the rows do not see. Without saturation it writes NaN to the dk, dv and dbias that depend on
// such an element.
void fix_gradients(const BackwardParams& params, DType dtype, cudaStream_t stream);

}  // namespace flash_dmattn::cuda
