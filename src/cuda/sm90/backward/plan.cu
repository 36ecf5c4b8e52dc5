#include "cuda/sm90/backward/plan.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cuda/attention/problem.h"
#include "cuda/attention/scheduler.cuh"
#include "cuda/device_plan.h"
#include "cuda/family.h"
#include "cuda/primitives/integers.h"
#include "cuda/primitives/launch.h"
#include "cuda/schedule/schedule.h"
#include "cuda/sm90/backward/launch.h"
#include "cuda/sm90/backward/stages/preprocess.cuh"
#include "cuda/sm90/backward/stages/tensors.h"
#include "cuda/sm90/dense/rows.h"
#include "cuda/sm90/dispatch.h"
#include "cuda/stages/stages.h"

namespace flash_dmattn::cuda::sm90 {
namespace {

// The main loop needs a positive scale. A copy of q takes the sign of a negative scale. For a scale of 0, where scores
// are only biases, the copy is 0. Accumulators begin with (bias - lse) / scale; the divisor is at least 1e-30, below
// which q . k has no effect.
SourceForm query_form(float scale) {
  SourceForm form;
  if (scale < 0) form.flipped_bits = 0x80008000;
  if (scale == 0) form.kept_bits = 0;
  return form;
}
float score_unit(float scale) { return scale == 0 ? 1 : std::max(std::abs(scale), 1e-30F); }

// Whether one block of keys computes all dS of an element of a dense dbias, one head after another.
bool is_dbias_of_one_block(const Problem& p) {
  const BroadcastShape& bias = p.bias_shape;
  return bias[0] == p.batch && bias[3] == p.seqlen_k && bias[3] > 1 &&
         (bias[1] == p.heads_q || bias[1] == p.heads_kv);
}

// Whether the block can store the element, which is one dS or the sum of dS of two heads.
bool owns_dense_dbias(const Problem& p) {
  return is_dbias_of_one_block(p) && (p.bias_shape[1] == p.heads_q || p.heads_q == 2 * p.heads_kv);
}

// The plan of a backward: its kernel, the parameters of its launches, and its arrays in the caller's workspace.
struct BackwardPlan {
  std::size_t bytes;  // of the workspace

  Problem problem;
  SlotSchedule schedule;  // followed by the variants with slots
  BackwardChoice choice;
  BackwardParams common;  // parameters of the call, for kernels before and after the main loop
  BackwardKernelParams params{};
  Source q, k, v, dout;
  Sink dk, dv;
  // Memory that is zeroed before the preprocess.
  std::byte* zeroed = nullptr;
  std::size_t zeroed_bytes = 0;
  float* dbias_sums = nullptr;  // dbias_accum_shape

  BackwardPlan(const BackwardArgs& args, const Execution&)
      : problem(args.problem),
        schedule(problem, args.in.visibility, {slot_tile_rows, slot_segments}),
        choice(choose_backward(args, schedule.exists())),
        common(params_of(args)),
        q(common.shape, args.in.q, common.shape.seqlen_q, common.shape.heads_q,
          common.shape.head_dim, query_form(common.score.scale)),
        k(common.shape, args.in.k, common.shape.seqlen_k, common.shape.heads_kv,
          common.shape.head_dim, {}),
        v(common.shape, args.in.v, common.shape.seqlen_k, common.shape.heads_kv,
          common.shape.value_dim, {}),
        dout(common.shape, args.dout, common.shape.seqlen_q, common.shape.heads_q,
             common.shape.value_dim, {}),
        dk(rows_of(args.dk), common.shape.head_dim, variant().has_slots()),
        dv(rows_of(args.dv), common.shape.value_dim, variant().has_slots()) {
    const DeviceProperties& device = current_device();
    if (variant().has_dense()) set_visits();
    if (variant().has_slots()) set_slots(args, device);
    params.blocks = order_of(args.in.visibility.bound.consecutive, args.dq.data != nullptr, device);
    bytes = allocate(nullptr);
  }

