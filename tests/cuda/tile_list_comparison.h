#pragma once

#include <algorithm>
#include <vector>

#include "cuda/selection/selection.h"
#include "device.h"

// Shared by the tests of selection and of tile lists.
namespace flash_dmattn::testing {

// Skips its tests where there is no GPU.
class OnDevice : public ::testing::Test {
 protected:
  void SetUp() override {
    int devices = 0;
    const cudaError_t error = cudaGetDeviceCount(&devices);
    if (error != cudaSuccess || devices == 0) {
      GTEST_SKIP() << (error == cudaSuccess ? "there is no GPU" : cudaGetErrorString(error));
    }
  }
};

// The CPU's workspace, aligned.
class HostWorkspace {
 public:
  explicit HostWorkspace(std::size_t bytes) : lines_(bytes / sizeof(Line) + 1), bytes_(bytes) {}
  void* data() { return lines_.data(); }
  std::size_t size() const { return bytes_; }

 private:
  struct alignas(workspace_alignment) Line {
    std::byte bytes[workspace_alignment];
  };
  std::vector<Line> lines_;
  std::size_t bytes_;
};

template <class T>
std::vector<T> download(const DeviceBuffer& buffer, std::int64_t count) {
  std::vector<T> host(static_cast<std::size_t>(count));
  if (count > 0) buffer.download(host.data());
  return host;
}

// The result of measure_key_bound on the device, which has to be that on the host.
inline KeyBound measured_on_both(const TileListArgs& args,
                                 const std::vector<KeyInterval>& host_intervals) {
  const DeviceBuffer workspace(cuda::measure_workspace_size(args));
  Execution execution;
  execution.workspace = workspace.data();
  execution.workspace_bytes = cuda::measure_workspace_size(args);
  const KeyBound bound = cuda::measure_key_bound(args, execution);

  TileListArgs on_host = args;
  if (args.intervals.data != nullptr) on_host.intervals.data = host_intervals.data();
  HostWorkspace host_workspace(measure_workspace_size(Device::cpu, on_host, {}));
  execution.workspace = host_workspace.data();
  execution.workspace_bytes = host_workspace.size();
  const KeyBound expected = measure_key_bound(Device::cpu, on_host, execution);
  EXPECT_EQ(bound.base, expected.base);
  EXPECT_EQ(bound.per_query, expected.per_query);
  return bound;
}

// The lists of the device's intervals against the host's lists of the host's.
inline void expect_same_lists(const TileListArgs& args,
                              const std::vector<KeyInterval>& host_intervals) {
  const std::int64_t tiles = (args.seqlen_q + args.tile_rows - 1) / args.tile_rows;
  const std::int64_t lists = args.batch * args.heads * tiles;
  const std::int64_t capacity = cuda::tile_list_capacity(args);
  const auto bytes = [](std::int64_t count, std::size_t size) {
    return static_cast<std::size_t>(count) * size;
  };
  DeviceBuffer begin(bytes(lists, 8));
  DeviceBuffer count(bytes(lists, 4));
  DeviceBuffer full(bytes(lists, 4));
  DeviceBuffer keys(bytes(lists * capacity, 4));
  const std::size_t workspace_bytes = cuda::tile_lists_workspace_size(args);
  DeviceBuffer workspace(workspace_bytes);
  Execution execution;
  execution.workspace = workspace.data();
  execution.workspace_bytes = workspace_bytes;
  const TileListBuffers buffers{
      reinterpret_cast<std::int64_t*>(begin.data()), reinterpret_cast<std::int32_t*>(count.data()),
      reinterpret_cast<std::int32_t*>(full.data()), reinterpret_cast<std::int32_t*>(keys.data())};
  cuda::build_tile_lists(args, buffers, execution);

  TileListArgs on_host = args;
  if (args.intervals.data != nullptr) on_host.intervals.data = host_intervals.data();
  execution = {};
  HostWorkspace host_workspace(tile_lists_workspace_size(Device::cpu, on_host, execution));
  execution.workspace = host_workspace.data();
  execution.workspace_bytes = host_workspace.size();
  std::vector<std::int64_t> host_begin(static_cast<std::size_t>(lists));
  std::vector<std::int32_t> host_count(host_begin.size());
  std::vector<std::int32_t> host_full(host_begin.size());
  std::vector<std::int32_t> host_keys(
      static_cast<std::size_t>(tile_list_entries(Device::cpu, on_host, execution)));
  build_tile_lists(Device::cpu, on_host,
                   {host_begin.data(), host_count.data(), host_full.data(), host_keys.data()},
                   execution);

  const auto actual_begin = download<std::int64_t>(begin, lists);
  const auto actual_count = download<std::int32_t>(count, lists);
  const auto actual_full = download<std::int32_t>(full, lists);
  const auto actual_keys = download<std::int32_t>(keys, lists * capacity);
  for (std::size_t t = 0; t < host_begin.size(); ++t) {
    ASSERT_EQ(actual_begin[t], static_cast<std::int64_t>(t) * capacity);
    ASSERT_EQ(actual_count[t], host_count[t]) << "tile " << t;
    ASSERT_EQ(actual_full[t], host_full[t]) << "tile " << t;
    const std::int32_t* actual = actual_keys.data() + actual_begin[t];
    const std::int32_t* expected = host_keys.data() + host_begin[t];
    const std::int64_t padded =
        (host_count[t] + cuda::tile_list_block - 1) / cuda::tile_list_block * cuda::tile_list_block;
    for (std::int64_t i = 0; i < padded; ++i) {
      const std::int32_t key = i < host_count[t] ? expected[i] : 0;
      ASSERT_EQ(actual[i], key) << "tile " << t << ", entry " << i;
    }
  }
}

}  // namespace flash_dmattn::testing
