"""Generation with a cache of w keys equals eager attention over all keys, in every token and in logits within rounding."""

import copy

import pytest
import torch
import transformers

from doge_generation import (
    VOCABULARY,
    WINDOW,
    RepeatsOfThree,
    assert_same_generation,
    left_padding,
    make_ids,
    make_pair,
)
from flash_dmattn.integrations.transformers import DynamicMaskCache, enable_flash_dmattn
from gpu import devices
from transformers_version import IS_TRANSFORMERS_4, recording, within_limit

pytestmark = pytest.mark.transformers

B, S = 2, 40
WAYS = {
    "greedy": {},
    "samples": {"do_sample": True, "temperature": 1.3, "top_k": 50, "num_return_sequences": 3},
    "beams": {"num_beams": 3},
    "chunks": {"prefill_chunk_size": 7},
    "chunks_of_one": {"prefill_chunk_size": 1},
    "large_chunks": {"prefill_chunk_size": 25},
}


# With 33 tokens of padding the prompt is shorter than the window. The second row has no padding.
@pytest.mark.parametrize(
    ("way", "pad"), [("greedy", 13), ("greedy", 0), ("beams", 0), *((way, 33) for way in WAYS)]
)
def test_each_generation_mode_gives_tokens_of_full_cache(way, pad):
    oracle, ours = make_pair()
    caches = [DynamicMaskCache(ours.config, static=static) for static in (True, False)]
    assert_same_generation(
        oracle,
        ours,
        make_ids(),
        *caches,
        attention_mask=left_padding(B, S, pad),
        **WAYS[way],
    )
    assert caches[1].layers[1].keys.shape[2] == WINDOW


@pytest.mark.parametrize(
    ("length", "window"),
    [*((n, WINDOW) for n in (1, WINDOW - 1, WINDOW, WINDOW + 1)), (S, 1), (S, 300)],
)
def test_prompts_and_windows_of_any_length_give_same_tokens(length, window):
    oracle, ours = make_pair(window=window)
    # Greedy texts repeat one word. If all keys are equal, their scores tie up to rounding in all layers.
    cache = DynamicMaskCache(ours.config)
    assert_same_generation(oracle, ours, make_ids(B, length), cache, do_sample=True)


def test_prompt_without_mask_gives_same_tokens():
    oracle, ours = make_pair()
    cache = DynamicMaskCache(ours.config)
    assert_same_generation(oracle, ours, make_ids(1, S), cache, attention_mask=None)


def pair_on(device, **options):
    """Returns (oracle, ours) on a device. On a GPU both are ours in bf16, with sizes that the kernels support."""
    if device == "cpu":
        return make_pair(**options)
    sizes = {"window": 64, "hidden_size": 256, "intermediate_size": 512}
    ours = make_pair(**{"max_position_embeddings": 4096, **sizes} | options)[1].bfloat16().cuda()
    return ours, ours


@devices
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("length", [6, S, 120])
def test_prompt_lookup_gives_greedy_tokens(length, static, device):
    """Some guesses are accepted, some dropped; `crop` follows every step."""
    if static and IS_TRANSFORMERS_4:
        pytest.skip("transformers 4 refuses assisted generation for every static cache")
    oracle, ours = pair_on(device)
    ids, options = make_ids(1, length).to(device), {"logits_processor": [RepeatsOfThree()]}
    options["eos_token_id"] = 0  # transformers 4 needs one
    ids = torch.cat([ids, ids[:, 2:4]], dim=1)
    cache = recording(DynamicMaskCache(ours.config, static=static))
    expected = oracle.generate(ids, max_new_tokens=40, do_sample=False, **options)
    calls = []
    ours.register_forward_pre_hook(lambda *_: calls.append(1))
    actual = ours.generate(
        ids, max_new_tokens=40, do_sample=False, past_key_values=cache,
        prompt_lookup_num_tokens=5, max_matching_ngram_size=2, **options,
    )  # fmt: skip
    assert cache.get_seq_length() == actual.shape[1] - 1
    assert len(calls) < actual.shape[1] - ids.shape[1]  # some guesses were accepted
    if device == "cuda":  # a token differs where two logits nearly tie
        actual, expected = (tokens[:, : ids.shape[1] + 13] for tokens in (actual, expected))
    assert torch.equal(within_limit(actual, expected.shape[1]), expected)


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_assistant_model_gives_greedy_tokens(noise):
    """The assistant keeps its own cache over several steps, and drops tokens that were not accepted."""
    oracle, ours = make_pair()
    _, assistant = make_pair()
    assistant.load_state_dict(ours.state_dict())
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    enable_flash_dmattn(assistant, cache="dynamic_mask")
    cache = recording(DynamicMaskCache(ours.config))
    assert_same_generation(oracle, ours, make_ids(1, S), cache, assistant_model=assistant)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("pad", [0, 13])
