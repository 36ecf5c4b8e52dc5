#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>

#include "cuda/attention/compiled.h"
#include "cuda/primitives/convert.cuh"
#include "cuda/sm90/compiled.h"
#include "cuda/sm90/kernel_choice.h"

// From a choice to the kernel that was compiled for it.
namespace flash_dmattn::cuda::sm90 {

// Calls body.template operator()<T, D>() for the dtype and the head-dim bucket of a choice.
template <class Variant, class Body>
void dispatch_bucket(const KernelChoice<Variant>& choice, const Body& body) {
  const auto call = [&]<class T, int D>() {
    if constexpr (is_compiled && has_kernels_of(Element<T>::dtype, D)) {
      body.template operator()<T, D>();
    } else {
      throw std::logic_error("not compiled: " + name(choice));
    }
  };
  const auto with_dtype = [&]<class T>() {
    [&]<std::size_t... i>(std::index_sequence<i...>) {
      const bool found = ((choice.head_dim == head_dims[i] &&
                           (call.template operator()<T, head_dims[i]>(), true)) ||
                          ...);
      if (!found) throw std::logic_error("no such kernel: " + name(choice));
    }(std::make_index_sequence<head_dims.size()>());
  };
  choice.dtype == DType::bf16 ? with_dtype.template operator()<__nv_bfloat16>()
                              : with_dtype.template operator()<__half>();
}

// Calls body.template operator()<Variant>() for the variant of a choice, which is one of `variants`, possibly without
// overlap.
template <class T, int D, auto variants, class Choice, class Body>
void dispatch(const Choice& choice, const Body& body) {
  bool found = false;
  const auto call_if_chosen = [&]<auto Variant>() {
    if (choice.variant != Variant) return;
    body.template operator()<Variant>();
    found = true;
  };
  const auto search = [&]<bool Overlaps>() {
    [&]<std::size_t... i>(std::index_sequence<i...>) {
      (call_if_chosen.template operator()<with_overlap(variants[i], Overlaps)>(), ...);
    }(std::make_index_sequence<variants.size()>());
  };
  if constexpr (has_no_overlap(Element<T>::dtype, D)) search.template operator()<false>();
  search.template operator()<true>();
  if (!found) throw std::logic_error("no such kernel: " + name(choice));
}

}  // namespace flash_dmattn::cuda::sm90
