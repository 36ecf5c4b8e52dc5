"""Tests vLLM with the plugin on a GPU, where CUDA graphs replay decoding steps.
tests/python/integrations/test_vllm.py runs on a CPU."""

import pytest
import torch

from vllm_engine import served  # isort: skip: the first, as it skips without vLLM
from transformers import DogeForCausalLM
from vllm import SamplingParams

import flash_dmattn.integrations.vllm.slots as slots
from doge_generation import VOCABULARY, brute_force_of, make_model

WINDOW, NEW = 64, 24
LENGTHS = (1, 5, 40, 2, WINDOW, WINDOW + 1, 200, 1, 17, 300)
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


@pytest.fixture(scope="module")
def doge(tmp_path_factory):
    """Returns a folder with a Doge in bf16, the model with eager attention in float32, prompts, and a bound on the gap.

    The bound comes from eager attention in bf16, in which keys with nearly equal scores also change places.
    """
    torch.manual_seed(0)
    model = make_model(WINDOW, hidden_size=256, intermediate_size=384, max_position_embeddings=1024)
    folder = tmp_path_factory.mktemp("doge")
    # The frequencies of RoPE become bf16, too, so the model is loaded again.
    model.to(torch.bfloat16).save_pretrained(folder)
    eager, exact = (
        brute_force_of(DogeForCausalLM.from_pretrained(folder, dtype=dtype)).to("cuda")
        for dtype in (torch.bfloat16, torch.float32)
    )
    prompts, answers = prompts_of(LENGTHS), []
    for prompt in prompts:
        ids = torch.tensor([prompt], device="cuda")
        out = eager.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW
        )
        answers.append(out[0, len(prompt) :].tolist())
    return folder, exact, prompts, 3 * mean_gap(exact, prompts, answers) + 0.01


def ask(llm, prompts):
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    results = llm.generate(inputs, GREEDY, use_tqdm=False)
    return [list(result.outputs[0].token_ids) for result in results]


@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "graphs"])
def test_tokens_equal_eager_attention_within_rounding(doge, monkeypatch, enforce_eager):
    folder, exact, prompts, most = doge
    steps = []
    extend = slots.extend_ragged

    def counted(pool, batch, query, *args, **options):
        steps.append(len(query))
        return extend(pool, batch, query, *args, **options)

    monkeypatch.setattr(slots, "extend_ragged", counted)
    with served(folder, enforce_eager=enforce_eager, num_gpu_blocks_override=24, **OPTIONS) as llm:
        assert mean_gap(exact, prompts, ask(llm, prompts)) < most
        # Three requests use the graph for four, whose last row is empty. The graph is replayed, so Python calls no operator.
        steps.clear()
        three = prompts[2:5]
        assert mean_gap(exact, three, ask(llm, three)) < most
    assert any(tokens <= 4 for tokens in steps) == enforce_eager