def test_chat_turns_give_tokens_of_one_text(pad, static):
    """Each turn continues the cache of the previous one, with many tokens, then one token, then many again."""
    oracle, ours = make_pair()
    caches = [transformers.DynamicCache(), DynamicMaskCache(ours.config, static=static)]
    models, texts = (oracle, ours), [make_ids(B, S)] * 2
    mask = left_padding(B, S, pad)
    for turn, length in enumerate((11, 1, 30)):
        for i, model in enumerate(models):
            rows = torch.nn.functional.pad(mask, (0, texts[i].shape[1] - mask.shape[1]), value=1)
            texts[i] = model.generate(
                texts[i], attention_mask=rows, past_key_values=caches[i], max_new_tokens=8,
                do_sample=False,
            )  # fmt: skip
        assert torch.equal(*texts)
        if not static:
            assert caches[0].get_seq_length() == caches[1].get_seq_length()
        said = make_ids(B, length, seed=turn + 1)
        texts = [torch.cat([text, said], dim=1) for text in texts]


def test_enabled_model_uses_dynamic_mask_cache():
    oracle, ours = make_pair()
    enable_flash_dmattn(ours, cache="dynamic_mask")
    ids = make_ids(B, S)
    result = assert_same_generation(oracle, ours, ids)
    assert isinstance(result.past_key_values, DynamicMaskCache)
    with torch.no_grad():
        assert isinstance(ours(ids).past_key_values, DynamicMaskCache)
        assert ours(ids, use_cache=False).past_key_values is None
    generated = ours.generate(ids, max_new_tokens=2, return_dict_in_generate=True, use_cache=True,
                          past_key_values=transformers.DynamicCache())  # fmt: skip
    assert not isinstance(generated.past_key_values, DynamicMaskCache)
    ours.set_attn_implementation("eager")
    with torch.no_grad():
        assert not isinstance(ours(ids).past_key_values, DynamicMaskCache)
        enable_flash_dmattn(ours)
        assert not isinstance(ours(ids).past_key_values, DynamicMaskCache)
    enable_flash_dmattn(ours, cache="dynamic_mask")
    assert len(ours.model._forward_pre_hooks) == 1


def loaded_by_name(path, model):
    """Loads the same weights with transformers under our attention's name, without enable_flash_dmattn."""
    model.save_pretrained(path)
    return transformers.DogeForCausalLM.from_pretrained(
        path, attn_implementation="flash_dmattn"
    ).eval()


