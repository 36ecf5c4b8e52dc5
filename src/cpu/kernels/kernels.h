#pragma once

#include <cstdint>

#include "cpu/kernels/backward.h"
#include "cpu/kernels/few_queries.h"
#include "cpu/kernels/forward.h"
#include "cpu/kernels/reduce.h"
#include "cpu/kernels/shared_dbias.h"

// The functions of this instruction set, with one instance per dtype of the arrays and factor element.
namespace flash_dmattn::cpu::FLASH_DMATTN_ISA {

// Calls f<In, Element>() for the dtype of a task.
template <class Function>
auto dispatch(const Task& t, const Function& f) {
  switch (t.dtype) {
    case DType::bf16: return f.template operator()<Bf16, Bf16Element>();
    case DType::f16: return f.template operator()<F16, Single>();
    default: return f.template operator()<F32, Single>();
  }
}

inline constexpr Kernels kernels = {
    .forward_scratch =
        [](const Task& t) {
          return dispatch(
              t, [&]<class In, class Element>() { return forward_scratch<In, Element>(t); });
        },
    .backward_scratch =
        [](const BackwardTask& t) {
          return dispatch(
              t, [&]<class In, class Element>() { return backward_scratch<In, Element>(t); });
        },
    .forward_block_bytes =
        [](const Task& t) {
          return dispatch(t, [&]<class In, class Element>() {
            return key_block_bytes<ForwardKeys<In, Element>>(t);
          });
        },
    .backward_block_bytes =
        [](const Task& t) {
          return dispatch(t, [&]<class In, class Element>() {
            return key_block_bytes<BackwardKeys<In, Element>>(t);
          });
        },
    .pack_forward =
        [](const Task& t, std::int64_t item) {
          dispatch(t, [&]<class In, class Element>() {
            pack_key_block<ForwardKeys<In, Element>, In>(t, item);
          });
        },
    .pack_backward =
        [](const Task& t, std::int64_t item) {
          dispatch(t, [&]<class In, class Element>() {
            pack_key_block<BackwardKeys<In, Element>, In>(t, item);
          });
        },
    .forward =
        [](const ForwardTask& t, std::int64_t item, void* scratch) {
          dispatch(t,
                   [&]<class In, class Element>() { forward_item<In, Element>(t, item, scratch); });
        },
    .few_queries_scratch =
        [](const ForwardTask& t) {
          return dispatch(
              t, [&]<class In, class Element>() { return few_queries_scratch<In, Element>(t); });
        },
    .split_bytes = split_bytes,
    .few_queries =
        [](const ForwardTask& t, std::int64_t item, void* scratch) {
          dispatch(t, [&]<class In, class Element>() {
            few_queries_item<In, Element>(t, item, scratch);
          });
        },
    .merge_splits =
        [](const ForwardTask& t, std::int64_t item) {
          dispatch(t, [&]<class In, class>() { merge_splits<In>(t, item); });
        },
    .backward =
        [](const BackwardTask& t, std::int64_t unit, void* scratch) {
          dispatch(
              t, [&]<class In, class Element>() { backward_unit<In, Element>(t, unit, scratch); });
        },
    .shared_dbias =
        [](const BackwardTask& t, std::int64_t item, void* scratch) {
          dispatch(t, [&]<class In, class Element>() {
            shared_dbias_item<In, Element>(t, item, scratch);
          });
        },
    .add_dbias_parts = add_dbias_parts,
    .reduce =
        [](const BackwardTask& t, std::int64_t item) {
          dispatch(t, [&]<class In, class>() { reduce_item<In>(t, item); });
        },
};

}  // namespace flash_dmattn::cpu::FLASH_DMATTN_ISA
