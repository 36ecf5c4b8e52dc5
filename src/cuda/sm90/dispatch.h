#pragma once

#include <cstddef>
#include <stdexcept>
#include <utility>

#include "cuda/primitives/convert.cuh"
#include "cuda/sm90/kernel_choice.h"

namespace flash_dmattn::cuda::sm90 {

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
