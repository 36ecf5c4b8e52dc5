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


def tensors(lengths, head_dim=64, score_heads=2):
    (length_q, length_k), options = lengths, {"dtype": torch.bfloat16}
    q = torch.randn(2, length_q, 4, head_dim, **options)
    k, v = (torch.randn(2, length_k, 2, head_dim, **options) for _ in range(2))
    bias = torch.randn(2, score_heads, length_k, **options)
    return [t.cuda().requires_grad_() for t in (q, k, v, bias)]


def step(inputs, mask, **options):
    q, k, v, bias = inputs
    out, lse = flash_dmattn_func(q, k, v, mask, bias, return_lse=True, **options)
    weight = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)
    return out, lse, *torch.autograd.grad((out.float() * weight).sum(), inputs)


def assert_same_choice(with_window, with_mask):
    """Compares deterministic calls that visit the same elements with the same kernels."""
    with recorded_kernels() as kernels:
        actual = with_window()
    with recorded_kernels() as others:
        expected = with_mask()
    assert kernels == others
    assert all(map(torch.equal, actual, expected))


SITUATIONS = {  # name: (lengths, is_causal, heads of the mask, heads of the scores, window, head_dim)
    "many keys": ((1100, 2048), False, 2, 2, 500, 64),
    "fewer keys than queries": ((333, 190), True, 1, 2, 50, 64),
    "mask of query heads": ((190, 333), False, 4, 2, 50, 128),
    "scores of query heads": ((200, 264), False, 1, 4, 50, 64),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_attention_under_dense_mask_equals_attention_under_selected_mask(name):
    lengths, is_causal, mask_heads, score_heads, window, head_dim = SITUATIONS[name]
    inputs = tensors(lengths, head_dim, score_heads)
    mask = random_mask(2, mask_heads, *lengths)
    heads = max(mask_heads, score_heads)
    scores, allowed = (
        t.repeat_interleave(heads // t.shape[1], 1) for t in (inputs[3].detach().cpu(), mask)
    )
    allowed = allowed & past(*lengths) if is_causal else allowed
    chosen = topk_mask(scores[:, :, None], allowed, window, None).cuda()
    options = {"is_causal": is_causal, "deterministic": True}
    assert_same_choice(
        lambda: step(inputs, mask.cuda(), keep_window_size=window, **options),
        lambda: step(inputs, chosen, **options),
    )


def bias_that_masks(*shape):
    """Returns a bias with two masking fills: the largest number that masks in bfloat16, and -inf."""
    bias = torch.randn(shape, dtype=torch.bfloat16)
    for fill in (-1e30, -torch.inf):
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


@pytest.mark.parametrize("name", ELEMENT_BIASES)
def test_selection_scores_under_dense_bias_equal_the_cpu(name):
    bias_sizes, mask_sizes, scores_sizes = ELEMENT_BIASES[name]
    lengths = (130, 264)
    q, k, v, _ = tensors(lengths)
    bias, scores = bias_that_masks(*bias_sizes, *lengths), torch.randn(*scores_sizes, 264)
    mask = None
    if mask_sizes is not None:
        mask = (
            random_mask(2, 2, 264) if mask_sizes == "keys" else random_mask(*mask_sizes, *lengths)
        )
    options = {"keep_window_size": 40, "is_causal": True}
    inputs = [t.detach().cpu().float() for t in (q, k, v)]
    expected = flash_dmattn_func(*inputs, mask, bias, selection_scores=scores, **options)
    on_gpu = [t if t is None else t.cuda() for t in (mask, bias)]
    actual = flash_dmattn_func(q, k, v, *on_gpu, selection_scores=scores.cuda(), **options)
    torch.testing.assert_close(actual.cpu().float(), expected, rtol=2e-2, atol=2e-2)


def test_selection_under_dense_bias_has_its_gradient():
    q, k, v, _ = tensors((130, 264))
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


def test_graph_and_compiled_step_equal_eager():
    inputs = tensors((160, 160))
    mask = random_mask(2, 1, 160, 160).cuda()
    options = {"keep_window_size": 30, "is_causal": True, "deterministic": True}
    graph, captured = capture(lambda: step(inputs, mask, **options))
    graph.replay()
    expected = step(inputs, mask, **options)
    assert all(map(torch.equal, captured, expected))

    def forward(q, k, v, bias):
        return flash_dmattn_func(q, k, v, mask, bias, return_lse=True, **options)

    compiled = torch.compile(forward, fullgraph=True)(*(t.detach() for t in inputs))
    assert all(map(torch.equal, compiled, expected[:2]))
