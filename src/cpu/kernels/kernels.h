#pragma once

#include <cstdint>

#include "cpu/kernels/backward.h"
#include "cpu/kernels/few_queries.h"
#include "cpu/kernels/forward.h"
#include "cpu/kernels/reduce.h"
#include "cpu/kernels/score_projection.h"
#include "cpu/kernels/shared_dbias.h"

// The kernels of this instruction set.
namespace flash_dmattn::cpu::FLASH_DMATTN_ISA {

// For arrays of the dtype `In`, whose products have factors of the form `Element`.
template <class In, class Element>
inline constexpr Kernels kernels_of = {
    .forward_scratch = forward_scratch<In, Element>,
    .backward_scratch = backward_scratch<In, Element>,
    .forward_block_bytes = key_block_bytes<ForwardKeys<In, Element>>,
    .backward_block_bytes = key_block_bytes<BackwardKeys<In, Element>>,
    .pack_forward = pack_key_block<ForwardKeys<In, Element>, In>,
    .pack_backward = pack_key_block<BackwardKeys<In, Element>, In>,
    .forward = forward_item<In, Element>,
    .few_queries_scratch = few_queries_scratch<In, Element>,
    .split_bytes = split_bytes,
    .few_queries = few_queries_item<In, Element>,
    .merge_splits = merge_splits<In>,
    .backward = backward_unit<In, Element>,
    .shared_dbias = shared_dbias_item<In, Element>,
    .add_dbias_parts = add_dbias_parts,
    .reduce = reduce_item<In>,
    .project_scores = project_scores_item<In>,
};

inline constexpr IsaKernels kernels = {.f32 = kernels_of<F32, Single>,
                                       .bf16 = kernels_of<Bf16, Bf16Element>,
                                       .f16 = kernels_of<F16, Single>};

}  // namespace flash_dmattn::cpu::FLASH_DMATTN_ISA