  void run(const BackwardArgs& args, const Execution& execution) const {
    const auto stream = static_cast<cudaStream_t>(execution.stream);
    BackwardPlan placed = *this;
    placed.place(args, execution.workspace);
    const BackwardParams& p = placed.common;
    if (variant().has_slots()) placed.schedule.build(execution);
    const Problem& problem = args.problem;
    const DType dtype = problem.dtype;
    const bool stores_dbias = p.dbias.data != nullptr && placed.has_dbias_sums();
    check(cudaMemsetAsync(placed.zeroed, 0, placed.zeroed_bytes, stream), "cudaMemsetAsync");
    for (const Source* source : {&placed.q, &placed.k, &placed.v, &placed.dout})
      source->make(stream);
    dispatch_bucket(placed.choice, [&]<class T, int D>() {
      using Preprocess = PreprocessKernel<T>;
      const typename Preprocess::Params params = placed.preprocess_params<T>();
      if (p.score.packed_mask.states != nullptr) {
        using Kernel = PackAndPreprocessKernel<T>;
        const typename Kernel::Params both{pack_mask_params(problem, p.score), params};
        launch<Kernel>(Kernel::blocks(both), both, stream);
      } else {
        launch<Preprocess>(Preprocess::blocks(params), params, stream);
      }
      launch_backward<T, D>(placed.choice, placed.params, stream);
    });
    placed.dk.store(p.shape, stream);
    placed.dv.store(p.shape, stream);
    fix_gradients(p, dtype, stream);
    if (stores_dbias) store_dbias(args, placed.dbias_sums, stream);
  }

  std::string kernel_name() const { return name(choice); }

  // Sets all that depends on the address of the workspace.
  void place(const BackwardArgs& args, void* base) {
    allocate(base);
    if (args.dbias.data != nullptr) set_dbias(args);
    set_main_loop();
    if (args.dq.data == nullptr) {
      params.dq_accum = nullptr;
      params.order = {};
      params.slots.plan_shape.ordered = false;
    }
  }

  const BackwardVariant& variant() const { return choice.variant; }
  BackwardPolicy policy() const {
    return backward_policy(choice.head_dim, choice.value_dim, variant());
  }
  bool has_dbias_sums() const {
    return has(problem.bias_shape) && !(is_dense(problem.bias_shape) && owns_dense_dbias(problem));
  }

  template <class T>
  typename PreprocessKernel<T>::Params preprocess_params() const {
    const ScoreParams& score = params.backward.score;
    PrepareKeyInfo<T> key_info{common.shape, score, params.info, params.bias_factor};
    // A delayed bias of -inf would hide its key from every query.
    if (variant().delays) key_info.masked_bias = std::numeric_limits<float>::lowest();
    return {.common = common,
            .key_info = key_info,
            .key_blocks = ceil_div(key_info.items(), PreprocessKernel<T>::threads),
            .factor = score.factor,
            .has_dense = variant().has_dense(),
            .row_stats = params.row_stats,
            .dq_accum = params.dq_accum,
            .tile_rows = policy().rows,
            .accum_columns = choice.head_dim};
  }

 private:
  KeyBlockOrder order_of(bool consecutive, bool wants_dq, const DeviceProperties& device) const {
    const Shape& shape = common.shape;
    return key_block_order({
        .heads = KeyTile::all_heads(shape),
        .heads_of_l2 = KeyTile::heads_of_l2(shape),
        .group = shape.group_heads(),
        .works = ceil_div(shape.seqlen_k, policy().work_keys()),
        .at_once = device.multiprocessors / policy().cluster,
        .consecutive = consecutive,
        .ordered = problem.deterministic && !variant().has_slots() && wants_dq,
        .dense = variant().has_dense(),
        .causal_from_start = problem.causal && shape.seqlen_q >= shape.seqlen_k,
    });
  }

