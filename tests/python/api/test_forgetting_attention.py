"""Compares forgetting attention with its formula over all elements, in float64."""

import pytest
import torch
import torch.nn.functional as F

from flash_dmattn import flash_dmattn_func, forgetting, forgetting_attention

B, N, D = 2, 70, 16


def draw(heads=4, kv_heads=2, gates=None, rows=N, length=N, batch=B, mean=2.0):
    shapes = [(batch, rows, heads, D), *[(batch, length, kv_heads, D)] * 2]
    q, k, v = (torch.randn(shape) for shape in shapes)
    logits = torch.randn(batch, length, heads if gates is None else gates) + mean
    return [t.requires_grad_() for t in (q, k, v, F.logsigmoid(logits).detach())]


def formula(q, k, v, log_fgate, prune=None, documents=None, scale=None, window=10**9):
    """Computes the definition in flash-linear-attention's naive_forgetting_attn, with pruned elements left out."""
    rows, length, heads = q.shape[1], k.shape[1], q.shape[2]
    k, v = (t.repeat_interleave(heads // k.shape[2], 2) for t in (k, v))
    c = log_fgate.cumsum(1).transpose(1, 2)
    per_gate = heads // c.shape[1]
    fading = c[:, :, length - rows :, None] - c[:, :, None]
    shown = torch.ones(rows, length, dtype=torch.bool).tril(length - rows)
    shown = shown.triu(length - rows - window + 1).expand_as(fading)
    if prune is not None:
        shown = shown & (fading >= prune)
    fading, shown = (t.repeat_interleave(per_gate, 1) for t in (fading, shown))
    if documents is not None:
        shown = shown & (documents[:, None] == documents)
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k) * (D**-0.5 if scale is None else scale) + fading
    weights = logits.masked_fill(~shown, -torch.inf).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v), shown


def assert_equal(inputs, expected_of, tolerance=2e-5, **options):
    out = forgetting_attention(*inputs, **options)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    expected = expected_of(*exact)
    direction = torch.randn_like(out)
    ours = [out, *torch.autograd.grad(out, inputs, direction)]
    theirs = [expected, *torch.autograd.grad(expected, exact, direction.double())]
    for name, a, b in zip(("out", "dq", "dk", "dv", "dlog_fgate"), ours, theirs, strict=True):
        assert a.dtype == out.dtype
        torch.testing.assert_close(
            a.double(),
            b,
            atol=tolerance * b.abs().max().item(),
            rtol=tolerance,
            msg=lambda m, n=name: f"{n}: {m}",
        )


@pytest.mark.parametrize(
    "heads, kv_heads, gates", [(4, 4, 4), (4, 2, 4), (4, 2, 2), (4, 2, 1), (4, 1, 4)]
)
@pytest.mark.parametrize("scale", [None, 0.5])
def test_results_match_formula(heads, kv_heads, gates, scale):
    inputs = draw(heads, kv_heads, gates)
    assert_equal(inputs, lambda *t: formula(*t, scale=scale)[0], scale=scale)


@pytest.mark.parametrize("rows", [1, 33])
def test_last_query_is_at_last_key(rows):
    assert_equal(draw(rows=rows), lambda *t: formula(*t)[0])


@pytest.mark.parametrize("rows", [33, N])
@pytest.mark.parametrize("window, prune", [(1, None), (16, None), (16, -3.0), (N + 5, None)])
def test_query_sees_its_window(window, prune, rows):
    options = {"prune": prune}
    assert_equal(
        draw(4, 4, rows=rows),
        lambda *t: formula(*t, window=window, **options)[0],
        window_size=window,
        **options,
    )


@pytest.mark.parametrize("prune", [-0.5, -3.0, -1e3, 0.0])
def test_pruned_elements_are_left_out(prune):
    inputs = draw(4, 4)
    assert_equal(inputs, lambda *t: formula(*t, prune=prune)[0], prune=prune)
    _, shown = formula(*inputs, prune=prune)
    assert (shown.sum(-1) < torch.arange(1, N + 1)).any() == (prune > -1e3)


def test_group_sees_key_until_it_has_faded_for_all_heads():
    inputs, prune = draw(4, 2), -1.5
    _, shown = formula(*inputs, prune=prune)
    shown = shown.unflatten(1, (2, 2)).any(2)
    k, v = (t.repeat_interleave(2, 2) for t in inputs[1:3])
    expected = flash_dmattn_func(
        inputs[0], k, v, attn_mask=shown.repeat_interleave(2, 1), attn_bias=-inputs[3].cumsum(1).mT
    )
    out = forgetting_attention(*inputs, prune=prune)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(out, forgetting_attention(*inputs), atol=1e-3)


