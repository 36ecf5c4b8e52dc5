"""Small Doge models for tests of generation, and the brute-force models that they are compared with."""

import contextlib
import copy
import functools
from unittest import mock

import torch
from transformers import DogeConfig, DogeForCausalLM, LogitsProcessor
from transformers.models.doge.modeling_doge import DogeAttention

from flash_dmattn.integrations.transformers import doge, enable_flash_dmattn

VOCABULARY, WINDOW = 397, 9


def make_model(window=WINDOW, **options):
    """Returns a float32 model whose tokens have different scores. In the first layer equal tokens have equal scores."""
    config = DogeConfig(
        **{
            "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
            "max_position_embeddings": 512, "keep_window_size": window, "pad_token_id": 0,
            "bos_token_id": None, "eos_token_id": None, **options,
        }
    )  # fmt: skip
    model = DogeForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(".A"):
            torch.nn.init.normal_(parameter)
        elif parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.5 if "dt_proj" in name else 0.15)
    return model


def greedy_tokens_by_prompt(model, count):
    """Returns a function from a prompt to the `count` tokens that `generate` adds. It calls `generate` once per prompt."""

    @functools.cache
    def generate(prompt):
        ids = torch.tensor([prompt], device=model.device)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count
        )
        return out[0, len(prompt) :].tolist()

    return lambda prompt: generate(tuple(prompt))


def make_pair(**options):
    """Returns (brute force, ours) with the same weights."""
    model = make_model(**options)
    return brute_force_of(model), enable_flash_dmattn(model)


def brute_force_of(model):
    """Returns a copy in float64 with eager attention over all keys. It keeps the more recent of equal scores."""
    eager = copy.deepcopy(model).double()
    eager.set_attn_implementation("eager")
    keep_recent_of_equal_scores(eager)
    return eager


def keep_recent_of_equal_scores(model, scores=None):
    """Makes eager attention keep the more recent of equal scores, instead of an arbitrary one.

    scores: of each layer, by index, those that decide instead of eager's own (`recorded_scores`). Without them scores are
        equal if they differ by rounding alone: torch's products round those of equal tokens differently.
    """
    for layer in model.modules():
        if isinstance(layer, DogeAttention):
            order = None if scores is None else scores[layer.layer_idx]
            layer.prepare_dynamic_mask = functools.partial(_dynamic_mask, order)


@contextlib.contextmanager
def recorded_scores():
    """Yields a dict that gets the last scores of each layer of the enabled models that run, by the layer's index."""
    scores, compute = {}, doge.FlashDogeAttention._scores

    def watch(attention, *states):
        result = compute(attention, *states)
        scores[attention.layer_idx] = result.detach()
        return result

    with mock.patch.object(doge.FlashDogeAttention, "_scores", watch):
        yield scores


def _dynamic_mask(order, hidden_states, dt_states, keep_window_size, attention_mask):
    """Returns [B, Hkv, Sq, Sk] with the score of every key that a query keeps, and the lowest number elsewhere."""
    # Eager's softmax is float32: the lowest float64 would be -inf, and a query that sees no key NaN.
    dtype = torch.float32 if hidden_states.dtype == torch.float64 else hidden_states.dtype
    lowest = torch.finfo(dtype).min
    if order is None:
        digits = {torch.float64: 9, torch.float32: 4}.get(dt_states.dtype, 2)
        order = dt_states.round(decimals=digits)
    allowed = attention_mask[..., : dt_states.shape[-1]]
    allowed = allowed if allowed.dtype == torch.bool else allowed == 0
    order = order[:, :, None, :].expand(-1, -1, hidden_states.shape[1], -1)
    order = order.double().masked_fill(~allowed, -torch.inf)
    best_first = order.flip(-1).sort(dim=-1, descending=True, stable=True).indices
    kept = order.shape[-1] - 1 - best_first[..., :keep_window_size]
    chosen = torch.zeros_like(order, dtype=torch.bool).scatter(-1, kept, True)
    return dt_states[:, :, None, :].masked_fill(~(chosen & allowed), lowest)


def make_ids(batch=2, length=40, seed=0):
    """Returns tokens as a text has them: few words, the first of them often. Longer texts begin with the shorter ones."""
    generator = torch.Generator().manual_seed(seed)
    shares = (1 / torch.arange(1.0, 61.0)).cumsum(0)
    drawn = torch.rand(length, batch, generator=generator) * shares[-1]
    return 1 + torch.searchsorted(shares, drawn).T.contiguous()


def left_padding(batch, length, missing):
    """Returns the attention mask of a batch whose first row has `missing` tokens of left padding."""
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, :missing] = 0
    return mask


class RepeatsOfThree(LogitsProcessor):
    """Makes two of three tokens repeat what followed the last token earlier, so that prompt lookup guesses some correctly."""

    def __call__(self, input_ids, scores):
        (ids,) = input_ids.tolist()
        if len(ids) % 3 and ids[-1] in ids[:-2]:
            follower = ids[ids.index(ids[-1]) + 1]
            scores = torch.full_like(scores, float("-inf")).index_fill(
                1, torch.tensor([follower], device=scores.device), 0.0
            )
        return scores


def assert_same_generation(oracle, ours, ids, *caches, **options):
    """Compares generated tokens exactly and logits within rounding. caches: used by `ours` one after the other; `oracle` uses
    transformers' own cache."""
    options = {
        "attention_mask": torch.ones_like(ids), "max_new_tokens": 24, "do_sample": False,
        "return_dict_in_generate": True, "output_logits": True, **options,
    }  # fmt: skip

    def generate(model, **cache):
        torch.manual_seed(7)
        return model.generate(ids, **options, **cache)

    expected = generate(oracle)
    for cache in caches or (None,):
        actual = generate(ours, **({} if cache is None else {"past_key_values": cache}))
        assert torch.equal(actual.sequences, expected.sequences)
        for ours_at, theirs_at in zip(actual.logits, expected.logits, strict=True):
            torch.testing.assert_close(ours_at, theirs_at.float(), atol=2e-4, rtol=2e-4)
    return actual
