#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/float_types.h"
#include "cuda/selection/selection.h"
#include "device.h"
#include "flash_dmattn/calls.h"
#include "support/expect_invalid.h"
#include "support/random.h"
#include "support/selection_rules.h"
#include "tile_list_comparison.h"

// Selection and tile lists on the device against those of the CPU, bit for bit.
namespace flash_dmattn::testing {
namespace {

class SmallCudaSelection : public OnDevice {};
class CudaSelection : public OnDevice {};

enum class Scores { normal, equal, falling, rising, few, with_nan, drifting, infinite, two_ramps };
constexpr int score_kinds = 9;

float score(Scores kind, Random& random, std::int64_t j, std::int64_t seqlen_k) {
  const auto t = static_cast<float>(j);
  const auto normal = [&] { return static_cast<float>(random.normal()); };
  switch (kind) {
    case Scores::normal: return normal();
    case Scores::equal: return 0.25f;
    case Scores::falling: return -t;
    case Scores::rising: return t;
    case Scores::few: return static_cast<float>(random.below(7)) - 3;
    case Scores::with_nan:
      if (random.below(4) != 0) return normal();
      return random.below(2) != 0 ? std::nanf("") : -std::nanf("");
    case Scores::drifting: return 1e-3f * t + normal();
    case Scores::infinite:
      if (random.below(3) == 0) return -std::numeric_limits<float>::infinity();
      return random.below(2) == 0 ? 0.0f : -0.0f;
    default: return j < seqlen_k / 3 ? 3e4f - t : t;
  }
}

struct ScoreLayout {
  std::int64_t key_stride = 1;
  std::int64_t padding = 0;
  int mask_one_in = 0;  // this many keys are masked; 0: there is no mask
  bool mask_per_batch = false;
};

std::string describe(const SelectionArgs& args, Scores kind) {
  return "scores " + std::to_string(static_cast<int>(kind)) + " " +
         std::string(name_of(args.scores_dtype)) + ", " + text_of(args);
}

// One selection and its tile lists, on the host and on the device.
class Comparison {
 public:
  Comparison(const SelectionArgs& shape, Scores kind, const ScoreLayout& layout, Random& random)
      : args_(shape), kind_(kind), layout_(layout) {
    const std::int64_t row = (args_.seqlen_k + layout.padding) * layout.key_stride;
    const std::int64_t rows = args_.batch * args_.heads;
    args_.scores_stride = {args_.heads * row, row, layout.key_stride};
    scores_.resize(static_cast<std::size_t>(rows * row));
    mask_.resize(static_cast<std::size_t>(rows * args_.seqlen_k), 1);
    if (layout.mask_one_in > 0) {
      for (auto& visible : mask_) visible = random.below(layout.mask_one_in) != 0;
    }
    args_.key_mask_stride = {args_.heads * args_.seqlen_k,
                             layout.mask_per_batch ? 0 : args_.seqlen_k, 1};
    refill(random);
  }

  void refill(Random& random) {
    for (std::size_t i = 0; i < scores_.size(); ++i) {
      const auto j = static_cast<std::int64_t>(i) % args_.scores_stride[1] / layout_.key_stride;
      scores_[i] = score(kind_, random, j, args_.seqlen_k);
    }
    narrow_.clear();
    for (const float x : scores_) {
      narrow_.push_back(args_.scores_dtype == DType::f16 ? float_to_f16(x) : float_to_bf16(x));
    }
  }

  const void* scores() const {
    if (args_.scores_dtype == DType::f32) return scores_.data();
    return narrow_.data();
  }
  std::size_t scores_bytes() const {
    return scores_.size() * static_cast<std::size_t>(size_of(args_.scores_dtype));
  }

  void expect_same() {
    DeviceBuffer scores(scores_bytes());
    scores.upload(this->scores());
    const DeviceBuffer mask(mask_);
    const DeviceBuffer intervals(mask_.size() * sizeof(KeyInterval));
    SelectionArgs on_device = args_;
    on_device.device = Device::cuda;
    on_device.scores = scores.data();
    if (layout_.mask_one_in > 0) {
      on_device.key_mask = mask.as<std::uint8_t>();
    }
    on_device.intervals = intervals.as<KeyInterval>();
    run_on_device(SelectCall(on_device, {}));
    compare_intervals(intervals);
    if (!::testing::Test::HasFatalFailure() && tile_rows > 0)
      compare_tile_lists(on_device.intervals);
  }

