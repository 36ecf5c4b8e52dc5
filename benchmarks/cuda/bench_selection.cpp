// Times selection and the schedules of both directions on the GPU: each step replayed from a CUDA graph, a forward's
// steps and all steps from a graph, and a forward's from a stream.
//
//   bench_selection --benchmark_filter=524288
#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "common/float_types.h"
#include "cuda/schedule/slots/key_slots.h"
#include "cuda/selection/selection.h"
#include "device.h"

namespace flash_dmattn::bench {
namespace {

struct Case {
  const char* name;
  std::int64_t rows;
  std::int64_t seqlen;
  std::int64_t window;
  Selection selection;
  DType dtype;
  enum Kind { normal, equal, rising, drifting } kind;
  std::int64_t seqlen_q = 0;  // 0: as many queries as keys
};

constexpr Case cases[] = {
    {"8 x 32768 f32 normal", 8, 32768, 2048, Selection::per_query, DType::f32, Case::normal},
    {"8 x 32768 bf16 normal", 8, 32768, 2048, Selection::per_query, DType::bf16, Case::normal},
    {"8 x 32768 f32 equal", 8, 32768, 2048, Selection::per_query, DType::f32, Case::equal},
    {"8 x 32768 bf16 rising", 8, 32768, 2048, Selection::per_query, DType::bf16, Case::rising},
    {"8 x 32768 f32 drifting", 8, 32768, 2048, Selection::per_query, DType::f32, Case::drifting},
    {"8 x 32768 f32 global", 8, 32768, 2048, Selection::global, DType::f32, Case::normal},
    {"8 x 32768 bf16 global", 8, 32768, 2048, Selection::global, DType::bf16, Case::normal},
    {"64 x 4096 bf16 normal", 64, 4096, 2048, Selection::per_query, DType::bf16, Case::normal},
    {"1 x 32768 w1024 bf16", 1, 32768, 1024, Selection::per_query, DType::bf16, Case::normal},
    {"8 x 131072 f32 normal", 8, 131072, 2048, Selection::per_query, DType::f32, Case::normal},
    {"8 x 131072, 1 query", 8, 131072, 2048, Selection::per_query, DType::f32, Case::normal, 1},
    {"1 query, equal scores", 8, 131072, 2048, Selection::per_query, DType::f32, Case::equal, 1},
    {"8 x 131136, 64 queries", 8, 131136, 2048, Selection::per_query, DType::f32, Case::normal, 64},
    {"64 queries, equal scores", 8, 131136, 2048, Selection::per_query, DType::f32, Case::equal,
     64},
    {"8 x 524288 f32 normal", 8, 524288, 2048, Selection::per_query, DType::f32, Case::normal},
    {"8 x 524288 bf16 equal", 8, 524288, 2048, Selection::per_query, DType::bf16, Case::equal},
    {"8 x 524288 f32 global", 8, 524288, 2048, Selection::global, DType::f32, Case::normal},
    {"1 x 1048576 f32 normal", 1, 1048576, 2048, Selection::per_query, DType::f32, Case::normal},
};

std::string title_of(const Case& c) { return std::string("selection ") + c.name; }

// The values are those of the backward of sm90, whose schedule the slots are.
constexpr std::int64_t slot_tile_rows = 64;
constexpr std::int64_t slot_segments = 64;

struct Steps {
  SelectionArgs select;
  TileListArgs lists;
  TileListArgs slot_lists;
  TileListBuffers buffers;
  cuda::KeySlotShape slot_shape;
  cuda::KeySlotBuffers slots;
  Execution execution;