@pytest.mark.filterwarnings("ignore:attn_implementation")
@pytest.mark.parametrize("way", ["greedy", "beams"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_model_loaded_by_name_generates_as_eager(kind, way, tmp_path):
    _, ours = make_pair()
    stock = loaded_by_name(tmp_path, ours)
    eager = copy.deepcopy(stock)
    eager.set_attn_implementation("eager")
    caches = {
        "dynamic": lambda: transformers.DynamicCache(config=stock.config),
        "static": lambda: transformers.StaticCache(config=stock.config, max_cache_len=S + 24),
    }
    ids, mask = make_ids(B, S), left_padding(B, S, 13)
    expected, tokens = (
        model.generate(ids, attention_mask=mask, past_key_values=caches[kind](), **WAYS[way])
        for model in (eager, stock)
    )
    assert torch.equal(tokens, expected)


@pytest.mark.filterwarnings("ignore:attn_implementation")
def test_model_loaded_by_name_has_no_scores_for_slots(tmp_path):
    stock = loaded_by_name(tmp_path, make_pair()[1])
    with pytest.raises(ValueError, match="enable_flash_dmattn"):
        stock(make_ids(B, S), past_key_values=DynamicMaskCache(stock.config))


def test_repeated_and_selected_rows_equal_full_cache():
    """Contrastive search repeats every row three times and then selects some of the copies."""
    oracle, ours = make_pair()
    caches = [transformers.DynamicCache(), DynamicMaskCache(ours.config)]
    ids, more = make_ids(B, S), make_ids(3 * B, 5, seed=1)
    last = make_ids(3, 4, seed=2)
    logits = []
    with torch.no_grad():
        for model, cache in zip((oracle, ours), caches, strict=True):
            model(ids, past_key_values=cache)
            cache.batch_repeat_interleave(3)
            steps = [model(more[:, [i]], past_key_values=cache).logits for i in range(5)]
            cache.batch_select_indices(torch.tensor([4, 0, 3]))
            steps += [model(last[:, [i]], past_key_values=cache).logits for i in range(4)]
            logits.append(torch.cat([step.flatten() for step in steps]))
    torch.testing.assert_close(logits[1], logits[0].float(), atol=2e-4, rtol=2e-4)


def test_padded_turns_equal_unpadded():
    """Some rows of a ragged batch have padding among the new tokens, which enters no cache."""
    oracle, ours = make_pair()
    caches = [transformers.DynamicCache(), DynamicMaskCache(ours.config)]
    ids = make_ids(B, 60)
    mask = torch.ones(B, 60, dtype=torch.long)
    mask[0, :9], mask[0, 30:36], mask[1, 40:59] = 0, 0, 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    parts = []
    with torch.no_grad():
        for model, cache in zip((oracle, ours), caches, strict=True):
            logits = [
                model(ids[:, a:b], attention_mask=mask[:, :b], position_ids=positions[:, a:b],
                      past_key_values=cache).logits
                for a, b in ((0, 20), (20, 32), (32, 33), (33, 34), (34, 50), (50, 60))
            ]  # fmt: skip
            parts.append(torch.cat(logits, dim=1)[mask.bool()])
    torch.testing.assert_close(parts[1], parts[0].float(), atol=2e-4, rtol=2e-4)


@devices
def test_half_a_million_tokens_hold_the_keys_of_the_window(device):
    """The cache's memory does not grow after the first tokens."""
    size = 8 if device == "cpu" else 128
    _, ours = pair_on(
        device, window=WINDOW, hidden_size=size, intermediate_size=size, num_attention_heads=2,
        num_hidden_layers=1, num_key_value_heads=1, max_position_embeddings=1 << 20,
    )  # fmt: skip
    cache, held, allocated = DynamicMaskCache(ours.config), set(), []
    with torch.no_grad():
        for _ in range(8):
            ids = torch.randint(1, VOCABULARY, (1, 1 << 16), device=device)
            ours(ids, past_key_values=cache, logits_to_keep=1)
            for token in range(3):
                ours(ids[:, [token]], past_key_values=cache)
            storages = [t.untyped_storage() for t in cache.layers[0].slots.tensors]
            held.add(sum({s.data_ptr(): s.nbytes() for s in storages}.values()))
            allocated.append(torch.cuda.memory_allocated())  # 0 without a GPU
    assert cache.get_seq_length() == (1 << 19) + 24
    key_bytes = cache.layers[0].keys[0, 0, 0].nbytes
    assert len(held) == 1 and held.pop() < 4 * WINDOW * key_bytes
    assert max(allocated) == allocated[0]
