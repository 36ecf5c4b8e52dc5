"""Per-query selection under a dense mask on the GPU equals the mask that torch makes on the CPU."""

import pytest
import torch

from flash_dmattn import flash_dmattn_func
from flash_dmattn.kernels import recorded_kernels
from flash_dmattn.utils.mask import topk_mask
from gpu import capture


def random_mask(*shape, share=0.6):
    return torch.rand(shape) < share


def past(length_q, length_k):
    return torch.ones(length_q, length_k, dtype=torch.bool).tril(length_k - length_q)


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


def recorded(call):
    with recorded_kernels() as kernels:
        results = call()
    return results, kernels


def assert_same_choice(with_window, with_mask):
    """Compares deterministic calls that visit the same elements with the same kernels."""
    (actual, kernels), (expected, others) = recorded(with_window), recorded(with_mask)
    assert kernels == others
    assert all(map(torch.equal, actual, expected))


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
def test_attention_under_dense_mask_equals_attention_under_selected_mask(name):
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


def test_overflowing_scores_under_dense_mask_equal_the_selected_mask():
    inputs = tensors((96, 160), (2, 2), 64)
    with torch.no_grad():
        for t in inputs[:2]:
            t.mul_(1e19)
    mask = random_mask(2, 1, 96, 160)
    chosen = topk_mask(inputs[3].detach().cpu()[:, :, None], mask, 20, None)
    assert_same_choice(
        lambda: step(inputs, mask.cuda(), keep_window_size=20, deterministic=True),
        lambda: step(inputs, chosen.cuda(), deterministic=True),
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
