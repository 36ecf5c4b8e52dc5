"""Compares the results of the CUDA backend with the oracle, which also computes on the GPU, and with the CPU backend."""

from dataclasses import replace

import pytest
import torch

from flash_dmattn import (
    flash_dmattn_func,
    flash_dmattn_func_auto,
    flash_dmattn_varlen_func,
    is_available,
    packed_documents,
    select_key_intervals,
)
from flash_dmattn.check.cases import CASES, make_case, run
from flash_dmattn.check.oracle import Problem, Result, attention
from gpu import assert_passes_in_the_older_family, on_gpu
from problem_calls import assert_close, assert_matches_oracle, forward_and_backward
from rules_by_definition import select


def random_problem(seqlen, heads_q, heads_kv, head_dim, batch=1, dtype=torch.bfloat16):
    q, k, v, dout = (
        torch.randn(batch, seqlen, heads, head_dim, dtype=dtype, device="cuda")
        for heads in (heads_q, heads_kv, heads_kv, heads_q)
    )
    return Problem(q, k, v, dout, causal=True)


@pytest.mark.parametrize("selection", ["per_query", "global"])
@pytest.mark.parametrize("seqlen, window", [(300, 32), (2048, 100), (1000, 999)])
def test_selection_inside_the_call_matches_oracle(selection, seqlen, window):
    problem = random_problem(seqlen, 4, 2, 64, batch=2)
    scores = torch.randint(-20, 20, (2, 2, seqlen), device="cuda") / 8
    problem.bias = scores[:, :, None].bfloat16()
    result = forward_and_backward(problem, keep_window_size=window, selection=selection)
    intervals = select_key_intervals(scores, window, selection=selection)
    problem.shown = intervals.to_mask()
    assert_matches_oracle(result, problem)


@pytest.mark.parametrize("threshold", [None, 0.5])
@pytest.mark.parametrize("recent_window", [0, 40])
@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_heads_with_different_numbers_of_keys_match_oracle_and_repeat(
    head_dim, recent_window, threshold
):
    problem = random_problem(2048, 8, 4, head_dim, batch=2)
    scores = torch.randn(2, 4, 2048, device="cuda")
    problem.bias = scores[:, :, None].bfloat16()
    rule = {"keep_window_size": (0, 600, 3, 70), "recent_window": recent_window, "score_threshold": threshold}  # fmt: skip
    problem.shown = select_key_intervals(problem.bias[:, :, 0], **rule).to_mask()
    assert_matches_oracle(forward_and_backward(problem, **rule), problem)
    first, second = (forward_and_backward(problem, deterministic=True, **rule) for _ in range(2))
    assert_matches_oracle(first, problem)
    assert all(torch.equal(getattr(first, x), getattr(second, x)) for x in ("dq", "dk", "dv", "dbias"))  # fmt: skip


# Blocks repeat their only tile, or a second kernel repeats the call.
@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("options", [{}, {"keep_window_size": 160}])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_number_added_to_all_biases_costs_no_digits(dtype, head_dim, options, batch):
    problem = random_problem(640, 4, 2, head_dim, batch, dtype=dtype)
    bias = torch.randint(-256, 256, (batch, 2, 1, 640), device="cuda") / 64
    bias[..., 3::7] = -torch.inf  # hides keys, to which most keys would lose a bias of -6,000
    if options:
        problem.shown = select_key_intervals(bias[:, :, 0], 160).to_mask()
    expected = attention(replace(problem, bias=bias))

    def errors(number):
        result = forward_and_backward(replace(problem, bias=bias + number), **options)
        fields = ("out", "dq", "dk", "dv", "dbias")
        assert all(getattr(result, field).isfinite().all() for field in fields)
        return torch.stack([
            (getattr(result, field) - getattr(expected, field)).square().mean().sqrt()
            for field in fields
        ])  # fmt: skip

    plain = errors(0)
    for number, most in ((6e3, 1.1), (-6e3, 1.1), (1e5, 2), (-1e5, 2)):
        assert (errors(number) <= most * plain).all()
    errors(2**24)