  // Sets the pointers into the workspace, and returns its size. With a null base it only counts.
  std::size_t allocate(void* base) {
    WorkspaceAllocator workspace(base);
    for (Source* const source : {&q, &k, &v, &dout}) source->place(common.shape, workspace);
    for (Sink* const sink : {&dk, &dv}) sink->place(common.shape, workspace);
    const Problem& p = problem;
    const std::int64_t rows = p.batch * p.heads_q * p.seqlen_q;
    common.delta = workspace.take<float>(rows);
    common.score.packed_mask = allocate_packed_mask(p, false, workspace);
    const std::int64_t tile_rows = policy().rows;
    const std::int64_t padded_rows =
        p.batch * p.heads_q * ceil_div(p.seqlen_q, tile_rows) * tile_rows;
    params.row_stats = workspace.take<float>(padded_rows * row_stats_bytes / 4);
    if (variant().has_info())
      params.info = allocate_key_info(common.shape, common.score, workspace);
    if (variant().has_dense()) allocate_visits(workspace);
    if (variant().has_slots()) allocate_slots(workspace);

    const std::size_t begin = workspace.used();
    zeroed = workspace.take<std::byte>(0);
    common.flags = workspace.take<std::uint32_t>(1);
    if (p.deterministic) {
      const std::int64_t key_blocks =
          policy().cluster * ceil_div(p.seqlen_k, std::int64_t{policy().work_keys()});
      const bool slots = variant().has_slots();
      if (!slots) params.order.started = workspace.take<int>(1);
      const std::int64_t steps = ceil_div(p.seqlen_q, tile_rows) *
                                 ceil_div(p.heads_q / p.heads_kv, std::int64_t{order_heads});
      params.order.published = workspace.take<int>(p.batch * p.heads_kv *
                                                   (slots ? policy().cluster * steps : key_blocks));
    }
    if (has_dbias_sums()) dbias_sums = workspace.take<float>(elements(dbias_accum_shape(p)));
    zeroed_bytes = workspace.used() - begin;
    params.dq_accum = workspace.take<float>(padded_rows * choice.head_dim);
    return workspace.bytes();
  }

  void set_dbias(const BackwardArgs& args) {
    const Problem& p = args.problem;
    common.dbias_accumulates = has_dbias_sums();
    common.dbias = has_dbias_sums() ? cuda::dbias_sums(p, dbias_sums)
                                    : broadcast_of(p, p.bias_shape, args.dbias.data,
                                                   args.dbias.stride, size_of(p.bias_dtype));
    if (has_dbias_sums() || !is_dense(p.bias_shape)) return;
    const bool sums_heads = p.bias_shape[1] != p.heads_q && common.dbias.data != nullptr;
    // The TMA unit writes 16 bytes at once, also at the end of a row.
    const bool by_tma =
        p.seqlen_k % 8 == 0 && DenseRows(common.shape, common.dbias).has_tensor_map();
    params.dense_dbias = {.sums_heads = sums_heads, .clears = true, .by_tma = by_tma};
  }

  void set_main_loop() {
    const float scale = common.score.scale;
    const float unit = score_unit(scale);
    BackwardParams& main_loop = params.backward;
    main_loop = common;
    main_loop.q = q.rows();
    main_loop.k = k.rows();
    main_loop.v = v.rows();
    main_loop.dout = dout.rows();
    main_loop.dk = dk.rows;
    main_loop.dv = dv.rows;
    main_loop.score.factor = unit * log2e;
    main_loop.score.scale = std::abs(scale);  // for dk; q has the sign
    params.bias_factor = 1 / unit;
    params.dq_scale = scale;
  }

  void set_visits() {
    const Problem& p = problem;
    QueryVisitLists& lists = params.visits;
    lists.capacity = static_cast<int>(p.heads_q / p.heads_kv *
                                      ceil_div(p.seqlen_q, std::int64_t{PackedMask::side}));
    lists.heads_together = is_dense(p.bias_shape);
  }

