#pragma once

#include <algorithm>
#include <vector>

#include "cuda/selection/selection.h"
#include "device.h"

// Shared by the tests of selection and of tile lists.
namespace flash_dmattn::testing {

// The problem whose tile lists have these arguments.
inline Problem problem_of(const TileListArgs& args) {
  return {.batch = args.batch,
          .heads_q = args.heads,
          .heads_kv = args.heads,
          .seqlen_q = args.seqlen_q,
          .seqlen_k = args.seqlen_k,
          .causal = args.causal,
          .intervals_shape = {args.batch, args.heads}};
}

// The same arguments with intervals on the host.
inline TileListArgs on_host(TileListArgs args, const std::vector<KeyInterval>& intervals) {
  if (args.intervals.data != nullptr) args.intervals.data = intervals.data();
  return args;
}

// The result of measure_key_bound on the device, which has to be that on the host.
inline KeyBound measured_on_both(const TileListArgs& args,
                                 const std::vector<KeyInterval>& host_intervals) {
  const DeviceWorkspace workspace(cuda::measure_workspace_size(args));
  const KeyBound bound = cuda::measure_key_bound(args, workspace);
  const TileListArgs host = on_host(args, host_intervals);
  const KeyBound expected = measure_key_bound(
      Device::cpu, host, Workspace(measure_workspace_size(Device::cpu, host, {}), {}));
  EXPECT_EQ(bound.base, expected.base);
  EXPECT_EQ(bound.per_query, expected.per_query);
  return bound;
}

// The lists of the device's intervals against the host's lists of the host's.
inline void expect_same_lists(const TileListArgs& args,
                              const std::vector<KeyInterval>& host_intervals) {
  const std::int64_t capacity = cuda::tile_list_capacity(args);
  const auto lists = static_cast<std::size_t>(args.lists());
  const DeviceBuffer begin(lists * 8), count(lists * 4), full(lists * 4);
  const DeviceBuffer keys(lists * static_cast<std::size_t>(capacity) * 4);
  cuda::build_tile_lists(args,
                         {begin.as<std::int64_t>(), count.as<std::int32_t>(),
                          full.as<std::int32_t>(), keys.as<std::int32_t>()},
                         DeviceWorkspace(cuda::tile_lists_workspace_size(args)));

  const OwnedTileLists owned =
      make_tile_lists(on_host(args, host_intervals), sequential_execution(1));
  const QueryTileLists& expected = owned.lists;
  const auto actual_begin = download<std::int64_t>(begin, args.lists());
  const auto actual_count = download<std::int32_t>(count, args.lists());
  const auto actual_full = download<std::int32_t>(full, args.lists());
  const auto actual_keys = download<std::int32_t>(keys, args.lists() * capacity);
  for (std::size_t t = 0; t < lists; ++t) {
    ASSERT_EQ(actual_begin[t], static_cast<std::int64_t>(t) * capacity);
    ASSERT_EQ(actual_count[t], expected.count[t]) << "tile " << t;
    ASSERT_EQ(actual_full[t], expected.full[t]) << "tile " << t;
    const std::int32_t* const actual = actual_keys.data() + actual_begin[t];
    const std::int32_t* const listed = expected.keys + expected.begin[t];
    const std::int64_t padded = (expected.count[t] + cuda::tile_list_block - 1) /
                                cuda::tile_list_block * cuda::tile_list_block;
    for (std::int64_t i = 0; i < padded; ++i) {
      const std::int32_t key = i < expected.count[t] ? listed[i] : 0;
      ASSERT_EQ(actual[i], key) << "tile " << t << ", entry " << i;
    }
  }
}

}  // namespace flash_dmattn::testing
