#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string_view>

#include "cuda/common/integers.h"
#include "cuda/common/launch.h"
#include "cuda/problem.h"
#include "cuda/selection/schedule.h"
#include "cuda/sm90/backward_launch.h"
#include "cuda/sm90/kernel_choice.h"
#include "cuda/sm90/multiprocessors.h"
#include "cuda/sm90/prepare_backward.cuh"
#include "cuda/sm90/tensor_map.h"
#include "cuda/stages.h"

// A backward from its arguments to its launches.
namespace flash_dmattn::cuda::sm90 {
namespace {

constexpr bool is_compiled = FLASH_DMATTN_HAS_SM90 != 0;

constexpr std::string_view name_of(KeyPlacement placement) {
  switch (placement) {
    case KeyPlacement::block: return "block";
    case KeyPlacement::block_key_info: return "block_key_info";
    case KeyPlacement::slots: return "slots";
  }
  return "";
}

BackwardChoice choose(const BackwardArgs& args) {
  const Problem& p = args.problem;
  BackwardChoice choice{p.dtype, head_dim_bucket(static_cast<int>(p.head_dim)),
                        KeyPlacement::block};
  choice.overlaps = overlaps(choice.dtype, choice.head_dim);
  const bool has_info =
      has(p.mask_shape) || has(p.bias_shape) || args.in.visibility.intervals.data != nullptr;
  if (has_info) choice.placement = KeyPlacement::block_key_info;
  // The heads of a group come to a slot together.
  const auto differs_in_group = [&](const BroadcastShape& shape) {
    return shape[1] == p.heads_q && p.heads_q != p.heads_kv && shape[1] > 1;
  };
  if (!args.schedule.empty() && !differs_in_group(p.mask_shape) &&
      !differs_in_group(p.bias_shape)) {
    choice.placement = KeyPlacement::slots;
  }
  return choice;
}

// A tensor, or room for a dense copy of it where the TMA unit cannot read it.
struct Source {
  Shape shape;
  InputRows original;
  OutputRows copy;  // null data: none
  int seqlen;
  int heads;
  bool copied;

  Source(const BackwardArgs& args, const ConstTensor4& tensor, std::int64_t seqlen_,
         std::int64_t heads_, WorkspaceAllocator& workspace)
      : shape(shape_of(args.problem)),
        original(rows_of(tensor)),
        seqlen(static_cast<int>(seqlen_)),
        heads(static_cast<int>(heads_)),
        copied(!has_tensor_map(original, seqlen, heads, shape.batch)) {
    if (!copied) return;
    copy.row_step = heads * shape.head_dim * 2;
    copy.row = copy.row_step;
    copy.head = shape.head_dim * 2;
    copy.batch = copy.row * seqlen;
    copy.aligned = true;
    copy.data = workspace.take<std::byte>(copy.batch * shape.batch);
  }

  // The rows that the kernels read.
  InputRows rows() const {
    if (!copied) return original;
    return {copy.data, copy.batch, copy.row, copy.head, copy.aligned, copy.row_step};
  }

  void make(cudaStream_t stream) const {
    if (!copied) return;
    const CopyRows body{original, copy, seqlen, heads, shape.batch, shape.head_dim};
    for_each(body.items(), body, stream);
  }
};

// A gradient, or room for a dense copy of it where its rows need not begin at multiples of 16 bytes, as those that
// leave slots do. Where the workspace is sized without outputs that is not known yet.
struct Sink {
  OutputRows original;
  OutputRows rows;  // what the kernels write
  bool copied;

  Sink(const Shape& shape, const OutputRows& to, bool needs_alignment,
       WorkspaceAllocator& workspace)
      : original(to), rows(to), copied(needs_alignment && !to.aligned) {
    if (!needs_alignment || (to.data != nullptr && to.aligned)) return;
    OutputRows dense;
    dense.row_step = shape.heads_kv * shape.head_dim * 2;
    dense.row = dense.row_step;
    dense.head = shape.head_dim * 2;
    dense.batch = dense.row * shape.seqlen_k;
    dense.aligned = true;
    dense.data = workspace.take<std::byte>(dense.batch * shape.batch);
    if (to.data != nullptr) rows = dense;
  }