  void allocate_visits(WorkspaceAllocator& workspace) {
    const Problem& p = problem;
    const std::int64_t blocks =
        p.batch * p.heads_kv * ceil_div(p.seqlen_k, std::int64_t{dense_block_keys});
    QueryVisitLists& lists = params.visits;
    lists.visits = workspace.take<QueryVisit>(blocks * lists.capacity);
    lists.count = workspace.take<int>(blocks);
  }

  void set_slots(const BackwardArgs& args, const DeviceProperties& device) {
    const Problem& p = args.problem;
    SlotParams& slots = params.slots;
    const auto [batch, heads] = p.intervals_shape;
    slots.row_head = heads > 1 ? 1 : 0;
    slots.row_batch = batch > 1 ? heads : 0;
    slots.work_slots = policy().work_keys();
    const auto tiles = static_cast<int>(ceil_div(p.seqlen_q, std::int64_t{slot_tile_rows}));
    slots.segment_tiles = ceil_div(tiles, slot_segments);
    slots.plan_shape = {.heads = static_cast<int>(p.batch * p.heads_kv),
                        .row_blocks = static_cast<int>(
                            ceil_div(schedule.slots().shape.slots, std::int64_t{slots.work_slots})),
                        .units = ceil_div(tiles, slots.segment_tiles),
                        .blocks = device.multiprocessors / policy().cluster,
                        .ordered = p.deterministic};
  }

  void allocate_slots(WorkspaceAllocator& workspace) {
    const Problem& p = problem;
    SlotParams& slots = params.slots;
    slots.records = workspace.take<KeyRecord>(p.batch * p.heads_kv * p.seqlen_k);
    const SlotPlanShape& plan = slots.plan_shape;
    slots.plan = {.parts = workspace.take<SlotPart>(plan.most_parts()),
                  .cut = workspace.take<SlotPart>(plan.most_cut_parts()),
                  .block_parts = workspace.take<int>(plan.blocks + 1),
                  .counts = workspace.take<SlotPlan::Counts>(1)};
    slots.plan_scratch = workspace.take<int>(plan.scratch());
    const std::int64_t rows = std::int64_t{plan.most_cut_parts()} * 2 * slots.work_slots;
    slots.part_sums = workspace.take<float>(rows * (choice.head_dim + choice.value_dim));
    slots.part_dbias = workspace.take<float>(rows);
    schedule.place(workspace);
    slots.slots = schedule.slots();
  }
};

}  // namespace

std::string decline_backward(const Problem& p) {
  if (std::string reason = decline_shape(p, 64); !reason.empty()) return reason;
  if (p.head_dim > 128 && (is_dense(p.mask_shape) || is_dense(p.bias_shape)))
    return "it has no backward for a mask or a bias with a query dimension and a head_dim above "
           "128";
  if (p.softcap > 0) return "it has no backward for a softcap";
  if (p.bias_delay != 0 && (p.head_dim > 128 || is_dense(p.mask_shape))) {
    return "it has no backward for a delayed bias under a dense mask or with a head_dim above 128";
  }
  if (p.batch * p.heads_q * p.seqlen_q * p.seqlen_k == 0) {
    return "it needs at least one query and one key";
  }
  if (is_dense(p.bias_shape) && p.bias_dtype != p.dtype) {
    return "it makes the gradient of a dense bias from dS in 16 bits";
  }
  if (p.deterministic && is_dense(p.bias_shape) && !is_dbias_of_one_block(p)) {
    return "it has no order for the gradient of a dense bias that key heads, batch elements or "
           "keys share";
  }
  return "";
}

void plan_backward(const BackwardArgs& args, const Execution& execution, Plan<BackwardArgs>& plan) {
  make_plan<OnDevice<BackwardPlan>>(args, execution, plan);
}

std::vector<std::string> backward_names(const DeviceProperties&) {
  return names_of(all_choices(backward_variants));
}

}  // namespace flash_dmattn::cuda::sm90