@pytest.mark.parametrize("options", [{}, {"prune": -2.0}, {"window_size": 7}], ids=str)
# [30, 30] has 10 tokens of padding.
@pytest.mark.parametrize("lengths", [[20, 1, 0, 49], [70], [30, 30]], ids=str)
def test_packed_sequences_do_not_see_each_other(options, lengths):
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    total = int(offsets[-1])
    inputs = draw(4, 4, batch=1, length=N, rows=N)
    documents = torch.bucketize(torch.arange(N), offsets[1:], right=True)

    def expected(*tensors):
        shown = {name.removesuffix("_size"): number for name, number in options.items()}
        shown["documents"] = documents[:total]
        out = formula(*(t[:, :total] for t in tensors), **shown)[0]
        return F.pad(out, (0, 0, 0, 0, 0, N - total))

    assert_equal(inputs, expected, cu_seqlens=offsets, **options)


def test_rows_of_a_batch_have_sequences_of_their_own():
    inputs = draw()
    offsets = torch.tensor([[0, 30, N], [0, 5, N]], dtype=torch.int32)
    out = forgetting_attention(*inputs, prune=-3.0, cu_seqlens=offsets)
    for row in range(B):
        one = [t[row : row + 1] for t in inputs]
        expected = forgetting_attention(*one, prune=-3.0, cu_seqlens=offsets[row])
        torch.testing.assert_close(out[row : row + 1], expected)


@pytest.mark.parametrize(
    "options",
    [{}, {"prune": -2.0}, {"prune": -2.0, "rows": 41}, {"rows": 1}, {"packed": True}],
    ids=str,
)
def test_forgetting_in_several_calls_equals_one(options, monkeypatch):
    options = dict(options)
    packed = options.pop("packed", False)
    inputs = draw(4, 2, rows=options.pop("rows", N), batch=1)
    if packed:
        options["cu_seqlens"] = torch.tensor([0, 30, 70], dtype=torch.int32)
    results = []
    for rows in (forgetting.ROWS, 16, 7):
        monkeypatch.setattr(forgetting, "ROWS", rows)
        out = forgetting_attention(*inputs, **options)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("closed", [-torch.inf, -1e6, -200.0])
def test_closed_gate_hides_all_keys_before_it(closed):
    """Queries after a closed gate see only keys after it, with the same results as if nothing came before."""
    q, k, v, log_fgate = draw(4, 4)
    with torch.no_grad():
        log_fgate[:, [20, 45]] = closed
    out = forgetting_attention(q, k, v, log_fgate)
    expected = torch.cat(
        [
            forgetting_attention(*(t[:, part] for t in (q, k, v, log_fgate)))
            for part in (slice(0, 20), slice(20, 45), slice(45, N))
        ],
        1,
    )
    torch.testing.assert_close(out, expected, atol=1e-3, rtol=1e-3)
    gradients = torch.autograd.grad(out.square().sum(), (q, k, v, log_fgate))
    assert all(t.isfinite().all() for t in (out, *gradients))


def test_float64_forgetting_equals_definition():
    inputs = [t.detach().double().requires_grad_() for t in draw()]
    assert_equal(inputs, lambda *t: formula(*t)[0], tolerance=1e-12)


@pytest.mark.slow
def test_forgetting_at_131072_keys_is_accurate_to_float32():
    """The sum c of log gates falls to -14,000, where float32 resolves 1e-3. The scores of a call resolve 3e-5."""
    n, rows = 2**17, 64
    q, k, v = torch.randn(3, 1, n, 1, D)
    log_fgate = F.logsigmoid(torch.randn(1, n, 1) + 2.6)
    assert log_fgate.sum() < -13e3
    seen = 4096  # earlier keys have faded completely
    last = (
        t[:, -size:].double()
        for t, size in zip((q, k, v, log_fgate), (rows, *[seen] * 3), strict=True)
    )
    exact, _ = formula(*last)
    out = forgetting_attention(q, k, v, log_fgate, prune=-100.0)[:, -rows:]
    assert (out - exact).abs().max() < 3e-5
    plain = flash_dmattn_func(q[:, -rows:], k, v, attn_bias=-log_fgate.cumsum(1).mT, is_causal=True)
    assert (plain - exact).abs().max() > 2e-4


def test_compiled_call_has_one_graph(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(forgetting, "ROWS", 40)
    inputs = draw()
    compiled = torch.compile(forgetting_attention, backend="aot_eager", fullgraph=True)
    results = []
    for function in (forgetting_attention, compiled):
        out = function(*inputs, prune=-2.0)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)


def test_empty_sequences_give_empty_result():
    q, k, v, log_fgate = draw(length=0, rows=0)
    assert forgetting_attention(q, k, v, log_fgate).shape == q.shape
    assert forgetting_attention(q, k, v, log_fgate, prune=-1.0).shape == q.shape
