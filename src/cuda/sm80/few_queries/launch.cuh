#pragma once

#include "cuda/primitives/launch.h"
#include "cuda/sm80/few_queries/combine.cuh"
#include "cuda/sm80/few_queries/launch.h"
#include "cuda/sm80/few_queries/slots.cuh"
#include "cuda/sm80/few_queries/split_forward.cuh"

namespace flash_dmattn::cuda::sm80::few_queries {

template <class T, int D, SharedClass S, bool ManyRows, class Keys>
void launch_split_forward(const typename Keys::Params& params, cudaStream_t stream) {
  using Kernel = OfClass<SplitForwardKernel<T, D, policy_of(D, S, ManyRows), Keys>, S>;
  static_assert(sizeof(typename Kernel::SharedStorage) <= shared_bytes(S));
  const Split& split = params.split;
  launch<Kernel>(Kernel::blocks(params), params, stream,
                 {.cluster = split.in_cluster ? split.splits : 1});
}

template <class T, int D, SharedClass S, class Keys>
void launch_rows(const Choice& choice, const typename Keys::Params& params, cudaStream_t stream) {
  choice.many_rows ? launch_split_forward<T, D, S, true, Keys>(params, stream)
                   : launch_split_forward<T, D, S, false, Keys>(params, stream);
}

template <class T, int D, SharedClass S>
void launch_split(const Choice& choice, const Params& params, cudaStream_t stream) {
  choice.elementwise ? launch_rows<T, D, S, TensorKeys<T, true>>(choice, params, stream)
                     : launch_rows<T, D, S, TensorKeys<T, false>>(choice, params, stream);
  if (params.split.in_cluster) return;
  using Combine = OfClass<CombineKernel<T, D>, S>;
  launch<Combine>(Combine::blocks(params), params, stream);
}

template <class T, int D, SharedClass S>
void launch_step(const Choice& choice, const StepParams& params, cudaStream_t stream) {
  launch_rows<T, D, S, SlotKeys<T>>(choice, params, stream);
  if (params.split.in_cluster) {
    const int batch = params.shape.batch;
    launch_grid<count_tokens<S>>({ceil_div(batch, 256), 256}, stream, params.seen, params.rows,
                                 batch);
    return;
  }
  using Combine = OfClass<CombineStepKernel<T, D>, S>;
  launch<Combine>(Combine::blocks(params), params, stream);
}

}  // namespace flash_dmattn::cuda::sm80::few_queries
