#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <limits>
#include <string>

#include "api/check_finite.h"
#include "flash_dmattn/flash_dmattn.h"
#include "support/call.h"

// Check mode (FLASH_DMATTN_CHECK_FINITE=1) on both backends.
namespace flash_dmattn::testing {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

class CheckFinite : public ::testing::TestWithParam<const char*> {
 protected:
  CheckFinite()
      : data(
            case_from(Call::with_defaults({{"bias_fill", "inf"},  // -inf here and there is no error
                                           {"mask", "11q1"},
                                           {"mask_fill", "full"},
                                           {"intervals", "none"},
                                           {"causal", "0"},
                                           {"dlse", "normal"},
                                           {"layout", "padded"},
                                           {"nonfinite", "propagate"}}))),
        results(data) {
    options.backend = GetParam();
    data.mask.set({0, 0, 3, 0}, 0);  // lse is -inf for query 3
    set_check_finite(true);
  }
  ~CheckFinite() override { set_check_finite(false); }

  void forward() { run_forward(data, options, results); }
  void backward() { run_backward(data, options, results); }

  static void expect_error(const std::function<void()>& action, const std::string& message) {
    try {
      action();
      ADD_FAILURE() << "nothing thrown, expected: " << message;
    } catch (const NonFiniteError& error) {
      EXPECT_EQ(error.what(), message);
    }
  }

  // Puts `value` into `tensor` and back.
  void expect_forward_error(Tensor& tensor, const Index& index, double value,
                            const std::string& message) {
    const double before = tensor.get(index);
    tensor.set(index, value);
    expect_error([&] { forward(); }, message);
    tensor.set(index, before);
  }

  Data data;
  Results results;
  RunOptions options;
};

TEST_P(CheckFinite, FiniteCallPasses) {
  EXPECT_NO_THROW(forward());
  EXPECT_NO_THROW(backward());
}

TEST_P(CheckFinite, NonFiniteInputIsNamed) {
  expect_forward_error(data.q, {1, 4, 3, 7}, infinity, "forward input q[1, 4, 3, 7] is inf");
  expect_forward_error(data.k, {0, 6, 1, 2}, nan, "forward input k[0, 6, 1, 2] is nan");
  expect_forward_error(data.v, {0, 0, 0, 0}, -infinity, "forward input v[0, 0, 0, 0] is -inf");
  expect_forward_error(data.bias, {1, 1, 0, 5}, infinity, "forward input bias[1, 1, 0, 5] is inf");
  expect_forward_error(data.bias, {0, 1, 0, 5}, nan, "forward input bias[0, 1, 0, 5] is nan");
  EXPECT_TRUE(results.out.same_bits(Results(data).out)) << "written in spite of a bad input";
  forward();
  data.dlse.set({1, 3, 2, 0}, -infinity);
  expect_error([&] { backward(); }, "backward input dlse[1, 3, 2] is -inf");
  data.dout.set({0, 1, 2, 3}, nan);
  expect_error([&] { backward(); }, "backward input dout[0, 1, 2, 3] is nan");
  EXPECT_TRUE(results.dq.same_bits(Results(data).dq)) << "written in spite of a bad input";
  results.lse.set({1, 2, 4, 0}, infinity);
  expect_error([&] { backward(); }, "backward input lse[1, 2, 4] is inf");
  results.out.set({1, 0, 0, 4}, nan);
  expect_error([&] { backward(); }, "backward input out[1, 0, 0, 4] is nan");
}

TEST_P(CheckFinite, SeveralNonFiniteInputsNameTheFirst) {
  data.k.set({1, 0, 0, 1}, nan);
  data.k.set({0, 5, 1, 1}, infinity);
  data.v.set({0, 0, 0, 0}, nan);
  expect_error([&] { forward(); }, "forward input k[0, 5, 1, 1] is inf");
}

// Two queries see one key, and the sum of their dout is beyond f32.
TEST_P(CheckFinite, OverflowingOutputIsNamed) {
  data = Data(case_from("heads_q=1 seqlen_q=2 seqlen_k=1 head_dim=8 nonfinite=propagate"));
  results = Results(data);
  data.dout.fill([](const Index& index) { return index[3] == 5 ? 3e38 : 0.0; });
  data.v.fill([](const Index&) { return 0.0; });
  forward();
  expect_error([&] { backward(); }, "backward output dv[0, 0, 0, 5] is inf");
}

TEST_P(CheckFinite, DisabledCheckAllowsNan) {
  data.k.set({0, 5, 1, 1}, nan);
  set_check_finite(false);
  EXPECT_NO_THROW(forward());
  set_check_finite(true);
  EXPECT_THROW(forward(), NonFiniteError);
}

// A process reads the variable once, so each value gets its own process.
TEST(CheckFiniteDeathTest, OnlyValueOneEnablesCheck) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  for (const char* value : {"0", "", "1"}) {
    setenv("FLASH_DMATTN_CHECK_FINITE", value, 1);
    const int on = std::string(value) == "1" ? 1 : 0;
    EXPECT_EXIT(std::exit(check_finite_enabled() ? 1 : 0), ::testing::ExitedWithCode(on), "")
        << value;
  }
  unsetenv("FLASH_DMATTN_CHECK_FINITE");
}

// A user who sets any value relies on the check, so a misspelt value is an error.
TEST(CheckFiniteSetting, OtherValuesThrow) {
  EXPECT_TRUE(check_finite_of("1"));
  EXPECT_FALSE(check_finite_of("0"));
  for (const char* value : {"yes", "true", "2", " 1"}) {
    EXPECT_THROW(check_finite_of(value), InvalidArgument) << value;
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, CheckFinite, ::testing::Values("cpu", "reference"),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace flash_dmattn::testing
