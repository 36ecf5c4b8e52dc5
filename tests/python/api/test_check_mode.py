"""With FLASH_DMATTN_CHECK_FINITE=1, every call names the first element of its inputs, results and gradients that is inf or NaN."""

import re
from itertools import product

import pytest
import torch

from cpu_backends import CPU_BACKENDS
from flash_dmattn import (
    KVSlots,
    RaggedBatch,
    extend_ragged,
    flash_dmattn_func,
    flash_dmattn_with_kvcache,
)
from flash_dmattn._core import finite
from operators_called import OperatorsCalled

B, S, HQ, HKV, D, W = 2, 9, 4, 2, 8, 4
INF, NAN = float("inf"), float("nan")
# Bias shapes and options of each form of call: no selection, `select_and_attend`, global selection, selection per query head, and
# a delayed bias.
FORMS = {
    "dense": ((B, HQ, S, S), {}),
    "select_and_attend": ((B, HKV, S), {"keep_window_size": W, "is_causal": True}),
    "global": ((B, HKV, S), {"keep_window_size": W, "selection": "global"}),
    "query heads": ((B, HQ, S), {"keep_window_size": W, "is_causal": True}),
    "delayed": ((B, HKV, S), {"bias_delay": 3, "is_causal": True}),
}


def raises(message):
    return pytest.raises(RuntimeError, match=re.escape(message))


def tensors(form, wrong="", index=(), value=0.0):
    """Returns inputs and gradients of the results. All elements are 1 except the one of the tensor `wrong` at `index`."""
    named = {
        "q": torch.ones(B, S, HQ, D), "k": torch.ones(B, S, HKV, D), "v": torch.ones(B, S, HKV, D), "bias": torch.ones(FORMS[form][0]),
        "dout": torch.ones(B, S, HQ, D), "dlse": torch.ones(B, HQ, S),
    }  # fmt: skip
    if wrong:
        named[wrong][index] = value
    return named


def attend(form, named, **options):
    if options.get("backend") == "triton" and torch.cuda.is_available():
        named = {name: tensor.cuda() for name, tensor in named.items()}
    leaves = [named[name].requires_grad_() for name in ("q", "k", "v", "bias")]
    options |= FORMS[form][1] | {"return_lse": True}
    results = flash_dmattn_func(*leaves[:3], attn_bias=leaves[3], **options)
    return torch.autograd.grad(results, leaves, (named["dout"], named["dlse"]))


@pytest.mark.parametrize(
    "form, backend, nonfinite",
    [
        *product(FORMS, ["cpu", "reference"], ["saturate", "propagate"]),
        ("dense", "triton", "saturate"),
    ],
)
def test_nonfinite_value_is_named(form, backend, nonfinite, check_mode):
    options = {"backend": backend, "nonfinite": nonfinite}
    with OperatorsCalled() as called:
        attend(form, tensors(form), **options)
    is_one_operator = any("select_and_attend" in str(operator) for operator in called.all)
    assert is_one_operator == (form == "select_and_attend")
    has_pairs = len(FORMS[form][0]) == 4
    for stage, name, index, value in (
        ("forward", "q", (1, 4, 3, 7), INF),
        ("forward", "k", (0, 6, 1, 2), NAN),
        ("forward", "v", (0, 0, 0, 0), -INF),
        ("forward", "bias", (1, 1, 3, 5) if has_pairs else (1, 1, 5), INF),
        ("forward", "bias", (0, 1, 2, 5) if has_pairs else (0, 1, 5), NAN),
        ("backward", "dout", (0, 1, 2, 3), NAN),
        ("backward", "dlse", (1, 3, 2), -INF),
    ):
        place = [*index[:2], 0, index[2]] if name == "bias" and not has_pairs else [*index]
        with raises(f"{stage} input {name}{place} is {value}"):
            attend(form, tensors(form, name, index, value), **options)


@pytest.mark.parametrize("form", FORMS)
def test_masking_bias_raises_nothing(form, check_mode):
    masks = [torch.zeros(FORMS[form][0], dtype=torch.bool) for _ in range(2)]
    # The masks hide one key, and all keys of a row, whose lse is then -inf.
    masks[0][..., 3], masks[1][0] = True, True
    for mask in masks:
        named = tensors(form)
        named["bias"][mask] = -INF
        for gradient in attend(form, named):
            assert gradient.isfinite().all()


