#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "device.h"

// Compares what many launches leave in the same tensors.
namespace flash_dmattn::testing {

// Host memory that the device copies to at its full rate.
class PinnedBuffer {
 public:
  explicit PinnedBuffer(std::size_t bytes) : bytes_(bytes) {
    check_cuda(cudaMallocHost(&data_, std::max<std::size_t>(bytes, 1)));
  }
  ~PinnedBuffer() { cudaFreeHost(data_); }
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;

  std::byte* data() const { return data_; }
  std::size_t size() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_;
};

// The bits that the launches of a test leave in some tensors, compared with the bits of the first launch. They are in
// pinned memory, as a test downloads them a thousand times.
class LaunchBits {
 public:
  explicit LaunchBits(std::vector<const DeviceTensor*> tensors)
      : tensors_(std::move(tensors)), first_(bytes(tensors_)), now_(bytes(tensors_)) {
    download(first_);
  }

  // Whether another launch has left the same.
  bool are_the_same() {
    download(now_);
    return std::memcmp(now_.data(), first_.data(), first_.size()) == 0;
  }

 private:
  static std::size_t bytes(const std::vector<const DeviceTensor*>& tensors) {
    std::size_t sum = 0;
    for (const DeviceTensor* tensor : tensors) sum += tensor->bytes();
    return sum;
  }
  void download(const PinnedBuffer& to) const {
    std::byte* at = to.data();
    for (const DeviceTensor* tensor : tensors_) {
      tensor->download(at);
      at += tensor->bytes();
    }
  }

  std::vector<const DeviceTensor*> tensors_;
  PinnedBuffer first_;
  PinnedBuffer now_;
};

// bf16 sums whose terms come in any order, compared with the sums of the first launch.
class LaunchSums {
 public:
  explicit LaunchSums(const DeviceTensor& tensor) : tensor_(tensor), now_(tensor.bytes()) {
    tensor_.download(now_.data());
    for (std::size_t i = 0; i < tensor.bytes() / 2; ++i) {
      first_.push_back(value(i));
      largest_ = std::max(largest_, std::abs(first_.back()));
    }
  }

  // Whether they differ by a unit in the last place of bf16, or of fp32 where terms cancel.
  bool are_close() {
    tensor_.download(now_.data());
    bool close = true;
    for (std::size_t i = 0; i < first_.size(); ++i) {
      const float bound = std::abs(first_[i]) * 0x1p-7F + largest_ * 0x1p-20F;
      close = close && std::abs(value(i) - first_[i]) <= bound;
    }
    return close;
  }

 private:
  float value(std::size_t i) const {
    std::uint16_t bits = 0;
    std::memcpy(&bits, now_.data() + 2 * i, 2);
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  }

  const DeviceTensor& tensor_;
  PinnedBuffer now_;
  std::vector<float> first_;
  float largest_ = 0;
};

}  // namespace flash_dmattn::testing