  void store(const Shape& shape, cudaStream_t stream) const {
    if (!copied || original.data == nullptr) return;
    const CopyRows body{{rows.data, rows.batch, rows.row, rows.head, rows.aligned, rows.row_step},
                        original,
                        shape.seqlen_k,
                        shape.heads_kv,
                        shape.batch,
                        shape.head_dim};
    for_each(body.items(), body, stream);
  }
};

// The arrays of a call in the caller's workspace. Constructed with a null base it only counts them.
struct Call {
  BackwardChoice choice;
  BackwardKernelParams params{};
  Source q, k, v, dout;
  Sink dk, dv;
  // Zeroed before the main loop.
  std::byte* zeroed = nullptr;
  std::size_t zeroed_bytes = 0;
  float* dbias_accum = nullptr;

  Call(const BackwardArgs& args, WorkspaceAllocator& workspace)
      : choice(choose(args)),
        q(args, args.in.q, args.problem.seqlen_q, args.problem.heads_q, workspace),
        k(args, args.in.k, args.problem.seqlen_k, args.problem.heads_kv, workspace),
        v(args, args.in.v, args.problem.seqlen_k, args.problem.heads_kv, workspace),
        dout(args, args.dout, args.problem.seqlen_q, args.problem.heads_q, workspace),
        dk(shape_of(args.problem), rows_of(args.dk), choice.placement == KeyPlacement::slots,
           workspace),
        dv(shape_of(args.problem), rows_of(args.dv), choice.placement == KeyPlacement::slots,
           workspace) {
    const Problem& p = args.problem;
    BackwardParams& common = params.backward;
    common = params_of(args);
    common.q = q.rows();
    common.k = k.rows();
    common.v = v.rows();
    common.dout = dout.rows();
    common.dk = dk.rows;
    common.dv = dv.rows;
    const std::int64_t rows = p.batch * p.heads_q * p.seqlen_q;
    common.lse_log2 = workspace.take<float>(rows);
    common.lse_log2_low = workspace.take<float>(rows);
    common.delta = workspace.take<float>(rows);
    const std::int64_t tile_rows = backward_policy(choice.head_dim, choice.placement).rows;
    const std::int64_t padded_rows =
        p.batch * p.heads_q * ceil_div(p.seqlen_q, tile_rows) * tile_rows;
    params.row_stats = workspace.take<float>(2 * padded_rows);
    if (choice.placement != KeyPlacement::block)
      params.info = allocate_key_info(common.shape, common.score, workspace);

    if (choice.placement == KeyPlacement::slots) place_slots(args, workspace);

    const std::size_t begin = workspace.used();
    zeroed = workspace.take<std::byte>(0);
    common.flags = workspace.take<std::uint32_t>(1);
    if (p.deterministic) {
      const std::int64_t key_blocks = ceil_div(p.seqlen_k, std::int64_t{BackwardPolicy::keys});
      const bool slots = choice.placement == KeyPlacement::slots;
      if (!slots) params.order.started = workspace.take<int>(1);
      params.order.published = workspace.take<int>(
          p.batch * p.heads_kv * (slots ? ceil_div(p.seqlen_q, tile_rows) : key_blocks));
    }
    if (has(p.bias_shape)) dbias_accum = workspace.take<float>(elements(dbias_accum_shape(p)));
    params.dq_accum = workspace.take<float>(padded_rows * choice.head_dim);
    zeroed_bytes = workspace.used() - begin;
    if (args.dbias.data != nullptr) {
      common.dbias_accumulates = true;
      common.dbias = dbias_sums(p, dbias_accum);
    }
    if (args.dq.data == nullptr) {
      params.dq_accum = nullptr;
      params.order = {};
    }
  }

