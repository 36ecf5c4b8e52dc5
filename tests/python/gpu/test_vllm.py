"""Tests vLLM with the plugin on a GPU, where CUDA graphs replay decoding steps.
tests/python/integrations/test_vllm.py runs on a CPU."""

import pytest
import torch

from vllm_engine import served  # isort: skip: the first, as it skips without vLLM
from transformers import DogeForCausalLM, LlamaForCausalLM
from vllm import SamplingParams

import flash_dmattn.integrations.vllm.slots as slots
from doge_generation import (
    VOCABULARY,
    brute_force_of,
    greedy_tokens_by_prompt,
    keep_recent_of_equal_scores,
    make_model,
)
from flash_dmattn.integrations.transformers import divide_budget, load_scores, set_key_budgets
from scored_models import make_scored

WINDOW, NEW = 64, 24
LENGTHS = (1, 5, 40, 2, WINDOW, WINDOW + 1, 200, 1, 17, 300)
SIZES = {"hidden_size": 256, "intermediate_size": 384, "max_position_embeddings": 1024}
GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
OPTIONS = {
    "dtype": "bfloat16", "max_model_len": 512, "max_num_batched_tokens": 96, "gpu_memory_utilization": 0.15, "kv_cache_memory_bytes": 2**30,
}  # fmt: skip


@pytest.fixture(autouse=True)
def inductor_may_measure():
    """Lets inductor time its variants, which it refuses to do while algorithms are deterministic."""
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(before, warn_only=warn_only)


def prompts_of(lengths):
    return [torch.randint(3, VOCABULARY, (length,)).tolist() for length in lengths]


def mean_gap(exact, prompts, answers):
    """Returns the mean gap between the best logit of `exact` and the logit of the generated token, given the tokens before it."""
    gaps = []
    for prompt, tokens in zip(prompts, answers, strict=True):
        assert len(tokens) == NEW
        ids = torch.tensor([prompt + tokens], device="cuda")
        with torch.no_grad():
            logits = exact(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        gaps.append(logits.amax(1) - logits.gather(1, ids[0, len(prompt) :, None])[:, 0])
    return torch.cat(gaps).mean().item()


def save_doge(folder):
    """Saves a Doge in bf16. Returns a function from a dtype to the model with eager attention."""
    model = make_model(WINDOW, **SIZES)
    for layer in model.model.layers:
        layer.self_attn.A.data /= 8  # scores are at most 120, not 2e15
    model.to(torch.bfloat16).save_pretrained(folder)

    def load(dtype):
        model = DogeForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
        if dtype == torch.float32:
            return brute_force_of(model)
        keep_recent_of_equal_scores(model)
        return model

    return load


def save_llama(folder):
    """Saves a Llama in bf16 with a number of keys for each head. Returns a function from a dtype to the model."""
    model = make_scored(vocab_size=VOCABULARY, num_hidden_layers=3, head_dim=64, **SIZES)
    texts = torch.tensor(prompts_of((300,) * 6))
    set_key_budgets(model, divide_budget(model, texts, mean_keys=WINDOW, progress=False))
    model.to(torch.bfloat16).save_pretrained(folder)
    return lambda dtype: load_scores(LlamaForCausalLM.from_pretrained(folder, dtype=dtype), folder)


SAVED = {"DogeForCausalLM": save_doge, "ScoredLlamaForCausalLM": save_llama}  # by vLLM's class


@pytest.fixture(scope="module", params=SAVED)
def saved(request, tmp_path_factory):
    """Returns vLLM's options for a saved model in bf16, the exact model, and a function from prompts to a bound on the gap.

    The bound comes from transformers in bf16, where keys with nearly equal scores also change places.
    """
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    load = SAVED[request.param](folder)
    options = OPTIONS | {"folder": folder, "hf_overrides": {"architectures": [request.param]}}
    # The frequencies of RoPE became bf16, too, so the model is loaded again.
    rounded, exact = (load(dtype).to("cuda") for dtype in (torch.bfloat16, torch.float32))
    alone = greedy_tokens_by_prompt(rounded, NEW)
    return options, exact, lambda prompts: 3 * mean_gap(exact, prompts, map(alone, prompts)) + 0.01


def ask(llm, prompts):
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    results = llm.generate(inputs, GREEDY, use_tqdm=False)
    return [list(result.outputs[0].token_ids) for result in results]


@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "graphs"])
def test_tokens_equal_transformers_within_rounding(saved, monkeypatch, enforce_eager):
    options, exact, bound = saved
    prompts = prompts_of(LENGTHS)
    most = bound(prompts)
    steps = []
    extend = slots.extend_ragged

    def counted(pool, batch, query, *args, **named):
        steps.append(len(query))
        return extend(pool, batch, query, *args, **named)

    monkeypatch.setattr(slots, "extend_ragged", counted)
    with served(enforce_eager=enforce_eager, num_gpu_blocks_override=24, **options) as llm:
        assert mean_gap(exact, prompts, ask(llm, prompts)) < most
        # Three requests use the graph for four, whose last row is empty. The graph is replayed, so Python calls no operator.
        steps.clear()
        three = prompts[2:5]
        assert mean_gap(exact, three, ask(llm, three)) < most
    assert any(tokens <= 4 for tokens in steps) == enforce_eager


def test_cached_prefixes_continue_within_rounding(saved):
    options, exact, bound = saved
    shared = prompts_of((200,))[0]
    prompts = [shared + prompt for prompt in prompts_of((3, 16, 29, 40))]
    most = bound(prompts)
    options = options | {"enable_prefix_caching": True, "block_size": 16}
    with served(enforce_eager=False, num_gpu_blocks_override=64, **options) as llm:
        for _ in range(2):
            assert mean_gap(exact, prompts, ask(llm, prompts)) < most
        results = llm.generate([{"prompt_token_ids": p} for p in prompts], GREEDY, use_tqdm=False)
    assert [result.num_cached_tokens for result in results] == [192, 208, 224, 224]
