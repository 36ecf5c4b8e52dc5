// Times selection and the schedules of both directions on the GPU: each step replayed from a CUDA graph, a forward's
// steps and all steps from a graph, and a forward's from a stream. Prints a table; with a file name, writes the same as
// JSON.
//
//   bench_selection [out.json]
//   bench_selection --once N     runs case N once, for a profiler
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/selection/key_slots.h"
#include "cuda/selection/selection.h"
#include "float_types.h"

namespace flash_dmattn {
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

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

// Device memory that lives as long as the case.
class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() {
    for (void* piece : pieces_) cudaFree(piece);
  }
  template <class T>
  T* take(std::int64_t count) {
    void* piece = nullptr;
    check(
        cudaMalloc(&piece, static_cast<std::size_t>(std::max<std::int64_t>(count, 1)) * sizeof(T)));
    pieces_.push_back(piece);
    return static_cast<T*>(piece);
  }

 private:
  std::vector<void*> pieces_;
};

// Of the backward of sm90, whose schedule the slots are.
constexpr std::int64_t slot_tile_rows = 64;
constexpr std::int64_t slot_segments = 64;

struct Problem {
  SelectionArgs select;
  TileListArgs lists;
  TileListArgs slot_lists;
  TileListBuffers buffers;
  cuda::KeySlotShape slot_shape;
  cuda::KeySlotBuffers slots;
  Execution execution;

  Problem(const Case& c, Arena& arena) {
    select.batch = 1;
    select.heads = c.rows;
    select.seqlen_k = c.seqlen;
    select.seqlen_q = c.seqlen_q > 0 ? c.seqlen_q : c.seqlen;
    select.window = c.window;
    select.selection = c.selection;
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
    const auto slot_bytes = static_cast<std::int64_t>(cuda::key_slot_bytes(slot_shape));
    ScheduleAllocator slot_memory(arena.take<std::byte>(slot_bytes));
    slots = cuda::take_key_slots(slot_memory, slot_shape);
    execution.workspace_bytes =
        std::max({cuda::select_workspace_size(select), cuda::tile_lists_workspace_size(lists),
                  cuda::slot_workspace_size(slot_lists)});
    execution.workspace = arena.take<char>(static_cast<std::int64_t>(execution.workspace_bytes));
    fill_scores(c, arena);
  }

  void run_select() const { cuda::select_key_intervals(select, execution); }
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
      auto* scores = arena.take<float>(c.rows * c.seqlen);
      check(cudaMemcpy(scores, wide.data(), wide.size() * 4, cudaMemcpyHostToDevice));
      select.scores = scores;
      return;
    }
    std::vector<std::uint16_t> narrow(wide.size());
    std::transform(wide.begin(), wide.end(), narrow.begin(), float_to_bf16);
    auto* scores = arena.take<std::uint16_t>(c.rows * c.seqlen);
    check(cudaMemcpy(scores, narrow.data(), narrow.size() * 2, cudaMemcpyHostToDevice));
    select.scores = scores;
  }
};

class Timer {
 public:
  explicit Timer(cudaStream_t stream) : stream_(stream) {
    check(cudaEventCreate(&begin_));
    check(cudaEventCreate(&end_));
  }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;
  ~Timer() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }

  // Median microseconds of 15 groups of 10 calls.
  double time(const std::function<void()>& call) {
    constexpr int calls = 10;
    for (int i = 0; i < calls; ++i) call();
    std::vector<float> times;
    for (int group = 0; group < 15; ++group) {
      check(cudaEventRecord(begin_, stream_));
      for (int i = 0; i < calls; ++i) call();
      check(cudaEventRecord(end_, stream_));
      check(cudaEventSynchronize(end_));
      float milliseconds = 0;
      check(cudaEventElapsedTime(&milliseconds, begin_, end_));
      times.push_back(milliseconds * 1000 / calls);
    }
    std::nth_element(times.begin(), times.begin() + 7, times.end());
    return static_cast<double>(times[7]);
  }

  double time_graph(const std::function<void()>& call) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t replay = nullptr;
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    call();
    check(cudaStreamEndCapture(stream_, &graph));
    check(cudaGraphInstantiate(&replay, graph, 0));
    const double result = time([&] { check(cudaGraphLaunch(replay, stream_)); });
    check(cudaGraphExecDestroy(replay));
    check(cudaGraphDestroy(graph));
    return result;
  }

 private:
  cudaStream_t stream_;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
};

void run_all(const char* json_path) {
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  std::FILE* json = json_path == nullptr ? nullptr : std::fopen(json_path, "w");
  if (json != nullptr) std::fputs("[\n", json);
  std::printf(
      "%-24s %9s %9s %9s %9s %9s %9s   microseconds, median; both = select + lists, all = both + "
      "slots\n",
      "rows x keys", "select", "lists", "both", "stream", "slots", "all");
  const char* separator = "";
  for (const Case& c : cases) {
    Arena arena;
    Problem problem(c, arena);
    problem.execution.stream = stream;
    Timer timer(stream);
    const double select = timer.time_graph([&] { problem.run_select(); });
    const double lists = timer.time_graph([&] { problem.run_lists(); });
    const auto both = [&] {
      problem.run_select();
      problem.run_lists();
    };
    const double graph = timer.time_graph(both);
    const double direct = timer.time(both);
    const double slots = timer.time_graph([&] { problem.run_slots(); });
    const double all = timer.time_graph([&] {
      both();
      problem.run_slots();
    });
    const double megabytes = static_cast<double>(problem.execution.workspace_bytes) / 1e6;
    std::printf("%-24s %9.1f %9.1f %9.1f %9.1f %9.1f %9.1f\n", c.name, select, lists, graph, direct,
                slots, all);
    if (json == nullptr) continue;
    std::fprintf(json,
                 "%s  {\"case\": \"%s\", \"window\": %lld, \"tile_rows\": 128, "
                 "\"select_graph_us\": %.1f, \"schedule_graph_us\": %.1f, \"both_graph_us\": %.1f, "
                 "\"both_stream_us\": %.1f, \"slot_tile_rows\": %lld, "
                 "\"slot_segments\": %lld, \"slots_graph_us\": %.1f, \"all_graph_us\": %.1f, "
                 "\"workspace_mb\": %.1f}",
                 separator, c.name, static_cast<long long>(c.window), select, lists, graph, direct,
                 static_cast<long long>(slot_tile_rows), static_cast<long long>(slot_segments),
                 slots, all, megabytes);
    separator = ",\n";
  }
  if (json != nullptr) {
    std::fputs("\n]\n", json);
    std::fclose(json);
  }
  check(cudaStreamDestroy(stream));
}

void run_once(const Case& c) {
  Arena arena;
  Problem problem(c, arena);
  problem.run_select();
  problem.run_lists();
  problem.run_slots();
  check(cudaDeviceSynchronize());
}

}  // namespace
}  // namespace flash_dmattn

int main(int argc, char** argv) {
  using namespace flash_dmattn;
  try {
    if (argc == 3 && std::strcmp(argv[1], "--once") == 0) {
      run_once(cases[static_cast<std::size_t>(std::stoi(argv[2])) % std::size(cases)]);
    } else {
      run_all(argc == 2 ? argv[1] : nullptr);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_selection: %s\n", error.what());
    return 1;
  }
}
