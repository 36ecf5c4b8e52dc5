"""Per-query selection under a dense mask on the GPU adds ranks of keys to the mask and never makes a second mask. It equals the mask that
torch makes on the CPU."""

import itertools

import pytest
import torch

from flash_dmattn import flash_dmattn_func
from flash_dmattn.kernels import kernel_names, recorded_kernels
from flash_dmattn.utils.mask import topk_mask
from gpu import assert_passes_in_the_older_family, capture

ops = torch.ops.flash_dmattn


def rank_keys(scores, mask, window, causal, bias=None):
    return ops.rank_keys(scores, mask, bias, window, causal)


def random_mask(*shape, share=0.6):
    return torch.rand(shape) < share


def past(length_q, length_k):
    return torch.ones(length_q, length_k, dtype=torch.bool).tril(length_k - length_q)


SCORES = {
    "normal": lambda shape: torch.randn(shape),
    "ties": lambda shape: torch.randint(-2, 3, shape) * 0.5,
    "equal": lambda shape: torch.zeros(shape) * torch.randn(shape).sign(),  # of both signs
    "special": lambda shape: torch.tensor([0.0, 1.0, float("inf"), float("-inf"), float("nan")])[
        torch.randint(0, 5, shape)
    ],
}
SHAPES = [  # (batch and heads of the scores, batch and heads of the mask, lengths)
    ((2, 3), (2, 1), (128, 128)),
    ((1, 3), (2, 3), (130, 67)),
    ((2, 2), (1, 4), (33, 1030)),
    ((2, 4), (2, 2), (1100, 96)),
    ((1, 1), (1, 2), (1, 5)),
    ((3, 1), (1, 1), (50, 9000)),
]


