#include "backend.h"
#include "cuda/selection/selection.h"
#include "cuda/stages/check_finite.h"
#include "cuda/stages/zero_sum.h"
#include "flash_dmattn/error.h"

// Replaces the CUDA backend in a build without one. Everything declines with the same reason.
namespace flash_dmattn {
namespace cuda {
namespace {

constexpr const char* reason = "this build has no CUDA backend";

[[noreturn]] void decline() {
  throw InvalidArgument("device", "cuda", std::string("cpu: ") + reason);
}

}  // namespace

std::size_t select_workspace_size(const SelectionArgs&) { decline(); }
void select_key_intervals(const SelectionArgs&, const Execution&) { decline(); }
std::int64_t key_list_stride(const SelectionArgs&) { decline(); }
std::size_t select_list_workspace_size(const SelectionArgs&) { decline(); }
KeyList select_key_list(const SelectionArgs&, std::int32_t*, std::int32_t*, const Execution&) {
  decline();
}
std::size_t rank_workspace_size(const RankArgs&) { decline(); }
void rank_keys(const RankArgs&, const Execution&) { decline(); }
std::int64_t tile_list_capacity(const TileListArgs&) { decline(); }
std::size_t tile_lists_workspace_size(const TileListArgs&) { decline(); }
QueryTileLists build_tile_lists(const TileListArgs&, const TileListBuffers&, const Execution&) {
  decline();
}
std::size_t measure_workspace_size(const TileListArgs&) { decline(); }
KeyBound measure_key_bound(const TileListArgs&, const Execution&) { decline(); }
NonFiniteElement first_nonfinite(const ConstTensor4&, const std::array<std::int64_t, 4>&, DType,
                                 bool, const Execution&) {
  decline();
}
void make_zero_sum(const float*, float*, std::int64_t, std::int64_t, const Execution&) {
  decline();
}

}  // namespace cuda

const Backend cuda_backend = {
    .name = "cuda",
    .device = Device::cuda,
    .info = [] { return BackendInfo{"cuda", false, cuda::reason}; },
    .supports = [](const Problem&) { return std::string(cuda::reason); },
    .schedule_size = [](const Problem&, const Visibility&, Direction,
                        const Execution&) -> std::size_t { cuda::decline(); },
    .schedule_workspace_size = [](const Problem&, const Visibility&, Direction,
                                  const Execution&) -> std::size_t { cuda::decline(); },
    .build_schedule = [](const Problem&, const Visibility&, Direction, std::span<std::byte>,
                         const Execution&) -> ScheduleContents { cuda::decline(); },
    .forward_workspace_size = [](const ForwardArgs&, const Execution&) -> std::size_t {
      cuda::decline();
    },
    .backward_workspace_size = [](const BackwardArgs&, const Execution&) -> std::size_t {
      cuda::decline();
    },
    .forward = [](const ForwardArgs&, const Execution&) { cuda::decline(); },
    .backward = [](const BackwardArgs&, const Execution&) { cuda::decline(); },
    .forward_kernel = [](const ForwardArgs&) -> std::string { cuda::decline(); },
    .backward_kernel = [](const BackwardArgs&) -> std::string { cuda::decline(); },
    .kernels = [] { return std::vector<std::string>(); },
    .needs_schedule = false,
    .kv = nullptr,
};

}  // namespace flash_dmattn
