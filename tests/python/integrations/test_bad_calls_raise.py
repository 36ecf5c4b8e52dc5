"""A meaningless call of the layer for transformers raises an error that names the argument. A row has the words of the error, as
a regular expression, and the call. Models and caches are unchanged afterwards."""

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig
from transformers.models.doge.modeling_doge import DogeAttention, DogeForSequenceClassification

from dense_attention import HKV, HQ, B, S, make_states
from doge_generation import WINDOW, make_ids, make_model
from flash_dmattn.integrations._shared.layer_call import causal_mask, intervals_of_documents
from flash_dmattn.integrations.transformers import (
    DynamicMaskCache,
    add_learned_scores,
    enable_flash_dmattn,
    key_interval_mask,
)
from flash_dmattn.integrations.transformers.attention import attention_forward
from flash_dmattn.integrations.transformers.compat import CACHE
from flash_dmattn.integrations.transformers.context_parallel import ModelOfPieces
from scored_models import VOCABULARY, make_base, make_config, make_scored
from transformers_version import IS_TRANSFORMERS_4

pytestmark = pytest.mark.transformers
ERRORS = (ValueError, TypeError, RuntimeError, FileNotFoundError)
LOWEST = torch.finfo(torch.float32).min

# ---- The attention function ----------------------------------------------------------------------------

QUERY, KEY, VALUE = (t.detach().transpose(1, 2) for t in make_states())
BIAS, OFFSETS = torch.zeros(B, HKV, S), torch.arange(B + 1, dtype=torch.int32) * S
PADDED = torch.arange(S).expand(B, S) > 4
EITHER = torch.tensor([[0, 1], [0, 0]], dtype=torch.int32).expand(B, 1, 2, 2)
NEGATIVE = -PADDED.long()[:, None, None].expand(B, 1, S, S)


class Layer(torch.nn.Module):
    is_causal, config = True, LlamaConfig()


def attend(mask=None, query=QUERY, key=KEY, value=VALUE, **options):
    return lambda: attention_forward(Layer(), query, key, value, mask, **options)


def attend_in_sequences(mask=None, **options):
    return attend(mask, **{"cu_seq_lens_q": OFFSETS, "cu_seq_lens_k": OFFSETS} | options)


def generate_in_batch(family, name):
    def call():
        model = make_base(family, eos_token_id=2)
        model.set_attn_implementation(name)  # transformers 4 has no paged form of the name
        model.generate_batch(inputs=[[3, 4, 5]] * 4)

    return call


CALLS_OF_ATTENTION = [
    *((f"^{name}: got", attend(**{name: value})) for name, value in {
        "attention_bias": "a", "position_bias": BIAS.long(), "scaling": 0.0, "softcap": -1.0, "deterministic": "a",
        "s_aux": torch.zeros(HQ + 1), "dropout": 0.1, "is_causal": "False", "softcapp": 3.0, "temperature": 2.0, "query": QUERY[:, :, :0],
    }.items()),
    ("^attention_bias: got a tensor together with position_bias", attend(attention_bias=BIAS, position_bias=BIAS)),
    # Features that are not supported, which eager attention ignores.
    *((f"^{name}: got .* belongs to {words}", attend(**{name: torch.zeros(1)})) for name, words in (
        ("cache", "continuous batching"), ("block_table", "continuous batching"), ("sinks", "per-token"), ("head_mask", "weights"),
        ("block_indices", "keys chosen"))),
    *((f"^{name}: got a dict", attend(**{name: {"full_attention": 3}})) for name in ("cu_seq_lens_k", "max_length_k")),
    # The mask decides what a query sees.
    ("^is_causal: got True without a mask", attend(is_causal=True)),
    ("^is_causal: got False with a causal mask", attend(causal_mask(B, None), is_causal=False)),
    ("^attention_mask: got str", attend("a")),
    *((r"^attention_mask: got shape \(.*\), expected 37 keys last", attend(mask)) for mask in (torch.tensor(True), PADDED[:, 1:])),
    ("^attention_mask: got shape", attend(torch.ones(3, 1, S, S))),
    ("^attention_mask: got int32 of shape .* which is a mask or intervals", attend(EITHER, *(t[:, :, :2] for t in (QUERY, KEY, VALUE)))),
    *(("^attention_mask: got torch.float32 of shape", attend(torch.zeros(shape))) for shape in ((B, S), (B, 1, S))),
    # Read as bool masks, additive ones of integers would hide what they allow.
    *((f"^attention_mask: got {dtype} .* negative numbers", attend(mask.to(dtype)))
      for dtype in (torch.int64, torch.int32) for mask in (NEGATIVE[:, 0, 0], NEGATIVE[:, 0, :1], NEGATIVE)),
    # Packed sequences.
    *((f"^{name}: got None", attend_in_sequences(**{name: None})) for name in ("cu_seq_lens_q", "cu_seq_lens_k")),
    *(("^cu_seq_lens_q: got", attend_in_sequences(cu_seq_lens_q=offsets))
      for offsets in ([0, S], torch.tensor([0.0, S]), torch.tensor([1, B * S]))),
    ("^attention_mask: got shape .* with cu_seq_lens_q", attend_in_sequences(PADDED)),
    # Masks and batches of a model.
    ("^sliding_windw: got", lambda: key_interval_mask(1, 8, 8, sliding_windw=3)),
    ("^attention_mask: got", lambda: key_interval_mask(1, 8, 8, attention_mask=torch.zeros(1, 8))),
    *(("continuous batching|is not supported", generate_in_batch(family, paged + name))
      for family in ("Llama", "Doge") for name in ("flash_dmattn", "dynamic_mask_attention") for paged in ("", "paged|")),
]  # fmt: skip