  Steps(const Case& c, Arena& arena) {
    select.device = Device::cuda;
    select.batch = 1;
    select.heads = c.rows;
    select.seqlen_k = c.seqlen;
    select.seqlen_q = c.seqlen_q > 0 ? c.seqlen_q : c.seqlen;
    select.rule.window = c.window;
    select.rule.selection = c.selection;
    select.scores_dtype = c.dtype;
    select.scores_stride = {0, c.seqlen, 1};
    select.intervals = arena.take<KeyInterval>(c.rows * c.seqlen);
    lists.batch = 1;
    lists.heads = c.rows;
    lists.seqlen_q = select.seqlen_q;
    lists.seqlen_k = select.seqlen_k;
    lists.tile_rows = 128;
    lists.causal = true;
    lists.intervals = {select.intervals, 0, c.seqlen};
    lists.bound = key_bound(select);
    const std::int64_t tiles = c.rows * ((lists.seqlen_q + 127) / 128);
    buffers.begin = arena.take<std::int64_t>(tiles);
    buffers.count = arena.take<std::int32_t>(tiles);
    buffers.full = arena.take<std::int32_t>(tiles);
    buffers.keys = arena.take<std::int32_t>(tiles * cuda::tile_list_capacity(lists));
    slot_shape.rows = c.rows;
    slot_shape.seqlen_k = c.seqlen;
    slot_lists = lists;
    slot_lists.tile_rows = 2 * slot_tile_rows;
    slot_shape.slots = cuda::tile_list_capacity(slot_lists);  // as many as two tiles see keys
    slot_lists.tile_rows = slot_tile_rows;
    slot_shape.segments = slot_segments;
    cuda::WorkspaceAllocator counted(nullptr);
    cuda::take_key_slots(counted, slot_shape);
    cuda::WorkspaceAllocator slot_memory(
        arena.take<std::byte>(static_cast<std::int64_t>(counted.used())));
    slots = cuda::take_key_slots(slot_memory, slot_shape);
    execution.workspace_bytes = std::max({SelectCall(select, execution).workspace_size(),
                                          cuda::tile_lists_workspace_size(lists),
                                          cuda::slot_workspace_size(slot_lists, slot_shape)});
    execution.workspace = arena.take<char>(static_cast<std::int64_t>(execution.workspace_bytes));
    fill_scores(c, arena);
  }

  void run_select() const { select_key_intervals(select, execution); }
  void run_lists() const { cuda::build_tile_lists(lists, buffers, execution); }
  void run_slots() const { cuda::assign_slots(slot_lists, slot_shape, slots, execution); }

 private:
  void fill_scores(const Case& c, Arena& arena) {
    std::mt19937 generator(1);
    std::normal_distribution<float> normal;
    std::vector<float> wide(static_cast<std::size_t>(c.rows * c.seqlen));
    for (std::size_t i = 0; i < wide.size(); ++i) {
      const auto t = static_cast<float>(static_cast<std::int64_t>(i) % c.seqlen) /
                     static_cast<float>(c.seqlen);
      switch (c.kind) {
        case Case::normal: wide[i] = normal(generator); break;
        case Case::equal: wide[i] = 0.5f; break;
        case Case::rising: wide[i] = t; break;
        default: wide[i] = 3 * t + 0.3f * normal(generator) + (generator() % 50 == 0 ? 5.0f : 0.0f);
      }
    }
    if (c.dtype == DType::f32) {
      select.scores = arena.copy(wide);
      return;
    }
    std::vector<std::uint16_t> narrow(wide.size());
    std::transform(wide.begin(), wide.end(), narrow.begin(), float_to_bf16);
    select.scores = arena.copy(narrow);
  }
};

// The steps on a stream of their own.
class Timed {
 public:
  explicit Timed(const Case& c) : steps_(c, arena_) {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
    steps_.execution.stream = stream_;
  }
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;
  ~Timed() { cudaStreamDestroy(stream_); }

  void select(::benchmark::State& state) {
    graph(state, [&] { steps_.run_select(); });
  }
  void lists(::benchmark::State& state) {
    graph(state, [&] { steps_.run_lists(); });
  }
  void slots(::benchmark::State& state) {
    graph(state, [&] { steps_.run_slots(); });
  }
  void both(::benchmark::State& state) {
    graph(state, [&] { run_both(); });
  }
  void both_from_a_stream(::benchmark::State& state) {
    time(state, stream_, calls, [&] { run_both(); });
  }
  void all(::benchmark::State& state) {
    graph(state, [&] {
      run_both();
      steps_.run_slots();
    });
  }

 private:
  static constexpr int calls = 10;

  template <class Call>
  void graph(::benchmark::State& state, const Call& call) {
    time_graph(state, stream_, calls, call);
  }

  void run_both() const {
    steps_.run_select();
    steps_.run_lists();
  }

  Arena arena_;
  Steps steps_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace
}  // namespace flash_dmattn::bench

int main(int argc, char** argv) {
  using namespace flash_dmattn::bench;
  constexpr std::pair<const char*, void (Timed::*)(::benchmark::State&)> parts[] = {
      {"select", &Timed::select}, {"lists", &Timed::lists},
      {"both", &Timed::both},     {"both from a stream", &Timed::both_from_a_stream},
      {"slots", &Timed::slots},   {"all", &Timed::all}};
  for (const Case& c : cases) {
    for (const auto& [part, run] : parts) {
      add(name(title_of(c), c.dtype, part),
          [&c, run = run](::benchmark::State& state) { (setup_of<Timed>(c).*run)(state); });
    }
  }
  return run_all(argc, argv);
}
