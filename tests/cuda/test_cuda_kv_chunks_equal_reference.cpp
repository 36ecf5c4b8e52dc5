#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "kv_caches.h"

// Chunks of pending tokens and copies of rows on the device equal those of the reference.
namespace flash_dmattn::testing {
namespace {

void append_both(const KvSizes& sizes, Caches& caches, Random& random, std::int64_t count) {
  Tokens tokens(sizes, count, random);
  AppendArgs args{.cache = caches.host, .seqlen = count};
  tokens.give_host(args);
  append_tokens(args, {}, "reference");
  args.cache = caches.device;
  tokens.give_device(args);
  append_tokens(args, {}, "cuda");
  check_cuda(cudaDeviceSynchronize());
  caches.host.pending += count;
  caches.device.pending += count;
}

// For each row, a number of its pending tokens.
RowNumbers draw_kept(const Caches& caches, Random& random) {
  std::vector<std::int32_t> kept(static_cast<std::size_t>(caches.host.shape.batch));
  for (std::int32_t& count : kept) {
    count = static_cast<std::int32_t>(random.below(caches.host.pending + 1));
  }
  return RowNumbers{kept};
}

// The intervals of the pending tokens as queries: the same for the same keys, in whichever slots. Without `kept`, no
// token is padding.
void expect_same_intervals(const Caches& caches, std::int64_t queries,
                           const RowNumbers* kept = nullptr) {
  const DeviceBuffer device_kept(kept == nullptr ? std::vector<std::int32_t>() : kept->device);
  const KvCacheShape& s = caches.host.shape;
  const std::int64_t count = pending_intervals_count(caches.host);
  std::vector<KeyInterval> expected(static_cast<std::size_t>(count));
  const DeviceBuffer on_device(expected.size() * sizeof(KeyInterval));
  PendingIntervalsArgs args{
      .cache = caches.host, .seqlen_q = queries, .intervals = expected.data()};
  if (kept != nullptr) args.kept_tokens = kept->host.data();
  PendingIntervalsCall(args, {}, "reference").run({});
  args.cache = caches.device;
  args.intervals = on_device.as<KeyInterval>();
  if (kept != nullptr) args.kept_tokens = device_kept.as<std::int32_t>();
  run_on_device(PendingIntervalsCall(args, {}, "cuda"));
  const auto got = download<KeyInterval>(on_device, count);
  const std::vector<std::int32_t> host_positions = caches.positions(caches.host, false);
  const std::vector<std::int32_t> device_positions = caches.positions(caches.device, true);
  std::size_t at = 0;
  for (std::int64_t row = 0; row < s.batch * s.heads_kv; ++row) {
    std::map<std::int32_t, std::pair<int, int>> want, have;
    const std::size_t end =
        at + static_cast<std::size_t>(Caches::interval_count(caches.host, row % s.heads_kv));
    for (; at < end; ++at) {
      if (host_positions[at] >= 0)
        want[host_positions[at]] = {expected[at].first, expected[at].last};
      if (device_positions[at] >= 0) have[device_positions[at]] = {got[at].first, got[at].last};
      if (device_positions[at] < 0) {
        ASSERT_EQ(got[at].last, 0) << "a slot without a key";
      }
    }
    ASSERT_EQ(have, want) << "row " << row;
  }
}

// Without `kept`, all pending tokens are kept.
void commit_both(Caches& caches, const RowNumbers* kept) {
  const DeviceBuffer device_kept(kept == nullptr ? std::vector<std::int32_t>() : kept->device);
  CommitArgs args{.cache = caches.host};
  if (kept != nullptr) args.kept_tokens = kept->host.data();
  CommitCall(args, {}, "reference").run({});
  args.cache = caches.device;
  if (kept != nullptr) args.kept_tokens = device_kept.as<std::int32_t>();
  run_on_device(CommitCall(args, {}, "cuda"));
  caches.host.pending = 0;
  caches.device.pending = 0;
}

void commit_both(Caches& caches, Random& random, bool all) {
  const RowNumbers numbers = draw_kept(caches, random);
  commit_both(caches, all ? nullptr : &numbers);
}

class CudaKvChunks : public KvCachesOfDevice {};

TEST_P(CudaKvChunks, ChunksMatchReference) {
  const KvSizes& sizes = GetParam();
  Random random(2);
  Caches caches(sizes.shape);
  if (sizes.prompt > 0) fill_both(sizes, caches, random, true);
  caches.expect_same();
  for (int i = 0; i < 7; ++i) {
    SCOPED_TRACE("chunk " + std::to_string(i));
    const std::int64_t first = 1 + random.below(sizes.shape.chunk);
    append_both(sizes, caches, random, first);
    if (first < sizes.shape.chunk) {
      append_both(sizes, caches, random, 1 + random.below(sizes.shape.chunk - first));
    }
    expect_same_intervals(caches, caches.host.pending);
    expect_same_intervals(caches, 1 + random.below(caches.host.pending));
    const RowNumbers kept = draw_kept(caches, random);
    expect_same_intervals(caches, 1 + random.below(caches.host.pending), &kept);
    commit_both(caches, random, i % 3 == 0);
    caches.expect_same();
    if (HasFatalFailure()) return;
  }
}

TEST_P(CudaKvChunks, RowsAreCopied) {
  const KvSizes& sizes = GetParam();
  Random random(3);
  Caches from(sizes.shape);
  if (sizes.prompt > 0) fill_both(sizes, from, random, true);
  append_both(sizes, from, random, sizes.shape.chunk);
  KvSizes larger = sizes;
  larger.shape.batch = 2 * sizes.shape.batch + 1;
  Caches to(larger.shape);
  std::vector<std::int32_t> index(static_cast<std::size_t>(larger.shape.batch));
  for (std::int32_t& b : index) b = static_cast<std::int32_t>(random.below(sizes.shape.batch));
  const DeviceBuffer device_index(index);
  to.host.pending = to.device.pending = from.host.pending;
  copy_rows({from.host, to.host, index.data()}, {}, "reference");
  copy_rows({from.device, to.device, device_index.as<std::int32_t>()}, {}, "cuda");
  check_cuda(cudaDeviceSynchronize());
  to.expect_same();
  expect_same_intervals(to, to.host.pending);
  commit_both(to, random, false);
  to.expect_same();
}

// Before an array of a cache are others of its memory, which a kernel that reads row -1 would copy.
TEST_P(CudaKvChunks, RowsOutOfRangeAreNotCopied) {
  const KvSizes& sizes = GetParam();
  Random random(4);
  Caches from(sizes.shape);
  Caches to(sizes.shape);
  append_both(sizes, from, random, sizes.shape.chunk);
  append_both(sizes, to, random, sizes.shape.chunk);
  const std::vector<std::byte> before = to.device_bytes();
  const auto batch = static_cast<std::int32_t>(sizes.shape.batch);
  for (const std::int32_t row : {-1, batch, std::numeric_limits<std::int32_t>::max()}) {
    const DeviceBuffer index(std::vector<std::int32_t>(sizes.shape.batch, row));
    copy_rows({from.device, to.device, index.as<std::int32_t>()}, {}, "cuda");
    check_cuda(cudaDeviceSynchronize());
    EXPECT_TRUE(to.device_bytes() == before) << "row " << row;
  }
}

TEST_P(CudaKvChunks, NumbersOutOfRangeAreClamped) {
  const KvSizes& sizes = GetParam();
  const KvCacheShape& s = sizes.shape;
  Random random(5);
  for (const std::int32_t number : numbers_out_of_range) {
    SCOPED_TRACE(number);
    Caches caches(s);
    if (sizes.prompt > 0) {
      fill_both(sizes, caches, random, RowNumbers::out_of_range(s.batch, number, sizes.prompt));
    }
    caches.expect_same();
    append_both(sizes, caches, random, s.chunk);
    const RowNumbers kept = RowNumbers::out_of_range(s.batch, number, s.chunk);
    expect_same_intervals(caches, s.chunk, &kept);
    commit_both(caches, &kept);
    caches.expect_same();
    if (HasFatalFailure()) return;
  }
}

// Counts are in the memory of a cache, which may come from a file, or never have been cleared.
TEST_P(CudaKvChunks, CountsOutOfRangeChangeNoOtherRow) {
  const KvSizes& sizes = GetParam();
  Random random(6);
  Caches caches(sizes.shape), copies(sizes.shape);
  if (sizes.prompt > 0) fill_both(sizes, caches, random, true);
  std::vector<std::int32_t> same(static_cast<std::size_t>(sizes.shape.batch));
  std::iota(same.begin(), same.end(), 0);
  const DeviceBuffer index(same);
  for (const std::int32_t number : numbers_out_of_range) {
    SCOPED_TRACE(number);
    caches.spoil_counts(number);
    append_both(sizes, caches, random, sizes.shape.chunk);
    const KvCacheShape& s = sizes.shape;
    const DeviceBuffer intervals(static_cast<std::size_t>(s.batch * s.total_slots()) *
                                 sizeof(KeyInterval));
    run_on_device(PendingIntervalsCall(
        {.cache = caches.device, .seqlen_q = s.chunk, .intervals = intervals.as<KeyInterval>()}, {},
        "cuda"));
    commit_both(caches, random, false);
    caches.spoil_counts(number);
    copy_rows({caches.device, copies.device, index.as<std::int32_t>()}, {}, "cuda");
    copy_rows({caches.host, copies.host, same.data()}, {}, "reference");
    check_cuda(cudaDeviceSynchronize());
    caches.expect_same(1);
    copies.expect_same(1);
    if (HasFatalFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, CudaKvChunks, ::testing::ValuesIn(kv_sizes()),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace flash_dmattn::testing