@pytest.mark.parametrize(("words", "call"), CALLS_OF_ATTENTION)
def test_bad_call_of_attention_raises_naming_the_argument(words, call):
    with pytest.raises(ERRORS, match=words):
        call()


# ---- enable_flash_dmattn and the models that it changes ------------------------------------------------


def with_own_layer():
    class Own(DogeAttention):
        pass

    model = make_base("Doge")
    model.model.layers[1].self_attn = Own(model.config, 1)
    return model


def enable(make=make_model, **options):
    return lambda: enable_flash_dmattn(make(), **options)


def call_doge(**options):
    return lambda: enable_flash_dmattn(make_model())(torch.arange(9)[None], **options)


def slots_of(config, **options):
    return lambda: DynamicMaskCache(config(), **options)


def llama(**parts):
    return lambda: LlamaConfig(num_hidden_layers=2, **parts)


def doge(**options):
    return lambda: make_model(**options).config


def write_with_slots(family):
    return lambda: make_base(family).generate(
        torch.arange(5)[None], past_key_values=DynamicMaskCache(doge()()), max_new_tokens=3
    )


def float32_slots_on_gpu():
    with FakeTensorMode():
        states = torch.zeros(B, 2, 3, 8, device="cuda")
        DynamicMaskCache(doge()()).layers[0].lazy_initialization(states, states)


MIXED = {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True}
CALLS_OF_MODELS = [
    ("^model: got str", lambda: enable_flash_dmattn("SmallDoge/Doge-20M")),
    ("^model: got attention layers of class Own, expected", enable(with_own_layer)),
    ("^model: got a single DogeAttention, expected the model", enable(lambda: DogeAttention(make_config("Doge"), 0))),
    (r'set_attn_implementation\("flash_dmattn"\)', enable(make_base)),
    ("Linear without any DogeAttention layer", enable(lambda: torch.nn.Linear(2, 2))),
    ("attention_dropout: got 0.1, .* attention_dropout=0.0", enable(lambda: make_model(attention_dropout=0.1))),
    ("attention_dropout: got 0.1, .* attention_dropout=0.0",
     lambda: make_model(attention_dropout=0.1).set_attn_implementation("flash_dmattn")),
    ("round_scores_like_eager: got 'no'", enable(round_scores_like_eager="no")),
    ("cache: got 'static', expected 'dynamic_mask' or None", enable(cache="static")),
    ("sliding_window: got 16", enable(lambda: make_model(sliding_window=16), cache="dynamic_mask")),
    *((f"^{name}: got .* learned scores", enable(make_scored, **{name: value}))
      for name, value in (("cache", "dynamic_mask"), ("round_scores_like_eager", True))),
    ("context_parallel: got None for a LlamaForCausalLM", enable(make_scored)),
    ("context_parallel: got a Gemma3ForCausalLM, expected a decoder of", enable(lambda: make_scored("Gemma3"), context_parallel=object())),
    ("context_parallel: got a GPT2LMHeadModel, expected a decoder of", enable(lambda: make_scored("GPT2"), context_parallel=object())),
    ("context_parallel: got layers .* without scores",
     enable(lambda: make_scored("Qwen3", sliding_window=6, **MIXED), context_parallel=object())),
    ("context_parallel: got a DogeForSequenceClassification, which reads one token",
     lambda: ModelOfPieces([DogeForSequenceClassification(make_config("Doge"))], None)),
    ("context_parallel: got attention layers without their decoder", lambda: ModelOfPieces([], None)),
    # Eager attention ignores these keywords.
    *((f"^{name}: got", call_doge(**{name: value})) for name, value in (
        ("softcapp", 3.0), ("attention_window", 8), ("sliding_window", 3), ("is_causal", False), ("s_aux", torch.zeros(4)), (CACHE, object()),
        ("cu_seq_lens_q", torch.tensor([0, 4, 9])))),
    # transformers would hide the tokens and show the padding.
    ("attention_mask: got torch.float32 .* with negative numbers", call_doge(attention_mask=torch.tensor([[LOWEST] * 4 + [0.0] * 5]))),
    # Caches of slots.
    ("config.sliding_window: got 16, expected None: a key that leaves the window", slots_of(doge(sliding_window=16))),
    ("static: got 'no', expected True or False", slots_of(doge(), static="no")),
    ("config: got DogeForCausalLM", slots_of(make_model)),
    ("LlamaConfig without keep_window_size, expected", slots_of(llama())),
    ("without keep_window_size", slots_of(llama(score_threshold=0.5))),
    ("config.keep_window_size: got 0, expected 1 or more", slots_of(llama(keep_window_size=0))),
    ("chunk: got 0, expected places", lambda: slots_of(doge(), static=True, chunk=0)().activate_past_recording()),
    *(("scores: got none.*enable_flash_dmattn", write_with_slots(family)) for family in ("Doge", "Llama")),
    (f"{CACHE}: got torch.float32 .* dtype=torch.bfloat16", float32_slots_on_gpu),
]  # fmt: skip


