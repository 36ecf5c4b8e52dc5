#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "device.h"
#include "flash_dmattn/calls.h"
#include "least_bound.h"

// The calls of a case on the device.
namespace flash_dmattn::testing {

inline Problem on_device(Problem problem) {
  problem.device = Device::cuda;
  return problem;
}

// How a run walks its intervals: without a schedule, or by one whose lists have full keys first or go by
// position.
enum class Walk : std::uint8_t { intervals, full_first, by_position };

// The schedule of a direction, on the device.
struct DeviceSchedule {
  std::optional<DeviceBuffer> memory;
  Schedule schedule;

  DeviceSchedule(Problem p, const Visibility& visibility, Direction direction, Walk walk) {
    if (walk == Walk::intervals || visibility.intervals.data == nullptr) return;
    p.deterministic = walk == Walk::by_position && direction == Direction::backward;
    Execution execution;
    execution.workspace_bytes = schedule_workspace_size(p, visibility, direction, execution);
    const DeviceBuffer workspace(execution.workspace_bytes);
    execution.workspace = workspace.data();
    const std::size_t bytes = schedule_size(p, visibility, direction, execution);
    memory.emplace(bytes);
    schedule = build_schedule(p, visibility, direction, {memory->data(), bytes}, execution);
    check_cuda(cudaDeviceSynchronize());
  }
};

// A case on the device: its tensors and the arguments of both directions.
class DeviceCase {
 public:
  DeviceCase(Data& data, Walk walk)
      : results_(data),
        q_(data.q),
        k_(data.k),
        v_(data.v),
        mask_(data.mask),
        bias_(data.bias),
        dout_(data.dout),
        out_(results_.out),
        lse_(results_.lse),
        lse_low_(results_.lse_low),
        dq_(results_.dq),
        dk_(results_.dk),
        dv_(results_.dv),
        dbias_(results_.dbias),
        intervals_(data.intervals.size() * sizeof(KeyInterval)),
        inputs_(inputs_of(data)),
        forward_schedule_(on_device(data.problem), inputs_.visibility, Direction::forward, walk),
        backward_schedule_(on_device(data.problem), inputs_.visibility, Direction::backward, walk) {
    forward_args_ = {.problem = on_device(data.problem),
                     .in = inputs_,
                     .schedule = forward_schedule_.schedule,
                     .out = out_.view(),
                     .lse = lse_.data<float>(),
                     .lse_low = lse_low_.data<float>()};
    backward_args_ = {.problem = on_device(data.problem),
                      .in = inputs_,
                      .schedule = backward_schedule_.schedule,
                      .out = out_.view(),
                      .lse = lse_.data<float>(),
                      .lse_low = lse_low_.data<float>(),
                      .dout = dout_.view(),
                      .dq = dq_.view(),
                      .dk = dk_.view(),
                      .dv = dv_.view(),
                      .dbias = {}};
    if (data.has_bias()) backward_args_.dbias = dbias_.view();
  }

  std::string forward_kernel() const { return ForwardCall(forward_args_, {}).kernel_name(); }
  std::string backward_kernel() const { return BackwardCall(backward_args_, {}).kernel_name(); }

  void run_forward() const { run_call(ForwardCall(forward_args_, {})); }

  // The bits of out and lse.
  std::vector<std::byte> forward_bits() const {
    std::vector<std::byte> bits(out_.bytes() + lse_.bytes());
    out_.download(bits.data());
    lse_.download(bits.data() + out_.bytes());
    return bits;
  }

  // After a forward.
  void run_backward() const { run_call(BackwardCall(backward_args_, {})); }

  // The bits of every gradient.
  std::vector<std::byte> backward_bits() const {
    std::vector<std::byte> bits;
    for (const DeviceTensor* tensor : {&dq_, &dk_, &dv_, &dbias_}) {
      bits.resize(bits.size() + tensor->bytes());
      tensor->download(bits.data() + bits.size() - tensor->bytes());
    }
    return bits;
  }

  Results run() && {
    run_forward();
    run_backward();
    for (DeviceTensor* tensor : {&out_, &lse_, &lse_low_, &dq_, &dk_, &dv_, &dbias_}) {
      tensor->download();
    }
    for (const Tensor* tensor :
         {&results_.out, &results_.dq, &results_.dk, &results_.dv, &results_.dbias}) {
      EXPECT_TRUE(tensor->gaps_intact()) << "written between the elements of " << tensor->name();
    }
    return std::move(results_);
  }

 private:
  Inputs inputs_of(const Data& data) {
    Inputs in;
    in.q = q_.view();
    in.k = k_.view();
    in.v = v_.view();
    if (data.has_mask()) in.mask = mask_.view();
    if (data.has_bias()) in.bias = bias_.view();
    if (data.has_intervals()) {
      intervals_.upload(data.intervals.data());
      in.visibility.intervals = data.intervals_view();
      in.visibility.intervals.data = reinterpret_cast<const KeyInterval*>(intervals_.data());
      in.visibility.bound = least_bound(data.intervals_view(), data.problem);
    }
    return in;
  }

  template <class Call>
  static void run_call(const Call& call) {
    const DeviceBuffer workspace(call.workspace_size());
    call.run({workspace.data(), call.workspace_size()});
    check_cuda(cudaDeviceSynchronize());
  }

  Results results_;
  DeviceTensor q_, k_, v_, mask_, bias_, dout_;
  DeviceTensor out_, lse_, lse_low_, dq_, dk_, dv_, dbias_;
  DeviceBuffer intervals_;
  Inputs inputs_;
  DeviceSchedule forward_schedule_;
  DeviceSchedule backward_schedule_;
  ForwardArgs forward_args_;
  BackwardArgs backward_args_;
};

}  // namespace flash_dmattn::testing