 private:
  void place_slots(const BackwardArgs& args, WorkspaceAllocator& workspace) {
    const Problem& p = args.problem;
    SlotParams& slots = params.slots;
    slots.slots = key_slots(args.schedule, {slot_tile_rows, slot_segments});
    const auto [batch, heads] = p.intervals_shape;
    slots.row_head = heads > 1 ? 1 : 0;
    slots.row_batch = batch > 1 ? heads : 0;
    slots.row_blocks =
        static_cast<int>(ceil_div(slots.slots.shape.slots, std::int64_t{SlotParams::block_slots}));
    const auto tiles = static_cast<int>(ceil_div(p.seqlen_q, std::int64_t{slot_tile_rows}));
    slots.segment_tiles = ceil_div(tiles, slot_segments);
    slots.partition = SlotPartition(static_cast<int>(p.batch * p.heads_kv) * slots.row_blocks,
                                    ceil_div(tiles, slots.segment_tiles), multiprocessors());
    slots.records = workspace.take<SlotRecord>(p.batch * p.heads_kv * p.seqlen_k);
    const std::int64_t rows = std::int64_t{slots.partition.cut_parts()} * SlotParams::part_rows;
    slots.part_sums = workspace.take<float>(rows * 2 * choice.head_dim);
    slots.part_dbias = workspace.take<float>(rows);
  }
};

}  // namespace

std::string name(const BackwardChoice& choice) {
  std::string text = "sm90 backward ";
  text.append(flash_dmattn::name_of(choice.dtype)).append(" d");
  text.append(std::to_string(choice.head_dim)).append(" ").append(name_of(choice.placement));
  return text.append(choice.overlaps ? "" : " no_overlap");
}

std::string decline_backward(const Problem& p) {
  if (p.dtype != DType::bf16 && p.dtype != DType::f16) return "it computes in bf16 and f16";
  if (p.head_dim % 8 != 0) return "it needs a head_dim that is a multiple of 8";
  if (p.head_dim > 128) return "it has no backward for a head_dim above 128";
  if (p.softcap > 0) return "it has no backward for a softcap";
  // Scores begin with -lse / scale.
  if (!(p.scale > 1e-6F)) return "its backward needs a scale above 1e-6";
  if (is_dense(p.mask_shape) || is_dense(p.bias_shape)) {
    return "it has no backward for a mask or a bias with a query dimension";
  }
  if (has(p.limit_shape)) return "it has no kernels for ranks";
  if (p.key_list_shape[0] != 0) return "it has no backward for a key list";
  if (p.batch * p.heads_q * p.seqlen_q * p.seqlen_k == 0) {
    return "it needs at least one query and one key";
  }
  if (std::max(
          {p.seqlen_q, p.seqlen_k, p.batch * p.heads_q * ceil_div(p.seqlen_q, std::int64_t{64})}) >
      std::numeric_limits<std::int32_t>::max() / 2) {
    return "it counts rows and tiles in 31 bits";
  }
  return "";
}

std::size_t backward_workspace_size(const BackwardArgs& args, const DeviceProperties&) {
  WorkspaceAllocator workspace(nullptr);
  Call(args, workspace);
  return workspace.used();
}

void run_backward(const BackwardArgs& args, const DeviceProperties&, const Execution& execution) {
  const auto stream = static_cast<cudaStream_t>(execution.stream);
  WorkspaceAllocator workspace(execution.workspace);
  const Call call(args, workspace);
  const BackwardParams& p = call.params.backward;
  const DType dtype = args.problem.dtype;
  check(cudaMemsetAsync(call.zeroed, 0, call.zeroed_bytes, stream), "cudaMemsetAsync");
  for (const Source* source : {&call.q, &call.k, &call.v, &call.dout}) source->make(stream);
  preprocess_backward(p, dtype, stream);
  const auto launch_dtype = [&]<class T>() {
    if constexpr (is_compiled) {
      call.choice.head_dim == 64 ? launch_backward<T, 64>(call.choice, call.params, stream)
                                 : launch_backward<T, 128>(call.choice, call.params, stream);
    }
  };
  dtype == DType::bf16 ? launch_dtype.template operator()<__nv_bfloat16>()
                       : launch_dtype.template operator()<__half>();
  recompute_extreme_gradients(p, dtype, stream);
  fix_gradients(p, dtype, stream);
  call.dk.store(p.shape, stream);
  call.dv.store(p.shape, stream);
  if (p.dbias.data != nullptr) store_dbias(args, call.dbias_accum, stream);
}

std::string backward_name(const BackwardArgs& args, const DeviceProperties&) {
  return name(choose(args));
}

std::vector<std::string> backward_names(const DeviceProperties&) {
  std::vector<std::string> names;
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const int head_dim : {64, 128}) {
      for (const KeyPlacement placement :
           {KeyPlacement::block, KeyPlacement::block_key_info, KeyPlacement::slots})
        names.push_back(name({dtype, head_dim, placement, overlaps(dtype, head_dim)}));
    }
  }
  return names;
}

}  // namespace flash_dmattn::cuda::sm90
