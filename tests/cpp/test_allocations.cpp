#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <string>
#include <vector>

#include "flash_dmattn/flash_dmattn.h"
#include "support/cases.h"
#include "support/data.h"
#include "support/kv_calls.h"
#include "support/random.h"
#include "support/run.h"

// The library allocates nothing, because everything it needs is in the workspace. The tests count calls of
// operator new on all threads.
namespace {

std::atomic<bool> counting{false};
std::atomic<int> allocations{0};

void* allocate(std::size_t bytes, std::size_t alignment) {
  if (counting) ++allocations;
  const std::size_t rounded = (bytes + alignment - 1) / alignment * alignment;
  void* memory = std::aligned_alloc(alignment, rounded == 0 ? alignment : rounded);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

// GCC would report the inlined function as a mismatch with operator new.
[[gnu::noinline]] void release(void* memory) { std::free(memory); }

}  // namespace

void* operator new(std::size_t bytes) { return allocate(bytes, alignof(std::max_align_t)); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept { release(memory); }
void operator delete(void* memory, std::size_t) noexcept { release(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { release(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { release(memory); }

namespace flash_dmattn::testing {
namespace {

template <class Function>
int allocations_of(const Function& function) {
  allocations = 0;
  counting = true;
  function();
  counting = false;
  return allocations;
}

TEST(Allocations, OperatorNewIsCounted) {
  EXPECT_EQ(allocations_of([] { delete new int(0); }), 1);
}

class AttentionAllocations : public ::testing::TestWithParam<const char*> {};

TEST_P(AttentionAllocations, ForwardAndBackwardAllocateNothing) {
  const Execution execution = pooled_execution();
  // The reference is slow, and without a name the CPU backend runs again, so both take every eighth case.
  const std::size_t step = (std::string(GetParam()) == "cpu" ? 1 : 8) * (is_quick_run() ? 4 : 1);
  for (std::size_t i = 0; i < attention_cases().size(); i += step) {
    const Case& c = attention_cases()[i];
    if (c.slow || !supports(c.problem, GetParam()).empty()) continue;
    const Data data(c);
    Results results(data);
    const ForwardArgs forwards = forward_args(data, results);
    const BackwardArgs backwards = backward_args(data, results);

    std::size_t forward_bytes = 0, backward_bytes = 0;
    EXPECT_EQ(allocations_of([&] {
                forward_bytes = ForwardCall(forwards, execution, GetParam()).workspace_size();
                backward_bytes = BackwardCall(backwards, execution, GetParam()).workspace_size();
              }),
              0)
        << c.name;
    const Workspace forward_space(forward_bytes, execution);
    const Workspace backward_space(backward_bytes, execution);
    EXPECT_EQ(allocations_of([&] {
                forward(forwards, forward_space, GetParam());
                backward(backwards, backward_space, GetParam());
              }),
              0)
        << c.name;
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, AttentionAllocations, ::testing::Values("cpu", "reference", ""));

TEST(Allocations, SelectionAllocatesNothing) {
  constexpr std::int64_t heads = 3, seqlen = 700;
  const Execution execution = pooled_execution();
  Random random(5);
  std::vector<float> scores(heads * seqlen);
  for (float& score : scores) score = static_cast<float>(random.normal());
  std::vector<KeyInterval> intervals(scores.size());
  for (const Selection kind : {Selection::per_query, Selection::global}) {
    SelectionArgs args{
        .heads = heads, .seqlen_q = seqlen, .seqlen_k = seqlen, .rule = {.window = 60}};
    args.batch = 1;
    args.rule.selection = kind;
    args.scores = scores.data();
    args.scores_dtype = DType::f32;
    args.intervals = intervals.data();
    const Workspace space(SelectCall(args, execution).workspace_size(), execution);
    EXPECT_EQ(allocations_of([&] { select_key_intervals(args, space); }), 0);
  }
}

TEST(Allocations, KvCachesAllocateNothing) {
  // A window of several blocks of keys, several tokens at once, and a dtype that is converted.
  KvCacheShape shape = KvCalls::small;
  shape.rule.window = 300;
  shape.chunk = 5;
  shape.head_dim = 16;
  shape.dtype = DType::bf16;
  for (const char* backend : {"cpu", "reference"}) {
    const KvCalls calls(backend, pooled_execution(), shape, shape.chunk);
    EXPECT_EQ(allocations_of([&] {
                calls.clear();
                calls.run();
              }),
              0)
        << backend;
  }
}

}  // namespace
}  // namespace flash_dmattn::testing
