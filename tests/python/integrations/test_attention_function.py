"""The attention function that transformers' models call equals N x N maths for every form of mask, bias and packed sequences."""

import ctypes
import warnings
from types import SimpleNamespace

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dense_attention import (
    HKV,
    HQ,
    LOWEST,
    B,
    D,
    S,
    assert_same,
    causal,
    dense_attention,
    make_states,
    padded_causal,
)
from flash_dmattn import flash_dmattn_func, prefix_lm, sliding_window
from flash_dmattn.integrations._shared.layer_call import BOOKKEEPING, causal_mask
from flash_dmattn.integrations.transformers import NAME, key_interval_mask
from largest_tensor import LargestTensor
from peak_memory import run_measured
from scored_models import make_base, make_ids

CAUSAL = causal_mask(B, None)
OFFSETS = torch.tensor([0, 20, 21, S, 70, B * S], dtype=torch.int32)
PACKED = {"cu_seq_lens_q": OFFSETS, "cu_seq_lens_k": OFFSETS}


def attend(query, key, value, mask, bias=None, module=None, **kwargs):
    """query, key, value: [B, S, H, D]."""
    states = (t.transpose(1, 2) for t in (query, key, value))
    module = torch.nn.Identity() if module is None else module
    out, probabilities = ALL_ATTENTION_FUNCTIONS[NAME](
        module, *states, mask, attention_bias=bias, **kwargs
    )
    assert probabilities is None
    return out


