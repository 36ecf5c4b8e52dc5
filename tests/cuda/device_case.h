#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cuda/family.h"
#include "device.h"
#include "flash_dmattn/calls.h"
#include "least_bound.h"

// The calls of a case on the device.
namespace flash_dmattn::testing {

inline Problem on_device(Problem problem) {
  problem.device = Device::cuda;
  return problem;
}

// How a run walks its intervals: by the schedule of their least bound, or, as a bound of all keys allows no schedule,
// from the first to the last key that a tile sees.
enum class Walk : std::uint8_t { schedule, intervals };

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
        dlse_(data.dlse),
        out_(results_.out),
        lse_(results_.lse),
        lse_low_(results_.lse_low),
        dq_(results_.dq),
        dk_(results_.dk),
        dv_(results_.dv),
        dbias_(results_.dbias),
        intervals_(data.intervals),
        problem_(on_device(data.problem)),
        inputs_(inputs_of(data, walk)) {
    forward_args_ = {.problem = problem_,
                     .in = inputs_,
                     .out = out_.view(),
                     .lse = lse_.data<float>(),
                     .lse_low = lse_low_.data<float>()};
    backward_args_ = {.problem = problem_,
                      .in = inputs_,
                      .out = out_.view(),
                      .lse = lse_.data<float>(),
                      .lse_low = lse_low_.data<float>(),
                      .dout = dout_.view(),
                      .dlse = data.has_dlse() ? ConstRowValues(dlse_.data<float>()) : nullptr,
                      .dq = dq_.view(),
                      .dk = dk_.view(),
                      .dv = dv_.view(),
                      .dbias = {}};
    if (data.has_bias()) backward_args_.dbias = dbias_.view();
  }

  std::string forward_kernel() const { return ForwardCall(forward_args_, {}).kernel_name(); }
  std::string backward_kernel() const { return BackwardCall(backward_args_, {}).kernel_name(); }

  // Enqueue a direction again, in the order of a stream, and return at once. Its outputs are poisoned before.
  void launch_forward(cudaStream_t stream = nullptr) {
    poison({&out_, &lse_, &lse_low_}, stream);
    launch(forward_args_, forward_workspace_, stream);
  }
  // Uses the results of the last forward.
  void launch_backward(cudaStream_t stream = nullptr) {
    poison({&dq_, &dk_, &dv_, &dbias_}, stream);
    launch(backward_args_, backward_workspace_, stream);
  }

  // Tensors whose bits two launches of the same kernels share: out and lse; dk and dv, where each is stored once; all
  // gradients, where additions have an order.
  using Outputs = std::vector<const DeviceTensor*>;
  Outputs forward_outputs() const { return {&out_, &lse_}; }
  Outputs key_gradients() const { return {&dk_, &dv_}; }
  Outputs gradients() const { return {&dq_, &dk_, &dv_, &dbias_}; }
  const DeviceTensor& dq() const { return dq_; }
  const DeviceTensor& dbias() const { return dbias_; }

  Results run() && {
    launch_forward();
    launch_backward();
    return take_results();
  }

  // The same with the kernels of one family, except a direction that it declines.
  Results run_by(const cuda::Family& family) && {
    if (family.forward.decline(forward_args_.problem).empty()) {
      run_kernels(family.forward, forward_args_);
    } else {
      launch_forward();
    }
    if (family.backward.decline(backward_args_.problem).empty()) {
      run_kernels(family.backward, backward_args_);
    } else {
      launch_backward();
    }
    return take_results();
  }

 private:
  Results take_results() {
    check_cuda(cudaDeviceSynchronize());
    for (DeviceTensor* tensor : {&out_, &lse_, &lse_low_, &dq_, &dk_, &dv_, &dbias_}) {
      tensor->download();
    }
    for (const Tensor* tensor :
         {&results_.out, &results_.dq, &results_.dk, &results_.dv, &results_.dbias}) {
      EXPECT_TRUE(tensor->gaps_intact()) << "written between the elements of " << tensor->name();
    }
    return std::move(results_);
  }

  Inputs inputs_of(const Data& data, Walk walk) {
    Inputs in;
    in.q = q_.view();
    in.k = k_.view();
    in.v = v_.view();
    if (data.has_mask()) in.mask = mask_.view();
    if (data.has_bias()) in.bias = bias_.view();
    if (data.has_intervals()) {
      in.visibility.intervals = data.intervals_view();
      in.visibility.intervals.data = intervals_.as<KeyInterval>();
      in.visibility.bound = walk == Walk::intervals
                                ? KeyBound{.base = data.problem.seqlen_k}
                                : least_bound(data.intervals_view(), data.problem);
    }
    return in;
  }

  static void poison(const Outputs& outputs, cudaStream_t stream) {
    for (const DeviceTensor* tensor : outputs) tensor->poison(stream);
  }

  template <class Args>
  static void launch(const Args& args, std::optional<DeviceBuffer>& workspace,
                     cudaStream_t stream) {
    Execution execution;
    execution.stream = stream;
    const CheckedCall<Args> call(args, execution);
    if (!workspace) workspace.emplace(call.workspace_size());
    workspace->poison(stream);
    call.run(*workspace);
  }

  template <class Args>
  static void run_kernels(const cuda::Kernels<Args>& kernels, const Args& args) {
    Plan<Args> plan;
    kernels.plan(args, {}, plan);
    plan.run(plan, args, DeviceWorkspace(plan.workspace_size));
    check_cuda(cudaDeviceSynchronize());
  }

  Results results_;
  DeviceTensor q_, k_, v_, mask_, bias_, dout_, dlse_;
  DeviceTensor out_, lse_, lse_low_, dq_, dk_, dv_, dbias_;
  DeviceBuffer intervals_;
  Problem problem_;
  Inputs inputs_;
  ForwardArgs forward_args_;
  BackwardArgs backward_args_;
  std::optional<DeviceBuffer> forward_workspace_;
  std::optional<DeviceBuffer> backward_workspace_;
};

}  // namespace flash_dmattn::testing
