#include <cstdint>
#include <vector>

#include "cuda/primitives/semaphore.cuh"
#include "unit.cuh"

// Blocks that add to the same elements add in the order of their work, at every element.
namespace flash_dmattn::cuda::unit {
namespace {

struct Semaphore : CudaUnit {};

constexpr int threads = 64;
constexpr int order_indices = 24;
constexpr int elements = order_indices * threads;

// Every block appends its work to the log of every element, `threads` elements at each order index.
struct AppendToLogs {
  OrderSemaphores semaphores;
  int* lengths;  // [elements]
  int* logs;     // [elements, blocks]
  bool other_predecessor;

  __device__ void operator()(std::byte* shared) const {
    using Order = OrderSemaphore<true, threads>;
    auto& storage = *reinterpret_cast<Order::Storage*>(shared);
    const auto group = Order::Group::of_block();
    const int work = Order::take_work(semaphores, storage, group);
    const Order order(semaphores, storage, group, work - 1, other_predecessor ? work - 3 : -1);
    for (int index = 0; index < order_indices; ++index) {
      __nanosleep(static_cast<unsigned>((work * 7 + index * 13) % 5 * 300));
      order.wait(index);
      __syncthreads();
      order.advance(index);
      const int element = index * threads + static_cast<int>(threadIdx.x);
      const int place = atomicAdd(lengths + element, 1);
      logs[element * static_cast<int>(gridDim.x) + place] = work;
    }
    order.finish();
  }
};

void expect_order(int blocks, bool other_predecessor) {
  SCOPED_TRACE(std::to_string(blocks) + " blocks" +
               (other_predecessor ? ", two predecessors" : ""));
  const auto count = static_cast<std::size_t>(blocks);
  const DeviceArray<int> started(std::vector<int>(1, 0));
  const DeviceArray<int> published(std::vector<int>(count, 0));
  const DeviceArray<int> lengths(std::vector<int>(elements, 0));
  const DeviceArray<int> logs(elements * count);
  OrderSemaphores semaphores;
  semaphores.started = started.data();
  semaphores.published = published.data();
  run(blocks, threads, sizeof(OrderSemaphore<true, threads>::Storage),
      AppendToLogs{semaphores, lengths.data(), logs.data(), other_predecessor});
  const std::vector<int> log = logs.values();
  for (std::size_t i = 0; i < log.size(); ++i) {
    ASSERT_EQ(log[i], static_cast<int>(i % count)) << "element " << i / count;
  }
  for (const int index : published.values()) ASSERT_EQ(index, last_order_index + 1);
}

TEST_F(Semaphore, AdditionsFollowTheOrderOfWork) {
  for (const int blocks : {1, 2, 3, 150, 1000}) {  // 1000: more than run at once
    for (const bool other_predecessor : {false, true}) expect_order(blocks, other_predecessor);
  }
}

}  // namespace
}  // namespace flash_dmattn::cuda::unit
