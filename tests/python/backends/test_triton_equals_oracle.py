"""Runs the Triton kernels on the table of cases: on a GPU all of them, otherwise the small ones in the interpreter."""

import pytest
import torch

from flash_dmattn._core import ops as _ops
from flash_dmattn.check.cases import CASES, Case, make_case, run, shrink_case
from flash_dmattn.check.oracle import Problem, Result
from gpu import on_cpu, on_gpu
from problem_calls import assert_matches_oracle
from rules_by_definition import select

triton = pytest.importorskip("triton")

from flash_dmattn import triton_dmattn_func  # noqa: E402

# In the interpreter, numpy warns about inf and NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
ON_GPU = torch.cuda.is_available()
# The interpreter takes about a second for a thousand elements, and multiplies bf16 wrongly.
DTYPES = (
    [torch.float32, torch.bfloat16, torch.float16] if ON_GPU else [torch.float32, torch.float16]
)
INTERPRETED = """
    size_1x1_f16 size_7x5_f32 size_0x5 size_5x0 size_113x203_f32 size_203x113_f16 dim_1_f32 dim_80_f16
    dim_250_f32 group_2_f16 mask_b1qk mask_bhq1 bias_bvqk
    bias_b11k bias_bhq1 bias_1111 mask_111k_bias_b1q1_f32 mask_rows_f16
    mask_nothing_visible_f32 bias_finfo_min_f32 bias_nan_f32 bias_inf_f16
    bias_all_masked_f16 bias_low_f32 bias_low_f16 bias_low_f16_from_f32 bias_low_bhqk_f16_from_f32
    bias_all_low_f16_from_f32 inputs_equal_f32 inputs_extreme_f16 inputs_limits_f32 inputs_limits_f16
    softcap_f32 softcap_extreme_f16 per_query_f32 global_f16 packed_f32
    random_intervals_f16 intervals_and_mask_4d_f32 per_query_equal_scores
    propagate_f32 propagate_select_f16 delay_few_f32
""".split()


def results_on_cpu(case: Case) -> Result:
    return on_cpu(run(on_gpu(case) if ON_GPU else case, triton_dmattn_func))


@pytest.mark.parametrize("name", CASES if ON_GPU else INTERPRETED)
def test_case_matches_oracle(name):
    case = make_case(CASES[name] if ON_GPU else shrink_case(CASES[name]))
    assert_matches_oracle(results_on_cpu(case), case.problem, saturate=case.nonfinite == "saturate")


@pytest.mark.parametrize(
    "name", ["per_query_f32", "global_f16", "random_intervals_f16", "size_5x0"]
)
def test_case_with_selection_of_torch_matches_oracle(name, monkeypatch):
    """GPUs without kernels of the library select keys with torch's operators."""
    monkeypatch.setattr(_ops, "has_kernels_for", lambda tensor: False)
    test_case_matches_oracle(name)


@pytest.mark.parametrize("seed", range(200 if ON_GPU else 2))
def test_dv_is_finite_for_every_seed(seed):
    """In this case another implementation's Triton backward had NaN and inf only in dv. They came from unwritten memory and from
    lanes past the end."""
    generator = torch.Generator().manual_seed(seed)
    length = 256 if ON_GPU else 48
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    q, k, v, dout = (torch.randn(1, length, 1, 64, generator=generator).to(dtype) for _ in range(4))
    case = Case(Problem(q, k, v, dout, causal=True), None, "saturate")
    result = results_on_cpu(case)
    for gradient in (result.dq, result.dk, result.dv):
        assert gradient.isfinite().all()
    assert_matches_oracle(result, case.problem)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("selection", ["per_query", "global"])
def test_keep_window_size_matches_oracle(selection, dtype):
    length, window = 50, 11
    q, k, v, dout = (torch.randn(1, length, heads, 16).to(dtype) for heads in (4, 2, 2, 4))
    bias = torch.randint(6, (1, 2, length)).to(dtype)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    keys = torch.ones(length, length, dtype=torch.bool) if selection == "global" else causal
    problem = Problem(
        q, k, v, dout, bias=bias[:, :, None], shown=select(bias, window, keys), causal=True
    )
    device = "cuda" if ON_GPU else "cpu"
    leaves = [t.to(device).requires_grad_() for t in (q, k, v, bias)]
    out, lse = triton_dmattn_func(
        *leaves[:3], attn_bias=leaves[3], is_causal=True, keep_window_size=window,
        selection=selection, return_lse=True,
    )  # fmt: skip
    out.backward(dout.to(device))
    dq, dk, dv, dbias = (t.grad.cpu() for t in leaves)
    assert_matches_oracle(Result(out.cpu(), lse.cpu(), dq, dk, dv, dbias[:, :, None]), problem)