def test_several_nonfinite_values_name_the_first(check_mode):
    named = tensors("dense", "k", (1, 0, 0, 1), NAN)
    named["k"][0, 5, 1, 1], named["v"][0, 0, 0, 0] = INF, NAN
    with raises("forward input k[0, 5, 1, 1] is inf"):
        attend("dense", named)


@pytest.mark.parametrize("bias_shape", [(1, 1, 1), (1, 1, 2, 1)])
def test_overflowing_gradient_is_named(bias_shape, check_mode):
    """Two queries see the same key, and the sum of their dout exceeds the range of float32."""
    q, k, v = (torch.zeros(1, n, 1, 8, requires_grad=True) for n in (2, 1, 1))
    bias = torch.zeros(bias_shape, requires_grad=True)
    out = flash_dmattn_func(q, k, v, attn_bias=bias, nonfinite="propagate")
    dout = torch.zeros_like(q).index_fill(3, torch.tensor([5]), 3e38)
    with raises("backward output dv[0, 0, 0, 5] is inf"):
        torch.autograd.grad(out, (q, k, v, bias), dout)


def test_infinite_gradient_from_outside_the_call_raises_nothing(check_mode):
    q = torch.ones(1, 3, 1, 8, requires_grad=True)
    out = flash_dmattn_func(q, q, q)
    (gradient,) = torch.autograd.grad(out.sum() + (q * INF).sum(), q)
    assert gradient.isinf().all()


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_delayed_bias_with_nan_dout_names_the_element(backend, check_mode):
    """Triton merges two calls, for recent and for older keys. Both receive 0 for a dout element that is not finite, so the check
    has to come before the merge."""
    named = tensors("delayed", "dout", (0, 1, 2, 3), NAN)
    with raises("backward input dout[0, 1, 2, 3] is nan"):
        attend("delayed", named, backend=backend)


def test_vmap_is_checked(check_mode):
    inputs = [torch.ones(3, *tensors("dense")[name].shape) for name in ("q", "k", "v")]
    assert torch.vmap(flash_dmattn_func)(*inputs).isfinite().all()
    inputs[1][2, 1, 4, 0, 6] = NAN
    with raises("forward input k[2, 1, 4, 0, 6] is nan"):
        torch.vmap(flash_dmattn_func)(*inputs)


def test_tensors_without_values_raise_nothing(check_mode):
    q = torch.ones(1, 3, 1, 8, device="meta", requires_grad=True)
    flash_dmattn_func(q, q, q).sum().backward()
    assert q.grad.is_meta


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_nonfinite_sink_and_its_gradient_are_named(backend, check_mode):
    named = tensors("dense")
    sinks = torch.tensor([0.0, -INF, NAN, 0.0])  # -inf means no sink
    q, k, v = (named[name] for name in ("q", "k", "v"))
    with raises("forward input sink_logits[2] is nan"):
        flash_dmattn_func(q, k, v, sink_logits=sinks, backend=backend)
    sinks = sinks.nan_to_num(nan=0.0, neginf=-INF).requires_grad_()
    out = flash_dmattn_func(q, k, v, sink_logits=sinks, backend=backend)
    named["dout"][0, 2, 1, 3] = INF
    with raises("backward input dout[0, 2, 1, 3] is inf"):
        torch.autograd.grad(out, sinks, named["dout"])


def test_captured_graph_is_refused(check_mode, monkeypatch):
    monkeypatch.setattr(finite, "may_read", lambda: False)
    q = torch.ones(1, 3, 1, 8)
    with raises("got a CUDA graph under capture"):
        flash_dmattn_func(q, q, q)


def steps(cache, query, key, value, scores):
    return cache.step(query, key, value, scores)


def extends(cache, query, key, value, scores):
    return cache.extend(query, key, value, scores)


def steps_as_ragged_batch(cache, query, key, value, scores):
    batch = RaggedBatch.of_rows(torch.arange(B, dtype=torch.int32))
    one = (t[:, 0] for t in (query, key, value))
    return extend_ragged(cache, batch, *one, scores[:, :, 0].T)


