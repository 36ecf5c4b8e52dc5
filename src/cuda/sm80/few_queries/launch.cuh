#pragma once

#include "cuda/common/launch.h"
#include "cuda/sm80/few_queries/combine.cuh"
#include "cuda/sm80/few_queries/launch.h"
#include "cuda/sm80/few_queries/split_forward.cuh"

namespace flash_dmattn::cuda::sm80::few_queries {

template <class T, int D, SharedClass S, bool ManyRows, bool Elementwise>
void launch_split_forward(const Params& params, cudaStream_t stream) {
  using Kernel = OfClass<SplitForwardKernel<T, D, policy(D, S, ManyRows), Elementwise>, S>;
  static_assert(sizeof(typename Kernel::SharedStorage) <= shared_bytes(S));
  launch<Kernel>(Kernel::blocks(params), params, stream);
}

template <class T, int D, SharedClass S>
void launch_split(const Choice& choice, const Params& params, cudaStream_t stream) {
  const auto with_rows = [&]<bool ManyRows>() {
    choice.elementwise ? launch_split_forward<T, D, S, ManyRows, true>(params, stream)
                       : launch_split_forward<T, D, S, ManyRows, false>(params, stream);
  };
  choice.many_rows ? with_rows.template operator()<true>() : with_rows.template operator()<false>();
  using Combine = OfClass<CombineKernel<T, D>, S>;
  launch<Combine>(Combine::blocks(params), params, stream);
}

}  // namespace flash_dmattn::cuda::sm80::few_queries
