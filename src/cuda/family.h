#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "backend.h"
#include "cuda/device.h"
#include "flash_dmattn/attention.h"
#include "flash_dmattn/kv_cache.h"

// A family is a set of kernels for one generation of matrix instructions. One table lists the families, newest
// first; a call runs on the first family that does not decline it. Everything that a single family decides
// (tiles, accumulator layouts, which of its kernels runs) is in its folder.
//
// Families agree on what a forward saves (lse and lse_low, see attention.h), so that the backward of one can
// follow the forward of another.
namespace flash_dmattn::cuda {

// The kernels of a family for one kind of call: attention of a problem, or the step of a KV cache of a shape.
template <class Args, class Subject = Problem>
struct Kernels {
  // The reason why these kernels do not compute such calls; "" if they do.
  std::string (*decline)(const Subject&) = nullptr;
  // Chooses a kernel, whose name is one of `names`, and lays out the workspace, with the schedule that the kernel
  // follows if there are intervals.
  PlanFunction<Args> plan = nullptr;
  // The names of all main kernels that the build has for a GPU.
  std::vector<std::string> (*names)(const DeviceProperties&) = nullptr;

  explicit operator bool() const { return plan != nullptr; }
};

struct Family {
  std::string_view name;
  // The reason why the family does not run on a GPU; "" if it does.
  std::string (*decline_device)(const DeviceProperties&);
  Kernels<ForwardArgs> forward = {};
  // Kernels for few queries over many keys, which split the keys over the whole GPU. The backend tries them before any
  // family's `forward`.
  Kernels<ForwardArgs> few_queries = {};
  Kernels<BackwardArgs> backward = {};
  // Inserts a token into a cache and computes its query's attention over the slots.
  Kernels<DecodeStepArgs, KvCacheShape> decode_step = {};
};

// The begin of the name of a main kernel, such as "sm80 few_queries bf16 d128".
inline std::string kernel_name(std::string_view family, std::string_view kind, DType dtype,
                               int head_dim) {
  std::string name(family);
  name.append(" ").append(kind).append(" ").append(name_of(dtype)).append(" d");
  return name.append(std::to_string(head_dim));
}

// The names of choices of kernels, each of which has a function name(choice).
template <class Choice>
std::vector<std::string> names_of(const std::vector<Choice>& choices) {
  std::vector<std::string> names;
  for (const Choice& choice : choices) names.push_back(name(choice));
  return names;
}

// The families, newest first, without families above the cap (device.h). Throws InvalidArgument if the cap is not the
// name of a family.
std::span<const Family* const> families();

}  // namespace flash_dmattn::cuda