@pytest.mark.parametrize(
    "enter, token_index", [(steps, "1, 0"), (extends, "1, 0"), (steps_as_ragged_batch, "1")]
)
def test_step_of_a_cache_names_the_token_and_changes_nothing(enter, token_index, check_mode):
    cache = KVSlots(B, HKV, W, D, chunk=3)
    for wrong, heads in (("query", HQ), ("key", HKV), ("value", HKV)):
        shapes = {"query": (B, 1, HQ, D), "key": (B, 1, HKV, D), "value": (B, 1, HKV, D)}
        token = {name: torch.randn(shape) for name, shape in shapes.items()}
        scores = torch.randn(B, HKV, 1)
        enter(cache, **token, scores=scores)
        before = [t.clone() for t in cache.tensors]
        token[wrong][1, 0, heads - 1, 5] = NAN
        with raises(f"forward input {wrong[0]}[{token_index}, {heads - 1}, 5] is nan"):
            enter(cache, **token, scores=scores)
        assert all(map(torch.equal, before, cache.tensors))


def test_results_of_a_step_are_checked(check_mode):
    cache = KVSlots(1, 1, W, D)
    token = (*torch.ones(3, 1, 1, 1, D), torch.ones(1, 1, 1))
    cache.step(*token)
    cache.v.fill_(INF)
    with raises("forward output out[0, 0, 0, 0] is inf"):
        cache.step(*token, nonfinite="propagate")


def test_chunks_and_ragged_prompts_of_a_cache_are_checked(check_mode):
    query, key, value = (torch.ones(B, 2, heads, D) for heads in (HQ, HKV, HKV))
    scores = torch.ones(B, HKV, 2)
    key[1, 1, 0, 3] = INF
    cache = KVSlots(B, HKV, W, D, chunk=3)
    before = [t.clone() for t in cache.tensors]

    def is_unchanged():
        return all(map(torch.equal, before, cache.tensors)) and cache.pending == 0

    with raises("forward input k[1, 1, 0, 3] is inf"):
        cache.extend(query, key, value, scores)
    assert is_unchanged()
    for begins in (True, False):
        batch = RaggedBatch([0, 2, 4], torch.arange(B, dtype=torch.int32), [begins] * B)
        tokens = (t.flatten(0, 1) for t in (query, key, value))
        with raises("forward input k[3, 0, 3] is inf"):
            extend_ragged(cache, batch, *tokens, scores.transpose(0, 1).flatten(1))
        assert is_unchanged()


def test_tokens_for_a_cache_of_all_keys_are_checked_before_it_changes(check_mode):
    query, key, value = (torch.ones(B, 2, heads, D) for heads in (HQ, HKV, HKV))
    caches = [torch.zeros(B, 5, HKV, D) for _ in range(2)]
    value[0, 1, 0, 2] = torch.nan
    lengths = torch.zeros(B, dtype=torch.int32)
    with raises("forward input v[0, 1, 0, 2] is nan"):
        flash_dmattn_with_kvcache(query, *caches, None, key, value, cache_seqlens=lengths)
    assert not any(t.any() for t in caches)


@pytest.mark.parametrize("rule", [{}, {"keep_window_size": 3}], ids=["all", "window"])
@pytest.mark.parametrize("name", ["k_cache", "v_cache", "score_cache"])
def test_nan_in_unused_cache_memory_raises_nothing(name, rule, check_mode):
    caches = {name: torch.ones(B, S, HKV, D) for name in ("k_cache", "v_cache")}
    caches["score_cache"] = torch.ones(B, HKV, S)
    options = {
        "cache_seqlens": torch.tensor([5, 7], dtype=torch.int32),
        "cache_leftpad": torch.tensor([2, 0], dtype=torch.int32),
    } | rule
    query = torch.ones(B, 2, HQ, D)
    expected = flash_dmattn_with_kvcache(query, **caches, **options)
    by_token = caches[name].transpose(1, 2) if name == "score_cache" else caches[name]
    by_token[0, :2], by_token[0, 5:], by_token[1, 7:] = NAN, NAN, NAN
    assert torch.equal(flash_dmattn_with_kvcache(query, **caches, **options), expected)
    by_token[0, 4] = NAN
    with raises("forward input"):
        flash_dmattn_with_kvcache(query, **caches, **options)