@pytest.mark.parametrize("fill", SCORES)
@pytest.mark.parametrize(("scores_sizes", "mask_sizes", "lengths"), SHAPES)
def test_ranks_and_limits_equal_the_selection(scores_sizes, mask_sizes, lengths, fill):
    length_q, length_k = lengths
    heads = max(scores_sizes[1], mask_sizes[1])
    mask = random_mask(*mask_sizes, *lengths)
    mask[..., length_q // 2, :] = False
    windows = {0, 1, length_k // 3, length_k - 1, length_k, length_k + 5}
    types = (torch.float32, torch.bfloat16, torch.float16)
    for dtype, window, causal in itertools.product(types, windows, (False, True)):
        scores = SCORES[fill]((*scores_sizes, length_k)).to(dtype)
        rank, limit = rank_keys(scores.cuda(), mask.cuda(), window, causal)
        assert rank.shape == (*scores_sizes, 1, length_k)
        assert limit.shape == (max(scores_sizes[0], mask_sizes[0]), heads, length_q, 1)
        repeated = [t.repeat_interleave(heads // t.shape[1], 1) for t in (scores, rank.cpu(), mask)]
        allowed = repeated[2] & past(*lengths) if causal else repeated[2]
        expected = topk_mask(repeated[0][:, :, None], allowed, window, None)
        actual = allowed & (repeated[1] < limit.cpu())
        assert torch.equal(actual, expected), (dtype, window, causal)


def test_strided_and_empty_ranks_match_oracle():
    scores, mask = torch.randn(2, 2, 300), random_mask(2, 1, 70, 300)
    expected = rank_keys(scores.cuda(), mask.cuda(), 40, True)
    strided = torch.empty(2, 300, 2).transpose(1, 2).copy_(scores)
    shifted = torch.empty(2, 1, 300, 71, dtype=torch.bool)[..., 1:].transpose(2, 3).copy_(mask)
    for some_scores, some_mask in [(strided, mask), (scores, shifted), (strided, shifted)]:
        # .cuda() keeps strides of dense tensors only
        on_gpu = torch.empty_strided(
            some_mask.shape, some_mask.stride(), dtype=torch.bool, device="cuda"
        ).copy_(some_mask)
        actual = rank_keys(some_scores.cuda(), on_gpu, 40, True)
        assert all(map(torch.equal, actual, expected))
    for batch, heads, length_q, length_k in [
        (0, 1, 4, 4),
        (1, 0, 4, 4),
        (1, 1, 0, 4),
        (1, 1, 4, 0),
    ]:
        rank, limit = rank_keys(
            torch.zeros(batch, heads, length_k, device="cuda"),
            torch.zeros(batch, heads, length_q, length_k, device="cuda").bool(), 2, True,
        )  # fmt: skip
        assert rank.shape == (batch, heads, 1, length_k)
        assert torch.equal(limit, torch.full_like(limit, length_k))


def tensors(lengths, heads, head_dim, dtype=torch.bfloat16, batch=2, score_heads=None):
    (length_q, length_k), (heads_q, heads_kv) = lengths, heads
    q = torch.randn(batch, length_q, heads_q, head_dim, dtype=dtype)
    k, v = (torch.randn(batch, length_k, heads_kv, head_dim, dtype=dtype) for _ in range(2))
    bias = torch.randn(batch, score_heads or heads_kv, length_k, dtype=dtype)
    return [t.cuda().requires_grad_() for t in (q, k, v, bias)]


def step(inputs, mask, **options):
    q, k, v, bias = inputs
    out, lse = flash_dmattn_func(q, k, v, mask, bias, return_lse=True, **options)
    weight = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)
    return out, lse, *torch.autograd.grad((out.float() * weight).sum(), inputs)


def families(kernels):
    return [name.split()[0] for name in kernels]


def recorded(call):
    with recorded_kernels() as kernels:
        results = call()
    return results, families(kernels)


def assert_same_choice(with_ranks, with_mask, units=None):
    """Compares deterministic calls that visit the same elements in the same tiles. Results have the same bits if one family computes both.
    A family that declines ranks may still take the mask; then results differ by rounding, at most `units` for each result."""
    (actual, family), (expected, other) = recorded(with_ranks), recorded(with_mask)
    units = units or [1] * len(expected)
    for got, wanted, unit in zip(actual, expected, units, strict=True):
        if family == other:
            assert torch.equal(got, wanted)
        else:
            torch.testing.assert_close(got / unit, wanted / unit, rtol=2e-2, atol=2e-2)


def test_bit_tests_pass_with_one_kernel_family():
    """Runs the tests that compare bits in a process that uses only one family of kernels."""
    if len(set(families(kernel_names("cuda")))) == 1:
        return  # this process
    names = "chosen_elements or overflow or has_its_gradient or key_bias"
    assert_passes_in_the_older_family(__file__, names)


SITUATIONS = {
    "heads of keys": {},
    "words": {"lengths": (1100, 2048), "window": 500},
    "causal": {"is_causal": True, "lengths": (300, 300)},
    "one mask": {"mask": (1, 1)},
    "mask of query heads": {"mask": (2, 4)},
    "choice of query heads": {"score_heads": 4, "mask": (2, 2)},
    "choice of query heads under one mask": {"score_heads": 4, "mask": (2, 1), "head_dim": 128},
    "one choice": {"score_heads": 1},
    "D128": {"head_dim": 128, "dtype": torch.float16, "is_causal": True},
    "D80": {"head_dim": 80},
    "D256": {"head_dim": 256},
    "softcap": {"softcap": 5.0},
    "odd keys": {"lengths": (190, 333)},
    "fewer keys": {"lengths": (333, 190), "is_causal": True},
    "one query head": {"heads": (2, 2)},
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_attention_by_ranks_equals_attention_under_selected_mask(name):
    options = dict(SITUATIONS[name])
    lengths, window = options.pop("lengths", (200, 264)), options.pop("window", 50)
    heads, score_heads = options.pop("heads", (4, 2)), options.pop("score_heads", None)
    inputs = tensors(
        lengths, heads, options.pop("head_dim", 64), options.pop("dtype", torch.bfloat16),
        score_heads=score_heads,
    )  # fmt: skip
    mask = random_mask(*options.pop("mask", (2, heads[1])), *lengths)
    is_causal = options.get("is_causal", False)
    matched = max(mask.shape[1], inputs[3].shape[1])
    scores, allowed = (
        t.repeat_interleave(matched // t.shape[1], 1) for t in (inputs[3].detach().cpu(), mask)
    )
    allowed = allowed & past(*lengths) if is_causal else allowed
    chosen = topk_mask(scores[:, :, None], allowed, window, None).cuda()
    mask = mask.cuda()
    assert_same_choice(
        lambda: step(inputs, mask, keep_window_size=window, deterministic=True, **options),
        lambda: step(inputs, chosen, deterministic=True, **options),
    )
    actual = step(inputs, mask, keep_window_size=window, deterministic=False, **options)
    expected = step(inputs, chosen, deterministic=False, **options)
    for got, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)


def test_overflowing_scores_respect_ranks():
    """Rows that are recomputed in double also use the ranks."""
    inputs = tensors((96, 160), (2, 2), 64)
    with torch.no_grad():
        for t in inputs[:2]:
            t.mul_(1e19)
    mask = random_mask(2, 1, 96, 160)
    chosen = topk_mask(inputs[3].detach().cpu()[:, :, None], mask, 20, None)
    assert_same_choice(
        lambda: step(inputs, mask.cuda(), keep_window_size=20, deterministic=True),
        lambda: step(inputs, chosen.cuda(), deterministic=True),
        # out, lse, dq (a sum of keys), dk (of queries), dv, dbias
        units=[1, 1e38, 1e19, 1e19, 1, 1],
    )


def bias_that_masks(*shape, dtype=torch.bfloat16):
    """Returns a bias with two masking fills: the largest number that masks in its dtype, and -inf."""
    lowest = -1e4 if dtype == torch.float16 else -1e30
    bias = torch.randn(shape, dtype=dtype)
    for fill in (lowest, -torch.inf):
        bias = bias.masked_fill(random_mask(*shape, share=0.15), fill)
    return bias


ELEMENT_BIASES = {  # name: (batch and heads) of the bias, of the mask and of the scores
    "of key heads": ((2, 2), (2, 1), (2, 2)),
    "without a mask": ((2, 2), None, (2, 2)),
    "one for all": ((1, 1), (2, 2), (1, 2)),
    "of query heads": ((1, 4), (2, 2), (2, 1)),
    "scores of query heads": ((2, 2), (1, 1), (2, 4)),
    "a mask of keys": ((2, 4), "keys", (2, 2)),
}


@pytest.mark.parametrize("selection", ["per_query", "global"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("name", ELEMENT_BIASES)
def test_selection_scores_under_dense_bias_match_oracle(name, dtype, selection):
    bias_sizes, mask_sizes, scores_sizes = ELEMENT_BIASES[name]
    lengths = (130, 264)
    q, k, v, _ = tensors(lengths, (4, 2), 64)
    bias, scores = (
        bias_that_masks(*bias_sizes, *lengths, dtype=dtype),
        torch.randn(*scores_sizes, 264),
    )
    mask = None
    if mask_sizes is not None:
        mask = (
            random_mask(2, 2, 264) if mask_sizes == "keys" else random_mask(*mask_sizes, *lengths)
        )
    options = {"selection": selection, "keep_window_size": 40, "is_causal": True}
    inputs = [t.detach().cpu().float() for t in (q, k, v)]
    # On the CPU, torch turns the selection into a mask.
    expected = flash_dmattn_func(*inputs, mask, bias, selection_scores=scores, **options)
    on_gpu = [t if t is None else t.cuda() for t in (mask, bias)]
    actual = flash_dmattn_func(q, k, v, *on_gpu, selection_scores=scores.cuda(), **options)
    torch.testing.assert_close(actual.cpu().float(), expected, rtol=2e-2, atol=2e-2)


def test_selection_under_dense_bias_has_its_gradient():
    q, k, v, _ = inputs = tensors((130, 264), (4, 2), 64)
    bias = bias_that_masks(2, 2, 130, 264)
    scores, mask = torch.randn(2, 2, 264), random_mask(2, 1, 130, 264)
    allowed = mask & (bias > -1e30)
    chosen = topk_mask(scores[:, :, None], allowed, 40, None).cuda()
    inputs = [q, k, v, bias.cuda().requires_grad_()]
    options = {"keep_window_size": 40, "selection_scores": scores.cuda()}
    assert_same_choice(
        lambda: step(inputs, mask.cuda(), deterministic=True, **options),
        lambda: step(inputs, chosen, deterministic=True),
    )


def test_selection_scores_under_key_bias_match_oracle():
    q, k, v, scores = tensors((130, 130), (2, 2), 64)
    bias = torch.randn(2, 2, 130, device="cuda", dtype=torch.bfloat16)
    bias[..., ::3] = float("-inf")
    mask = random_mask(2, 1, 130, 130)
    seen = (mask.cuda() & (bias > -1e30)[:, :, None]).cpu()
    chosen = topk_mask(scores.detach().cpu()[:, :, None], seen, 20, None)
    options = {"keep_window_size": 20, "selection_scores": scores}
    assert_same_choice(
        lambda: [flash_dmattn_func(q, k, v, mask.cuda(), bias, **options)],
        lambda: [flash_dmattn_func(q, k, v, chosen.cuda(), bias)],
    )


def refused(argument, *wrong):
    good = {
        "scores": torch.zeros(2, 4, 9, device="cuda"),
        "mask": torch.ones(2, 2, 5, 9, dtype=torch.bool, device="cuda"),
        "bias": torch.zeros(2, 4, 5, 9, device="cuda"),
        "window": 3, "is_causal": True,
    }  # fmt: skip
    for value in wrong:
        name = argument.removesuffix("_shape").removesuffix("_dtype")
        with pytest.raises(ValueError, match=f"{argument}: got .*expected"):
            ops.rank_keys(**{**good, name: value})


def test_bad_arguments_of_ranks_are_named():
    gpu = {"device": "cuda"}
    refused("scores", torch.zeros(2, 9, **gpu), torch.zeros(2, 2, 9, dtype=torch.int32, **gpu))
    refused("scores_shape", torch.zeros(2, 3, 9, **gpu))
    refused("mask", torch.ones(2, 2, 5, 9, **gpu), torch.ones(2, 5, 9, **gpu).bool())
    refused("mask", torch.ones(2, 2, 5, 8, **gpu).bool(), torch.ones(2, 2, 5, 9).bool())
    refused("mask_shape", torch.ones(2, 3, 5, 9, **gpu).bool())
    refused("bias", torch.zeros(2, 2, 5, 9, **gpu).bool(), torch.zeros(2, 5, 9, **gpu))
    refused("bias", torch.zeros(2, 2, 4, 9, **gpu), torch.zeros(2, 2, 5, 9))
    refused("bias_shape", torch.zeros(2, 3, 5, 9, **gpu))
    refused("bias_dtype", torch.zeros(2, 2, 5, 9, dtype=torch.float64, **gpu))
    refused("window", -1)
    scores = torch.zeros(1, 1, 9, **gpu)
    with pytest.raises(ValueError, match="mask: got none, expected"):
        ops.rank_keys(scores, None, None, 3, True)
    with pytest.raises(ValueError, match="scores_dtype: got"):
        ops.rank_keys(scores.double(), torch.ones(1, 1, 5, 9, **gpu).bool(), None, 3, True)


def test_graph_and_compiled_step_equal_eager():
    inputs = tensors((160, 160), (4, 2), 64)
    mask = random_mask(2, 1, 160, 160).cuda()
    options = {"keep_window_size": 30, "is_causal": True, "deterministic": True}
    graph, captured = capture(lambda: step(inputs, mask, **options))
    graph.replay()
    expected = step(inputs, mask, **options)
    assert all(map(torch.equal, captured, expected))
    compiled = torch.compile(step, fullgraph=False)(inputs, mask, **options)
    assert all(map(torch.equal, compiled[:2], expected[:2]))


def test_rank_operators_pass_opcheck():
    inputs = tensors((160, 160), (4, 2), 64)
    mask = random_mask(2, 1, 160, 160).cuda()
    scores = inputs[3].detach()
    bias = torch.randn(1, 4, 160, 160, device="cuda")
    for some_mask, some_bias in [(mask, None), (mask, bias), (None, bias)]:
        torch.library.opcheck(ops.rank_keys.default, (scores, some_mask, some_bias, 30, True))
    rank, limit = rank_keys(scores, mask, 30, True)
    arguments = (*inputs[:3], mask, scores[:, :, None], None, rank, limit)
    call_options = ([], True, 0, 0.125, 0.0, True, True, "")
    torch.library.opcheck(ops.forward.default, (*arguments, *call_options))
    detached = [t if t is None else t.detach() for t in arguments]
    results = ops.forward(*detached, *call_options)
    needs = (True, True, True, True)
    dout = torch.randn_like(results[0])
    torch.library.opcheck(
        ops.backward.default, (dout, *detached, *results, None, *call_options, *needs)
    )


@pytest.mark.parametrize("has_dense_bias", [False, True])
def test_compiled_forward_is_one_graph(has_dense_bias):
    q, k, v, scores = (t.detach() for t in tensors((160, 160), (4, 2), 64))
    mask = random_mask(2, 1, 160, 160).cuda()
    bias = bias_that_masks(2, 2, 160, 160).cuda() if has_dense_bias else None

    def forward(q, k, v, mask, bias, scores):
        return flash_dmattn_func(
            q, k, v, mask, scores if bias is None else bias, selection_scores=scores,
            keep_window_size=30, is_causal=True,
        )  # fmt: skip

    inputs = (q, k, v, mask, bias, scores)
    assert torch.equal(torch.compile(forward, fullgraph=True)(*inputs), forward(*inputs))
