"""Compares the layer's training with N x N maths, and its generation through a cache with one call."""

import pytest
import torch
import torch.nn.functional as F

from dense_in_double import dense_in_double
from flash_dmattn import DynamicMaskAttention
from flash_dmattn.scores import doge_scores_of

B, S, HIDDEN, HEADS, KV_HEADS, WINDOW = 2, 40, 32, 4, 2, 7


def rope(query, key, positions):
    """Applies a small rotary embedding."""
    half = query.shape[-1] // 2
    angles = positions[..., None, None] * 0.3 ** torch.arange(half, device=query.device)
    cos, sin = angles.cos(), angles.sin()

    def turn(t):
        a, b = t.split(half, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    return turn(query), turn(key)


def make_layer(**options):
    options = {"rope": rope, "score": "doge", **options}
    layer = DynamicMaskAttention(HIDDEN, HEADS, KV_HEADS, WINDOW, **options)
    if options["score"] != "gate":
        torch.nn.init.normal_(layer.scores.A)
    return layer


FORMULAS = {
    "gate": lambda z, _: z.sigmoid().log(),
    "linear": lambda z, A: A * F.softplus(z),
    "doge": lambda z, A: (A * F.softplus(z)).exp(),
}


def dense(layer, hidden, present, score="doge"):
    """Computes the paper's equations with a dense mask."""
    length = hidden.shape[1]
    q, k, v = (
        project(hidden).view(B, length, -1, layer.head_dim)
        for project in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    z = layer.scores.proj(hidden if layer.score_input == "hidden" else v.flatten(2))
    scores = FORMULAS[score](z, getattr(layer.scores, "A", None)).transpose(1, 2)
    if layer.rope is not None:
        q, k = layer.rope(q, k, torch.arange(length)[None])
    allowed = torch.ones(length, length, dtype=torch.bool).tril() & present[:, None, None]
    ranked = scores[:, :, None].masked_fill(~allowed, -torch.inf).flip(-1)
    best = ranked.sort(dim=-1, descending=True, stable=True).indices[..., :WINDOW]
    kept = torch.zeros_like(ranked, dtype=torch.bool).scatter(-1, length - 1 - best, True) & allowed
    seen = kept.repeat_interleave(HEADS // KV_HEADS, 1)
    out = dense_in_double(q, k, v, scores, seen)[0].to(q.dtype)
    return layer.o_proj(out.flatten(2))


def padding(kind):
    present = torch.ones(B, S, dtype=torch.bool)
    if kind == "left":
        present[0, :13] = False
    elif kind == "right":
        present[1, -5:] = False
    return present


@pytest.mark.parametrize("kind", ["none", "left", "right"])
@pytest.mark.parametrize(
    "options",
    [
        {"score": "gate"},
        {"score": "linear"},
        {"score": "doge"},
        {"score": "gate", "score_input": "value", "rope": None, "bias": True, "head_dim": 24},
        {"score": "doge", "score_input": "hidden"},
    ],
    ids=str,
)
def test_training_step_equals_the_equations(options, kind):
    layer, hidden = make_layer(**options), torch.randn(B, S, HIDDEN, requires_grad=True)
    present = padding(kind)
    out = layer(hidden, key_mask=None if kind == "none" else present)
    expected = dense(layer, hidden, present, options["score"])
    inputs, direction = [hidden, *layer.parameters()], torch.randn_like(out)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    gradients = [torch.autograd.grad(o, inputs, direction) for o in (out, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("kind", ["none", "left"])
@pytest.mark.parametrize(
    "lengths", [[1] * S, [17, *[1] * 23], [17, 1, 0, 5, 1, 16], [3, 37], [S]], ids=str
)
@torch.no_grad()
def test_layer_with_a_cache_equals_one_call(lengths, kind):
    layer, hidden, present = make_layer(), torch.randn(B, S, HIDDEN), padding(kind)
    whole = layer(hidden, key_mask=present)
    cache = layer.make_cache(B, chunk=4)
    steps = [
        layer(part, cache=cache, key_mask=None if kind == "none" else mask)
        for part, mask in zip(hidden.split(lengths, 1), present.split(lengths, 1), strict=True)
    ]
    assert cache.seen.tolist() == [S] * B and cache.k.shape[2] == WINDOW + 4
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, atol=1e-5, rtol=1e-5)
    cache.clear()
    assert torch.equal(layer(hidden[:, :9], cache=cache), layer(hidden[:, :9]))


def test_given_positions_replace_consecutive_ones():
    layer, hidden = make_layer(), torch.randn(B, S, HIDDEN)
    shifted = torch.arange(S)[None] + 5
    torch.testing.assert_close(
        layer(hidden, positions=shifted), layer(hidden), atol=1e-5, rtol=1e-5
    )
    assert not torch.allclose(layer(hidden, positions=2 * shifted), layer(hidden))


def test_fresh_layer_keeps_the_recent_keys_and_learns():
    layer = DynamicMaskAttention(HIDDEN, HEADS, KV_HEADS, WINDOW, score="doge")
    hidden = torch.randn(1, S, HIDDEN)
    alone = layer(hidden[:, -WINDOW:])[:, -1]
    torch.testing.assert_close(layer(hidden)[:, -1], alone, atol=1e-5, rtol=1e-5)
    layer(hidden).square().sum().backward()
    assert layer.scores.A.grad.abs().min() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_of_the_ordinary_range_equal_exp(dtype):
    A, step = torch.tensor([0.0, -2.0, 1.5], dtype=dtype), torch.randn(B, S, 3, dtype=dtype)
    step[0, :2] = torch.tensor([[15.0], [21.0]], dtype=dtype)  # up to exp(31.5)
    inputs = [t.requires_grad_() for t in (A, step)]
    softplus = torch.logaddexp(step, torch.zeros_like(step))  # torch's softplus is x above 20
    ours, theirs = doge_scores_of(*inputs), (A * softplus).exp().transpose(1, 2)
    rounding = {"atol": 0, "rtol": 50 * torch.finfo(dtype).eps}
    torch.testing.assert_close(ours, theirs, **rounding)
    direction = torch.randn_like(ours)
    for mine, expected in zip(
        *(torch.autograd.grad(x, inputs, direction) for x in (ours, theirs)), strict=True
    ):
        torch.testing.assert_close(mine, expected, **rounding)


@pytest.mark.parametrize("A", [20.0, 80.0, 1e4, 1e30, 3e38, -80.0, -3e38])
@pytest.mark.parametrize("repeated", [False, True])
def test_doge_layer_with_any_A_gives_finite_results(A, repeated):
    """Repeated tokens have tied scores. If all keys tie, scores of any size have a gradient."""
    layer, hidden = make_layer(), torch.randn(B, S, HIDDEN)
    hidden = (hidden[:, :1].expand(B, S, HIDDEN) if repeated else hidden).clone().requires_grad_()
    torch.nn.init.constant_(layer.scores.A, A)
    scores = layer.scores(layer.v_proj(hidden))
    assert scores.isfinite().all()
    out = layer(hidden)
    gradients = torch.autograd.grad(out.square().sum(), [hidden, *layer.parameters()])
    assert all(t.isfinite().all() for t in (out, *gradients))
    with torch.no_grad():
        assert torch.equal(layer.scores(layer.v_proj(hidden)), scores)


def test_optimizer_steps_with_scores_at_the_end_of_float32_stay_finite():
    layer, hidden = make_layer(), torch.randn(B, S, HIDDEN)
    torch.nn.init.constant_(layer.scores.A, 100.0)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    for _ in range(20):
        optimizer.zero_grad()
        (layer(hidden) - hidden).square().mean().backward()
        optimizer.step()
        assert all(p.isfinite().all() for p in layer.parameters())
        assert all(t.isfinite().all() for s in optimizer.state.values() for t in s.values())


@pytest.mark.parametrize("autocast", [True, False], ids=["layer", "only cache"])
@torch.no_grad()
def test_16_bit_layer_matches_float32(autocast):
    layer, hidden = make_layer(), torch.randn(B, S, HIDDEN)
    expected = layer(hidden)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        cache = layer.make_cache(B, dtype=torch.bfloat16)
        steps = torch.cat([layer(part, cache=cache) for part in hidden.split([30, 1, 9], 1)], 1)
        whole = layer(hidden)
    assert cache.scores.dtype == torch.float32
    torch.testing.assert_close(steps, whole, atol=0.02, rtol=0.02)
    assert (steps - expected).abs().mean() < 0.05 * expected.abs().mean()


@torch.no_grad()
def test_compiled_steps_share_one_graph():
    torch._dynamo.reset()
    layer, hidden = make_layer(), torch.randn(B, S, HIDDEN)
    expected, cache = layer(hidden), layer.make_cache(B)
    steps = [layer(hidden[:, :20], cache=cache)]
    step = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        steps += [step(hidden[:, [i]], cache=cache) for i in range(20, S)]
    torch.testing.assert_close(torch.cat(steps, dim=1), expected, atol=1e-5, rtol=1e-5)


def test_cache_refuses_gradients_and_more_tokens_than_its_chunk():
    layer, hidden = make_layer(), torch.randn(B, S, HIDDEN)
    cache = layer.make_cache(B, chunk=0)
    layer(hidden, cache=cache)  # a prompt may require a gradient, but the cached keys do not
    with pytest.raises(RuntimeError, match="requires a gradient"):
        layer(hidden[:, :1], cache=cache)
    with torch.no_grad(), pytest.raises(ValueError, match="chunk: got 0 with 0 tokens pending"):
        layer(hidden, cache=cache)