# Kernels for at most 64 queries, over one tile of keys or several, and kernels for more.
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(3, 3), (64, 64), (64, 640), (65, 65), (640, 640)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_large_scores_cost_rows_without_them_no_digits(dtype, head_dim, masked, seqlen_q, seqlen_k):
    problem = random_problem(seqlen_k, 4, 2, head_dim, dtype=dtype)
    problem.q, problem.dout = problem.q[:, -seqlen_q:], problem.dout[:, -seqlen_q:]
    bias = torch.randint(-32, 32, (1, 2, 1, seqlen_k), device="cuda") / 8
    options = {}
    if masked:
        intervals = select_key_intervals(bias[:, :, 0], 9, query_length=seqlen_q)
        problem.shown, options["key_intervals"] = intervals.to_mask(), intervals
    row = 2 * seqlen_q // 3
    key = seqlen_k - seqlen_q + row  # which this row sees, and none before it

    def errors(keys, number):
        changed = bias.clone()
        changed[..., keys] += number
        call = replace(problem, bias=changed)
        result, expected = forward_and_backward(call, **options), attention(call)
        return torch.stack([
            (getattr(result, field) - getattr(expected, field))[:, :end].square().mean().sqrt()
            for field, end in (("out", row), ("dq", row), ("dk", key), ("dv", key))
        ])  # fmt: skip

    for keys, sign in ((key, 1), (slice(key // 2), -1)):
        plain = errors(keys, 500 * sign)
        for number in (1e5, 2**20):
            assert (errors(keys, number * sign) <= 1.1 * plain + 1e-5).all()
    # Not gradients: next to such a row sm90's backward may round P to 16 bits, which can cost so few rows 1.6 times the error.
    assert errors(key, 2**40)[0] <= 1.1 * errors(key, 500)[0] + 1e-5


def test_large_scores_cost_rows_without_them_no_digits_in_the_older_family():
    name = "test_large_scores_cost_rows_without_them_no_digits and 65 and not older"
    assert_passes_in_the_older_family(__file__, name)


@pytest.mark.parametrize("selection", ["per_query", "global"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_selection_equals_cpu(selection, is_causal, dtype):
    for seqlen_k, seqlen_q, window in [(1, 1, 1), (77, 33, 5), (33, 77, 40), (3000, 3000, 129)]:
        scores = (torch.randint(-9, 9, (2, 3, seqlen_k)) / 4).to(dtype)
        scores[torch.rand(scores.shape) < 0.05] = torch.nan
        mask = torch.rand(2, 1, seqlen_k) < 0.8
        options = {"selection": selection, "is_causal": is_causal, "query_length": seqlen_q}
        ours = select_key_intervals(scores.cuda(), window, key_mask=mask.cuda(), **options)
        cpu = select_key_intervals(scores, window, key_mask=mask, **options)
        assert torch.equal(ours.intervals.cpu(), cpu.intervals) and ours.bound == cpu.bound


@pytest.mark.parametrize("name", ["plain_bf16", "per_query_bf16", "mask_bhqk_bias_bhqk_bf16"])
def test_case_on_a_gpu_equals_the_cpu(name):
    case = make_case(CASES[name])
    cpu, gpu = run(case), run(on_gpu(case))
    expected = attention(case.problem)
    for field in ("out", "lse", "dq", "dk", "dv", "dbias"):
        if getattr(cpu, field) is not None:
            wanted, yardstick = getattr(expected, field), getattr(cpu, field)
            assert_close(field, getattr(gpu, field).cpu(), wanted, yardstick)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"keep_window_size": 6}, {"keep_window_size": 6, "selection": "global"}]
)
@pytest.mark.parametrize("same_lengths", [False, True])
def test_packed_documents_match_oracle(is_causal, options, same_lengths):
    lengths = torch.tensor([0, 5, 0, 170, 1, 40])
    lengths_k = lengths if same_lengths else torch.tensor([3, 9, 0, 300, 30, 11])
    offsets, offsets_k = (n.cumsum(0).int().cuda() for n in (lengths, lengths_k))
    if same_lengths:
        offsets_k = offsets
    total, total_k = int(lengths.sum()), int(lengths_k.sum())
    leaves = [torch.randn(n, h, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
              for n, h in ((total, 4), (total_k, 2), (total_k, 2))]  # fmt: skip
    bias = torch.randn(total_k, 2, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    out, lse = flash_dmattn_varlen_func(
        *leaves, offsets, offsets_k, 170, int(lengths_k.max()), attn_bias=bias, is_causal=is_causal,
        return_lse=True, **options,
    )  # fmt: skip
    dout = torch.randn_like(out)
    out.backward(dout)

    shown = packed_documents(offsets_k, cu_seqlens_q=offsets, is_causal=is_causal).to_mask()
    if options:
        one_choice = options.get("selection") == "global"
        documents = packed_documents(
            offsets_k, cu_seqlens_q=offsets, is_causal=is_causal and not one_choice
        )
        documents, shown = documents.to_mask().cpu(), shown.cpu()
        scores = bias.detach().t()[None].float().cpu()
        shown = (select(scores, 6, documents.expand(1, 2, -1, -1)) & shown).cuda()
    q, k, v = (t.detach()[None] for t in leaves)
    problem = Problem(q, k, v, dout[None], None, bias.detach().t()[None, :, None], shown)
    dbias = bias.grad.t()[None, :, None]
    actual = Result(out[None], lse[None], *(t.grad[None] for t in leaves), dbias)
    assert_matches_oracle(actual, problem)


def test_named_backend_matches_oracle():
    problem = random_problem(100, 2, 2, 64)
    cuda = flash_dmattn_func_auto("cuda")
    assert torch.equal(
        cuda(problem.q, problem.k, problem.v), flash_dmattn_func(problem.q, problem.k, problem.v)
    )
    with pytest.raises((RuntimeError, ValueError), match="cpu computes in cpu memory"):
        flash_dmattn_func_auto("cpu")(problem.q, problem.k, problem.v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtypes_without_kernels_are_named(dtype):
    if dtype == torch.float32 and is_available("triton"):
        pytest.skip("Triton's kernels take float32")
    q = torch.randn(1, 8, 2, 64, device="cuda", dtype=dtype)
    with pytest.raises(TypeError, match=f"{dtype} on cuda:0, expected bfloat16 or float16"):
        flash_dmattn_func(q, q, q)