  void compare_intervals(const DeviceBuffer& actual_intervals) {
    const auto actual =
        download<KeyInterval>(actual_intervals, static_cast<std::int64_t>(mask_.size()));
    expected_.assign(mask_.size(), KeyInterval{-1, -1});
    SelectionArgs on_host = args_;
    on_host.scores = scores();
    if (layout_.mask_one_in > 0) on_host.key_mask = mask_.data();
    on_host.intervals = expected_.data();
    run_in_new_workspace(SelectCall(on_host, {}));
    for (std::size_t i = 0; i < actual.size(); ++i) {
      ASSERT_TRUE(actual[i].first == expected_[i].first && actual[i].last == expected_[i].last)
          << describe(args_, kind_) << ": key " << i << ": expected [" << expected_[i].first << ", "
          << expected_[i].last << "), actual [" << actual[i].first << ", " << actual[i].last << ")";
    }
  }

  // On the device from the device's intervals, on the host from the host's.
  void compare_tile_lists(const KeyInterval* intervals) {
    TileListArgs list_args;
    list_args.batch = args_.batch;
    list_args.heads = args_.heads;
    list_args.seqlen_q = args_.seqlen_q;
    list_args.seqlen_k = args_.seqlen_k;
    list_args.tile_rows = tile_rows;
    list_args.causal = args_.causal;
    list_args.intervals = {intervals, args_.heads * args_.seqlen_k, args_.seqlen_k};
    list_args.bound = key_bound(args_);
    expect_same_lists(list_args, expected_);
  }

  std::int64_t tile_rows = 0;  // 0: no lists