def masks_of(queries):
    """Returns {form: (mask, what it shows)}."""
    padded, by_key = padded_causal(queries), torch.rand(B, HKV, S) > 0.3
    some = torch.rand(B, HQ, queries, S) > 0.3
    window = sliding_window(S, 7, query_length=queries)
    return {
        "none": (None, torch.ones(1, 1, queries, S, dtype=torch.bool)),
        "causality": (CAUSAL, causal(queries)[None, None]),
        "keys": (by_key[:, 0], by_key[:, :1, None]),
        "keys of heads": (by_key, by_key.repeat_interleave(HQ // HKV, 1)[:, :, None]),
        "keys of all queries": (by_key[:, :1, None], by_key[:, :1, None]),
        "padded": (padded, padded),
        "additive": (torch.where(padded, 0.0, LOWEST), padded),
        "integers": (padded.long(), padded),
        "additive keys": (torch.where(by_key[:, :1, None], 0.0, LOWEST), by_key[:, :1, None]),
        "any": (some[:, :1], some[:, :1]),
        "any of heads": (some, some),
        "intervals": (window.intervals.expand(B, -1, -1, -1), window.to_mask()),
    }  # fmt: skip


@pytest.mark.parametrize("heads, dims", [(0, 0), (1, 3), (HKV, 3), (HQ, 3), (1, 4), (HKV, 4), (HQ, 4)])  # fmt: skip
@pytest.mark.parametrize("queries", [S, 11, 1])
@pytest.mark.parametrize("form", masks_of(1))
def test_mask_and_bias_equal_dense_attention(form, queries, heads, dims):
    states, (mask, shown) = make_states(queries), masks_of(queries)[form]
    shape = (B, heads, S) if dims == 3 else (B, heads, queries, S)
    bias = torch.randn(shape, requires_grad=True) if heads else None
    expected = dense_attention(*states, shown.expand(B, -1, -1, -1), bias)
    assert_same((*states, bias), attend(*states, mask, bias), expected)


def test_additive_mask_with_other_values_is_added():
    states, bias = make_states(), torch.randn(B, HQ, S, requires_grad=True)
    distance = torch.where(padded_causal(), -0.1 * torch.rand(B, HQ, S, S), LOWEST)
    for added in (bias, None):
        both = distance if added is None else distance + added[:, :, None]
        expected = dense_attention(*states, padded_causal(), both)
        assert_same((*states, added), attend(*states, distance, added), expected)


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("shape", [(1, 1, 2, 2), (2, HQ, 2, 2), (2, 1, 5, 2), (2, 1, 1, 2)])
def test_integer_mask_over_two_keys_is_no_interval(shape, number):
    query, key, value = make_states()
    states = (query[:, : shape[2]], key[:, :2], value[:, :2])
    mask = torch.full(shape, number, dtype=torch.int32)
    mask[..., 0, 1] = 0
    assert torch.equal(attend(*states, mask), attend(*states, mask.bool()))


def test_intervals_of_two_queries_remain_intervals():
    states = [t[:, :2] for t in make_states()]
    intervals = torch.tensor([[0, 2], [1, 2]], dtype=torch.int32).expand(B, 1, 2, 2)
    torch.testing.assert_close(attend(*states, intervals), attend(*states, CAUSAL))


@pytest.mark.parametrize("lengths", [{}, {"max_length_q": 37, "max_length_k": torch.tensor(37)}])
@pytest.mark.parametrize("form", ["none", "ones", "causality", "padded", "integers", "additive", "any of heads", "intervals"])  # fmt: skip
def test_offsets_hide_keys_of_other_sequences(form, lengths):
    ones = torch.ones(B, S).long()
    states, masks = make_states(), masks_of(S) | {"ones": (ones, ones[:, None, None].bool())}
    document = torch.searchsorted(OFFSETS, torch.arange(B * S), right=True).view(B, 1, S)
    mask, shown = masks[form]
    shown = shown & (document[..., None] == document[:, :, None])
    out = attend(*states, mask, **PACKED, **lengths)
    assert_same(states, out, dense_attention(*states, shown, None))


def test_what_the_mask_contains_changes_nothing():
    states, positions = make_states(), torch.arange(S)[None] % 20
    ignored = dict.fromkeys(BOOKKEEPING, True) | {"cache": None, "s_aux": None, "sliding_window": 3}
    layer = torch.nn.Identity()
    for layer.is_causal in (False, True):
        for mask in (CAUSAL, None):
            out = attend(*states, mask, module=layer, position_ids=positions, **ignored)
            assert torch.equal(out, attend(*states, mask))


@pytest.mark.parametrize("value", [True, 3, 0.5, "a"])
def test_unknown_flag_changes_nothing_and_warns_once(value):
    states, flag = make_states(), {f"new_flag_{value}": value}
    model = make_base("Llama")
    model.set_attn_implementation(NAME)
    expected = model(make_ids()).logits
    with pytest.warns(UserWarning, match=f"^new_flag_{value}: got an unknown keyword") as warned:
        out = attend(*states, CAUSAL, **flag)
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert torch.equal(model(make_ids(), **flag).logits, expected)
        assert torch.equal(key_interval_mask(B, S, S, **flag), CAUSAL)
        compiled = torch.compile(attend, backend="eager", fullgraph=True)
        assert torch.equal(out, compiled(*states, CAUSAL, **flag))
    assert len(warned) == 1 and torch.equal(out, attend(*states, CAUSAL))


def test_options_of_a_call_are_followed():
    states, bias, sinks = make_states(), torch.randn(B, HKV, S), torch.randn(HQ)
    expected = flash_dmattn_func(
        *states, attn_bias=bias, is_causal=True, scale=0.3, softcap=5.0, sink_logits=sinks
    )
    options = {"scaling": 0.3, "softcap": 5.0, "s_aux": sinks, "deterministic": True}
    assert torch.equal(attend(*states, CAUSAL, bias, **options), expected)
    assert torch.equal(attend(*states, CAUSAL, position_bias=bias, **options), expected)
    with pytest.warns(UserWarning, match="output_attentions"):
        attend(*states, CAUSAL, output_attentions=True)


def test_values_may_have_a_smaller_head_dimension():
    query, key, value = make_states()
    expected = attend(query, key, value, CAUSAL)[..., :5]
    assert torch.equal(attend(query, key, value[..., :5], CAUSAL), expected)


def test_float32_inputs_are_cast_to_the_dtype_of_layer_or_autocast():
    layer, states = torch.nn.Linear(4, 4), make_states()
    assert attend(*states, None, module=layer).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert attend(*states, None, module=layer).dtype == torch.bfloat16
    assert attend(*states, None, module=layer.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("stored", [torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", ["_is_quantized", "_pre_quantization_dtype", None])
def test_float32_inputs_of_a_quantized_layer_get_the_dtype_of_its_config_or_of_other_weights(
    name, stored
):
    """transformers 5 sets the first name, and 4.57 the second one. Scorers are float32."""
    layer = torch.nn.ModuleDict({part: torch.nn.Linear(4, 4) for part in ("scorer", "q", "o")})
    layer.q.weight = torch.nn.Parameter(torch.zeros(4, 4, dtype=stored), requires_grad=False)
    layer.config = SimpleNamespace(dtype=torch.bfloat16)
    if name is None:
        layer.o.bfloat16()
    else:
        setattr(layer.config, name, torch.bfloat16)
    assert attend(*make_states(), None, module=layer).dtype == torch.bfloat16


@pytest.mark.parametrize("form", ["causality", "padded", "intervals"])
def test_compiled_call_equals_dense_attention(form):
    torch._dynamo.reset()
    states, (mask, shown) = [t.detach() for t in make_states()], masks_of(S)[form]
    out = torch.compile(attend, backend="eager", fullgraph=True)(*states, mask)
    torch.testing.assert_close(out, dense_attention(*states, shown, None), atol=2e-5, rtol=2e-5)


# Writes that torch's version counter does not see, like those of collectives, raw pointers and graph replay.
HIDDEN_WRITES = {
    "data": lambda mask, new: mask.data.copy_(new),
    "data_ptr": lambda mask, new: ctypes.memmove(mask.data_ptr(), new.data_ptr(), new.nbytes),
}  # fmt: skip


def choose(q, k, v, mask, bias):
    mask_or_bias = {"attn_mask" if mask.dtype == torch.bool else "attn_bias": mask}
    return flash_dmattn_func(q, k, v, **mask_or_bias, keep_window_size=5, selection_scores=bias)


@pytest.mark.parametrize("write", HIDDEN_WRITES.values(), ids=HIDDEN_WRITES)
@pytest.mark.parametrize("form", ["bool", "additive"])
@pytest.mark.parametrize("function", [choose, attend])
def test_rewritten_mask_is_read_again(function, form, write):
    states, bias, old = make_states(), torch.randn(B, HKV, S), prefix_lm(S, 0).to_mask()
    new = old.clone()
    new[..., 3:9] = False
    new[..., 12:, :2] = False
    if form == "additive":
        old, new = (torch.where(mask, 0.0, LOWEST) for mask in (old, new))
    expected, mask = function(*states, new, bias), old.clone()
    assert not torch.equal(function(*states, mask, bias), expected)
    version = mask._version
    write(mask, new)
    assert mask._version == version
    assert torch.equal(function(*states, mask, bias), expected)


def test_inference_before_training_changes_nothing():
    states = make_states()
    for allowed in (torch.rand(1, 1, S, S) < 0.6, prefix_lm(S, 3).to_mask()):
        mask = torch.where(allowed, 0.0, LOWEST)
        with torch.inference_mode():
            expected = attend(*states, mask)
        out = attend(*states, mask)
        out.sum().backward()
        assert torch.equal(out, expected)


MEMORY = """
import torch
from flash_dmattn.integrations._shared.layer_call import causal_mask
from flash_dmattn.integrations.transformers.attention import attention_forward

N, H, D = 6144, 4, 16
torch.set_num_threads(2)

def step(length, mask):
    q, k, v = (torch.randn(1, H, length, D, requires_grad=True) for _ in range(3))
    bias = torch.randn(1, H, length, requires_grad=True)
    attention_forward(torch.nn.Identity(), q, k, v, mask, attention_bias=bias)[0].sum().backward()

step(256, None)
three_d = torch.ones(1, 1, N, dtype=torch.bool)
four_d = torch.ones(1, 1, N, N, dtype=torch.bool).tril_()
for mask in (causal_mask(1, None), three_d, four_d):
    before = peak()
    step(N, mask)
    print(peak() - before)
"""


def test_masks_of_three_shapes_need_linear_memory():
    """Causality, a 3-d mask or a 4-d mask makes no N x N tensor, neither per head nor for all."""
    causality, three_d, four_d = run_measured(MEMORY)
    pairs = 6144 * 6144  # bytes of one mask for all heads
    assert causality < pairs and three_d < pairs, (causality, three_d)
    assert four_d < 2 * pairs, four_d  # the mask is given, and read in blocks of 4 MB

    states = [torch.randn(1, 2048, HKV, D) for _ in range(3)]
    for mask in (CAUSAL[:1], torch.ones(1, 1, 2048, dtype=torch.bool)):
        with LargestTensor() as largest:
            attend(*states, mask, torch.randn(1, HKV, 2048))
        assert largest.elements < 2048 * 128