def test_nan_score_of_evicted_key_raises_nothing(check_mode):
    """A recent key may have NaN as its score. If no token takes its slot after eviction, the slot still holds the NaN."""
    cache = KVSlots(1, 1, 1, D, recent_window=1, chunk=2)
    token = torch.ones(3, 1, 1, 1, D)
    for score, is_key in ((1.0, True), (NAN, True), (1.0, False)):
        cache.step(*token, torch.full((1, 1, 1), score), key_mask=torch.tensor([[is_key]]))
    assert cache.scores[:, :, : cache.places].isnan().any()
    states = torch.ones(3, 1, 2, 1, D)
    assert torch.equal(cache.extend(*states, torch.ones(1, 1, 2)), states[0])


@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("enter", ["step", "ragged step", "ragged batch"])
def test_nan_in_token_without_row_raises_nothing(enter, name, check_mode):
    rows = torch.tensor([1, -1, 0], dtype=torch.int32)
    token = {n: torch.ones(3, h, D) for n, h in (("query", HQ), ("key", HKV), ("value", HKV))}
    scores = torch.ones(HKV, 3)

    def run():
        cache = KVSlots(B, HKV, W, D)
        if enter == "step":
            one = {n: t[:, None] for n, t in token.items()}
            return cache.over(rows).step(**one, scores=scores.T[:, :, None])[:, 0]
        decodes = enter == "ragged step"
        batch = RaggedBatch.of_rows(rows) if decodes else RaggedBatch([0, 1, 2, 3], rows)
        return extend_ragged(cache, batch, **token, scores=scores)

    expected = run()
    token[name][1] = NAN
    assert torch.equal(run(), expected) and not expected[1].any()
    token[name][2] = NAN
    with raises(f"forward input {name[0]}[2, "):
        run()


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_nan_in_padding_of_ragged_batch_raises_nothing(name, check_mode):
    token = {n: torch.ones(9, h, D) for n, h in (("query", HQ), ("key", HKV), ("value", HKV))}
    batch = RaggedBatch(
        [1, 4, 5, 8], torch.tensor([2, 0, 1], dtype=torch.int32), [True, False, False]
    )

    def run():
        return extend_ragged(KVSlots(3, HKV, W, D), batch, **token, scores=torch.ones(HKV, 9))

    expected = run()
    token[name][0], token[name][8] = NAN, NAN
    assert torch.equal(run(), expected)
    token[name][7] = NAN
    with raises(f"forward input {name[0]}[7, "):
        run()


def test_compiled_code_warns_that_it_is_unchecked(check_mode):
    compiled = torch.compile(flash_dmattn_func, backend="aot_eager", fullgraph=True)
    q = torch.ones(1, 3, 1, 8)
    with pytest.warns(UserWarning, match="FLASH_DMATTN_CHECK_FINITE: code compiled"):
        assert torch.equal(compiled(q, q, q), q)


@pytest.fixture
def set_environment(monkeypatch):
    """Sets the environment variable, or deletes it for None, as if no call had read it yet."""

    def set_value(value):
        monkeypatch.delenv("FLASH_DMATTN_CHECK_FINITE", raising=False)
        if value is not None:
            monkeypatch.setenv("FLASH_DMATTN_CHECK_FINITE", value)
        finite._setting.cache_clear()

    yield set_value
    monkeypatch.undo()
    finite._setting.cache_clear()


def test_check_runs_only_if_environment_variable_is_1(set_environment):
    inputs = torch.full((3, 1, 1, 1, 8), NAN)
    for value in (None, "", "0"):
        set_environment(value)
        flash_dmattn_func(*inputs)
    set_environment("1")
    with raises("forward input q[0, 0, 0, 0] is nan"):
        flash_dmattn_func(*inputs)
    for value in ("true", "2", "01", " ", "yes"):
        set_environment(value)
        message = f"FLASH_DMATTN_CHECK_FINITE: got {value}, expected 0 or 1"
        with pytest.raises(ValueError, match=message):
            flash_dmattn_func(*inputs)