 private:
  SelectionArgs args_;
  Scores kind_;
  ScoreLayout layout_;
  std::vector<float> scores_;
  std::vector<std::uint16_t> narrow_;
  std::vector<std::uint8_t> mask_;
  std::vector<KeyInterval> expected_;
};

SelectionArgs shape_of(std::int64_t rows, std::int64_t seqlen, std::int64_t window) {
  SelectionArgs args;
  args.batch = 1;
  args.heads = rows;
  args.seqlen_q = seqlen;
  args.seqlen_k = seqlen;
  args.rule.window = window;
  args.scores_dtype = DType::f32;
  return args;
}

enum class Rules { windows, any };

void compare_random(std::uint64_t seed, int rounds, std::int64_t longest,
                    Rules rules = Rules::windows) {
  Random random(seed);
  for (int round = 0; round < rounds; ++round) {
    std::vector<std::int64_t> head_windows;
    SelectionArgs args = shape_of(1 + random.below(3), 1 + random.below(longest), 0);
    args.batch = 1 + random.below(2);
    if (random.below(3) == 0) args.seqlen_q = random.below(args.seqlen_k + 100);
    if (random.below(3) == 0) args.seqlen_q = random.below(70);  // a chunk after many keys
    args.rule.window = random.below(args.seqlen_k + 3);
    if (random.below(2) == 0) args.rule.window = random.below(args.seqlen_k / 4 + 2);
    if (random.below(10) == 0) args.rule.window = 512 * random.below(4);
    args.rule.selection = random.below(3) == 0 ? Selection::global : Selection::per_query;
    args.causal = random.below(6) != 0;
    if (rules == Rules::any) args.rule = random_rule(args, head_windows, random);
    args.scores_dtype = static_cast<DType>(random.below(3));
    ScoreLayout layout;
    layout.key_stride = random.below(4) == 0 ? 2 : 1;
    layout.padding = random.below(4);
    layout.mask_one_in = random.below(2) == 0 ? 0 : static_cast<int>(1 + random.below(6));
    layout.mask_per_batch = random.below(2) == 0;
    Comparison comparison(args, static_cast<Scores>(random.below(score_kinds)), layout, random);
    constexpr std::int64_t tile_rows[] = {1, 3, 16, 64, 100, 128};
    comparison.tile_rows = tile_rows[longest > 30000 ? 2 + random.below(4) : random.below(6)];
    comparison.expect_same();
    if (::testing::Test::HasFatalFailure()) return;
  }
}

TEST_F(SmallCudaSelection, ShortRandomRowsMatchCpu) { compare_random(1, 12, 1500); }
TEST_F(SmallCudaSelection, RandomRulesMatchCpu) { compare_random(21, 24, 1500, Rules::any); }

// Rows of each kind of sort: a block for each, with its order in shared memory and without, a larger one, digit by digit.
// The first ranks of the last lie sparsely.
TEST_F(SmallCudaSelection, EachRowSortMatchesCpu) {
  Random random(11);
  for (const std::int64_t seqlen : {700, 1024, 1025, 5000, 10000}) {
    SelectionArgs args = shape_of(2, seqlen, 150);
    args.scores_dtype = DType::bf16;
    Comparison comparison(args, Scores::normal, {}, random);
    comparison.tile_rows = 128;
    comparison.expect_same();
    if (HasFatalFailure()) return;
  }
}

// Heads that keep nothing, everything, and numbers of keys between these, with each kind of sort.
TEST_F(CudaSelection, HeadsWithWindowsOfTheirOwnMatchCpu) {
  Random random(14);
  for (const std::int64_t seqlen : {700, 1024, 1025, 4096, 10000, 140003}) {
    const std::vector<std::int64_t> windows = {1173, 0, 3, seqlen, 549, 1024, seqlen - 1, 31};
    for (const double threshold : {-std::numeric_limits<double>::infinity(), 0.5}) {
      SelectionArgs args = shape_of(static_cast<std::int64_t>(windows.size()), seqlen, -1);
      args.batch = seqlen < 20000 ? 2 : 1;
      args.rule.head_windows = windows.data();
      args.rule.score_threshold = threshold;
      Comparison comparison(args, Scores::normal, {}, random);
      comparison.tile_rows = 128;
      comparison.expect_same();
      if (HasFatalFailure()) return;
    }
  }
}

// Rows of one block, of clusters of two and of more, with keys that fill neither blocks nor warps; one choice for all
// queries, and chunks whose keys evict each other and some of the kept ones.
TEST_F(SmallCudaSelection, ClusteredRowsMatchCpu) {
  Random random(12);
  for (const std::int64_t past : {40, 1100, 2100, 9001}) {
    for (const std::int64_t queries : {1, 2, 30, 64, 65}) {
      for (const std::int64_t window : {std::int64_t{31}, queries + 1, past - 1}) {
        SelectionArgs args = shape_of(2, past + queries, window);
        args.seqlen_q = queries;
        args.scores_dtype = random.below(2) == 0 ? DType::f32 : DType::bf16;
        ScoreLayout layout;
        layout.mask_one_in = static_cast<int>(random.below(3)) * 2;
        Comparison comparison(args, static_cast<Scores>(random.below(score_kinds)), layout, random);
        comparison.expect_same();
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(CudaSelection, RandomRowsOf600KeysMatchCpu) { compare_random(2, 300, 600); }
TEST_F(CudaSelection, RandomRowsOf9000KeysMatchCpu) { compare_random(3, 150, 9000); }
TEST_F(CudaSelection, RandomRowsOf70000KeysMatchCpu) { compare_random(4, 20, 70000); }
TEST_F(CudaSelection, RandomRulesOver600KeysMatchCpu) { compare_random(22, 600, 600, Rules::any); }
TEST_F(CudaSelection, RandomRulesOver9000KeysMatchCpu) {
  compare_random(23, 150, 9000, Rules::any);
}
TEST_F(CudaSelection, RandomRulesOver70000KeysMatchCpu) {
  compare_random(24, 20, 70000, Rules::any);
}

TEST_F(CudaSelection, EachScoreKindMatchesCpuAtFullSize) {
  Random random(5);
  for (int kind = 0; kind < score_kinds; ++kind) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      SelectionArgs args = shape_of(2, 32768, 2048);
      args.scores_dtype = dtype;
      Comparison comparison(args, static_cast<Scores>(kind), {}, random);
      comparison.tile_rows = 128;
      comparison.expect_same();
      if (HasFatalFailure()) return;
    }
  }
}

// Windows of ranks that are far apart in long rows, sorted by digits and by CUB.
TEST_F(CudaSelection, SparseRankWindowsMatchCpu) {
  Random random(13);
  for (const std::int64_t seqlen : {16384, 40001, 140003}) {
    for (const std::int64_t window : {1, 1024, 3000}) {
      for (const Scores kind : {Scores::normal, static_cast<Scores>(random.below(score_kinds))}) {
        ScoreLayout layout;
        layout.mask_one_in = static_cast<int>(random.below(3)) * 2;
        Comparison comparison(shape_of(2, seqlen, window), kind, layout, random);
        comparison.tile_rows = 128;
        comparison.expect_same();
        if (HasFatalFailure()) return;
      }
    }
  }
}

// The most keys that a cluster has room for.
TEST_F(CudaSelection, ClusteredRowsMatchCpuAtFullSize) {
  Random random(13);
  for (const Scores kind : {Scores::normal, Scores::equal, Scores::few, Scores::rising}) {
    for (const std::int64_t rows : {8, 9}) {
      for (const std::int64_t queries : {1, 64}) {
        SelectionArgs args = shape_of(rows, 131072 + (queries > 1 ? queries : 0), 2048);
        args.seqlen_q = queries;
        Comparison comparison(args, kind, {}, random);
        comparison.expect_same();
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(CudaSelection, MillionKeyRowsMatchCpu) {
  Random random(6);
  for (const Scores kind : {Scores::normal, Scores::equal, Scores::two_ramps}) {
    for (const Selection selection : {Selection::per_query, Selection::global}) {
      SelectionArgs args = shape_of(1, (1 << 20) - 3, 1000);
      args.rule.selection = selection;
      Comparison comparison(args, kind, {}, random);
      comparison.tile_rows = 512;
      comparison.expect_same();
      if (HasFatalFailure()) return;
    }
  }
}

// More rows than a batch of the sort holds.
TEST_F(CudaSelection, ThousandsOfRowsMatchCpu) {
  Random random(7);
  for (const Selection selection : {Selection::per_query, Selection::global}) {
    SelectionArgs args = shape_of(3000, 700, 100);
    args.rule.selection = selection;
    args.scores_dtype = DType::bf16;
    Comparison comparison(args, Scores::normal, {}, random);
    comparison.tile_rows = 128;
    comparison.expect_same();
    if (HasFatalFailure()) return;
  }
}

// Scores change between replays.
TEST_F(CudaSelection, GraphReplayMatchesCpu) {
  Random random(8);
  SelectionArgs args = shape_of(4, 20000, 300);
  Comparison comparison(args, Scores::normal, {}, random);
  DeviceBuffer scores(comparison.scores_bytes());
  const DeviceBuffer intervals(4 * 20000 * sizeof(KeyInterval));
  args.device = Device::cuda;
  args.scores = scores.data();
  args.scores_stride = {4 * 20000, 20000, 1};
  args.intervals = intervals.as<KeyInterval>();
  const DeviceBuffer workspace(SelectCall(args, {}).workspace_size());
  const Graph graph(
      [&](cudaStream_t stream) { SelectCall(args, {.stream = stream}).run(workspace); });
  for (int i = 0; i < 3; ++i) {
    comparison.refill(random);
    scores.upload(comparison.scores());
    graph.replay(1);
    comparison.compare_intervals(intervals);
    if (HasFatalFailure()) return;
  }
}

TEST_F(CudaSelection, CallOfAnotherDeviceThrows) {
  int devices = 0;
  check_cuda(cudaGetDeviceCount(&devices));
  if (devices < 2) GTEST_SKIP() << "needs two GPUs";
  SelectionArgs args = shape_of(1, 100, 10);
  args.device = Device::cuda;
  DeviceBuffer scores(100 * sizeof(float));
  DeviceBuffer intervals(100 * sizeof(KeyInterval));
  args.scores = scores.data();
  args.intervals = intervals.as<KeyInterval>();
  const SelectCall call(args, {});
  const DeviceBuffer workspace(call.workspace_size());
  check_cuda(cudaSetDevice(1));
  try {
    call.run(workspace);
    ADD_FAILURE() << "it ran on another device";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(),
                 "CUDA: the call was planned for device 0, and the current device is 1");
  }
  check_cuda(cudaSetDevice(0));
}

TEST_F(CudaSelection, InvalidArgumentIsNamed) {
  SelectionArgs good = shape_of(1, 100, 10);
  good.device = Device::cuda;
  const auto expect_rejected = [&](const std::string& argument, const auto& change) {
    SelectionArgs args = good;
    change(args);
    expect_invalid([&] { select_key_intervals(args, {}); }, argument);
  };
  expect_rejected("scores_dtype", [](SelectionArgs& args) { args.scores_dtype = DType::f64; });
  expect_rejected("seqlen_k", [](SelectionArgs& args) { args.seqlen_k = std::int64_t{1} << 24; });
  expect_rejected("scores", [](SelectionArgs&) {});
}

}  // namespace
}  // namespace flash_dmattn::testing