@pytest.mark.parametrize(("words", "call"), CALLS_OF_MODELS)
def test_bad_call_of_a_model_raises_naming_the_argument(words, call):
    with pytest.raises(ERRORS, match=words):
        call()


# ---- A cache of slots that holds a text ----------------------------------------------------------------

TEXT = 20


def read(tokens=1, rows=B, mask=None, **options):
    ids = make_ids(rows, tokens) % VOCABULARY
    return lambda model, cache: model(ids, attention_mask=mask, past_key_values=cache, **options)


def read_in_bfloat16(tokens):
    def call(model, cache):
        with torch.autocast("cpu", torch.bfloat16):
            read(tokens)(model, cache)

    return call


def forget(tokens):
    return lambda model, cache: cache.crop(TEXT - tokens if IS_TRANSFORMERS_4 else -tokens)


def read_into(window=WINDOW, **options):
    other = slots_of(doge(window=window, **options))
    return lambda model, cache: read(3)(model, other())


STATIC, IN_16_BITS = (
    {"static": True},
    f"^{CACHE}: got tokens in torch.bfloat16, expected torch.float32, in which its first",
)
CALLS_ON_SLOTS = [  # words, options of the cache, call
    (f"^{CACHE}: got tokens of 3 rows, expected 2", {}, read(2, rows=3)),
    *((IN_16_BITS, options, read_in_bfloat16(tokens)) for options in ({}, STATIC) for tokens in (1, 4)),
    (r"got 5 tokens at a time .* DynamicMaskCache\(chunk=...\)", {"static": True, "chunk": 0}, read(5)),
    ("static: got True", STATIC, lambda model, cache: cache.offload(0)),
    ("Call activate_past_recording", {}, forget(3)),
    (f"got -100, expected -{TEXT} or more: the text has", {}, lambda model, cache: cache.crop(-100)),
    *([] if IS_TRANSFORMERS_4 else [("got 3, expected 0 or less", {}, lambda model, cache: cache.crop(3))]),
    ("got keep_window_size 10 in layer 0, expected 9", {}, read_into(WINDOW + 1)),
    (f"^{CACHE}: got 2 layers, expected more than 2", {}, read_into(num_hidden_layers=2)),
    # No mask over queries and keys describes slots that differ from head to head.
    (r"^attention_mask: got torch.bool of shape \(2, 1, 3, 23\)", {}, read(3, mask=torch.ones(B, 1, 3, TEXT + 3).bool())),
    ("^attention_mask: got torch.int32", {}, read(3, mask=intervals_of_documents(torch.tensor([[0, 0, 1]] * B)))),
]  # fmt: skip
SHORT_MASKS = [torch.ones(B, length, dtype=torch.long) for length in (1, TEXT - 1)]


@pytest.mark.parametrize(
    ("words", "options", "call", "family"),
    [
        *((*row, "Doge") for row in CALLS_ON_SLOTS),
        *(
            (f"^attention_mask: got .*expected {TEXT + 1}", {}, read(mask=mask), family)
            for family in ("Doge", "Llama")
            for mask in SHORT_MASKS
        ),
        (IN_16_BITS, {}, read_in_bfloat16(1), "late"),
        ("^query: got a tensor that requires a gradient", {}, torch.enable_grad()(read()), "late"),
    ],
)
@torch.no_grad()
def test_bad_call_with_a_cache_raises_and_leaves_the_cache(words, options, call, family):
    is_doge = family == "Doge"
    model = enable_flash_dmattn(make_model()) if is_doge else make_scored(rule="window")
    if family == "late":
        model = add_learned_scores(make_base(), keep_window_size=4, recent_window=3, late=True)
    cache = DynamicMaskCache(model.config, **options)
    read(TEXT)(model, cache)
    untouched = copy.deepcopy(cache)
    with pytest.raises(ERRORS, match=words):
        call(model, cache)
    assert int(cache.get_seq_length()) == TEXT
    tensors = [cache.layers[0].slots.tensors, untouched.layers[0].slots.tensors]
    assert all(map(torch.equal, *tensors))
    logits = [read()(model, c).logits for c in (cache, untouched)]
    assert torch.equal(*logits)
