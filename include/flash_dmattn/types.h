#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string_view>

// Plain value types that describe data in memory. Nothing here owns memory.
namespace flash_dmattn {

// f64 is served by the reference backend alone: it exists for oracles and finite differences.
enum class DType : std::uint8_t { f32, bf16, f16, f64 };
// The default dtype of an untyped pointer; calls throw for it.
inline constexpr DType no_dtype{0xff};

// The memory space of all pointers of a call. `cuda` is the current CUDA device.
enum class Device : std::uint8_t { cpu, cuda };

constexpr std::string_view name_of(Device device) { return device == Device::cpu ? "cpu" : "cuda"; }

// Bytes of one element.
constexpr std::int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f64: return 8;
    case DType::f32: return 4;
    default: return 2;
  }
}

constexpr std::string_view name_of(DType dtype) {
  switch (dtype) {
    case DType::f64: return "f64";
    case DType::f32: return "f32";
    case DType::bf16: return "bf16";
    case DType::f16: return "f16";
    default: return "no dtype";
  }
}

// A bias at or below this value masks its element: probability exactly 0, gradient exactly 0. It depends on the
// bias's own dtype, whatever that of q, k and v: the customary fills, -inf and finfo.min, mask, and so does one of bf16
// that has been widened; -2e4 masks in f16 and is a number in f32.
constexpr double mask_value(DType bias_dtype) { return bias_dtype == DType::f16 ? -1e4 : -1e30; }

// A strided 4-d array. Strides are in elements and may be 0 or negative; the last one must be 1
// wherever the dimension it steps over is a contiguous one (see each use). `data` may be null where
// the array is optional or has no elements.
struct Tensor4 {
  void* data = nullptr;
  std::array<std::int64_t, 4> stride{};
};

// A strided 4-d array that is only read.
struct ConstTensor4 {
  const void* data = nullptr;
  std::array<std::int64_t, 4> stride{};

  constexpr ConstTensor4() = default;
  constexpr ConstTensor4(const void* data_, std::array<std::int64_t, 4> stride_)
      : data(data_), stride(stride_) {}
  constexpr ConstTensor4(const Tensor4& tensor) : data(tensor.data), stride(tensor.stride) {}
};

// The element strides of a dense row-major array.
constexpr std::array<std::int64_t, 4> contiguous_strides(const std::array<std::int64_t, 4>& shape) {
  return {shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1};
}

// The state of the slots of one (batch, kv head) of a KV cache (kv_cache.h). It decides which slots a step changes, so
// that the step reads no key first. All zeros before the first token.
struct SlotCount {
  std::int32_t count;     // slots [0, count) have been taken; some may hold no key again
  std::int32_t competed;  // keys that have competed so far, of which min(competed, w) are chosen
  std::int32_t free;      // the first slot without a key; `count` if none of those taken is
  std::int32_t leaving;   // slot of the key that is no longer recent at the next token; -1: none
  float leaving_score;    // NaN if that key does not compete
  // The worst chosen key, evicted next; undefined while fewer than w keys have competed.
  std::int32_t victim;  // its slot
  float victim_score;
  std::int32_t victim_position;
};

// A stride value that means dense row-major; the comment of the field describes the array.
inline constexpr std::int64_t dense_stride = std::numeric_limits<std::int64_t>::min();

namespace detail {
template <std::size_t Rank>
constexpr std::array<std::int64_t, Rank> all_dense() {
  std::array<std::int64_t, Rank> strides{};
  for (std::int64_t& stride : strides) stride = dense_stride;
  return strides;
}
}  // namespace detail
template <std::size_t Rank>
inline constexpr std::array<std::int64_t, Rank> dense_strides = detail::all_dense<Rank>();

}  // namespace flash_dmattn
