"""Compares vLLM with the plugin with transformers' `generate` with eager attention over all keys, one prompt at a time.

`make test-vllm` runs it: vLLM has an environment of its own.
"""

import importlib.metadata
import random
from types import SimpleNamespace

import pytest
import torch

from vllm_engine import served  # isort: skip: the first, as it skips without vLLM
from vllm import SamplingParams
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import CommonAttentionMetadata

from doge_generation import VOCABULARY, WINDOW, brute_force_of, greedy_tokens_by_prompt, make_model
from flash_dmattn.integrations.serving.states import states_of
from flash_dmattn.integrations.transformers import divide_budget, save_scores, set_key_budgets

LENGTHS = (1, 5, 40, 2, WINDOW, WINDOW + 1, 70, 1, 17, 33)
NEW = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)


def prompts_of(lengths, vocabulary=VOCABULARY):
    return [torch.randint(3, vocabulary, (length,)).tolist() for length in lengths]


def ask(llm, prompts, params=GREEDY):
    """Returns the generated tokens of each prompt."""
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    results = llm.generate(inputs, params, use_tqdm=False)
    return [[list(out.token_ids) for out in result.outputs] for result in results]


def cached_tokens(llm, prompt):
    """Returns how many tokens of a prompt vLLM found in its cache."""
    (result,) = llm.generate([{"prompt_token_ids": prompt}], GREEDY, use_tqdm=False)
    return result.num_cached_tokens


def scheduler_of(llm):
    return llm.llm_engine.engine_core.engine_core.scheduler


def free_blocks(llm):
    return scheduler_of(llm).kv_cache_manager.block_pool.get_num_free_blocks()


@pytest.fixture(scope="module")
def doge(tmp_path_factory):
    """Returns a folder with a Doge, and its tokens by eager attention."""
    torch.manual_seed(0)
    model, folder = make_model(), tmp_path_factory.mktemp("doge")
    model.save_pretrained(folder)
    return SimpleNamespace(folder=folder, alone=greedy_tokens_by_prompt(brute_force_of(model), NEW))


@pytest.fixture(scope="module")
def llm(doge):
    with served(doge.folder) as llm:
        yield llm


def test_installed_package_has_the_entry_point():
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    assert "flash_dmattn.integrations.vllm:register" in {point.value for point in points}


# ---- Tokens equal generate --------------------------------------------------------------------------


def test_prompts_in_chunks_equal_generate(llm, doge):
    torch.manual_seed(1)
    prompts = prompts_of(LENGTHS)
    for prompt, (tokens,) in zip(prompts, ask(llm, prompts), strict=True):
        assert tokens == doge.alone(prompt), len(prompt)


def test_late_short_and_cancelled_requests_equal_generate(llm, doge):
    torch.manual_seed(2)
    random.seed(2)
    engine, free = llm.llm_engine, free_blocks(llm)
    prompts = prompts_of(random.choices(LENGTHS, k=20))
    waiting, tokens = list(range(len(prompts))), {}
    while waiting or engine.has_unfinished_requests():
        if waiting:
            number = waiting.pop(0)
            engine.add_request(str(number), {"prompt_token_ids": prompts[number]}, GREEDY)
            if number % 3 == 1:
                engine.abort_request([str(number - 1)])
        for result in engine.step():
            if result.finished:
                tokens[int(result.request_id)] = list(result.outputs[0].token_ids)
    kept = [number for number in range(len(prompts)) if number % 3 != 0]
    assert [tokens[number] for number in kept] == [doge.alone(prompts[number]) for number in kept]
    assert free_blocks(llm) == free


def test_preempted_requests_equal_generate(llm, doge):
    """vLLM frees the states of preempted requests and recomputes them."""
    torch.manual_seed(3)
    prompts = prompts_of((40, 3, 17, 33))
    engine, tokens, preempted = llm.llm_engine, {}, 0
    for number, prompt in enumerate(prompts):
        engine.add_request(f"p{number}", {"prompt_token_ids": prompt}, GREEDY)
    for step in range(1000):
        if not engine.has_unfinished_requests():
            break
        if step in (2, 9, 14):
            preempted += len(scheduler_of(llm).running)
            assert engine.reset_prefix_cache(reset_running_requests=True)
        for result in engine.step():
            if result.finished:
                tokens[result.request_id] = list(result.outputs[0].token_ids)
    assert preempted > 3
    assert [tokens[f"p{number}"] for number in range(4)] == [doge.alone(p) for p in prompts]


def test_forks_equal_their_prompt(llm, doge):
    torch.manual_seed(4)
    prompts = prompts_of((1, 25, 60))
    params = SamplingParams(n=3, top_k=1, max_tokens=NEW, ignore_eos=True, detokenize=False)
    for prompt, forks in zip(prompts, ask(llm, prompts, params), strict=True):
        assert forks == [doge.alone(prompt)] * 3


def test_many_finished_requests_free_every_state(llm):
    torch.manual_seed(5)
    random.seed(5)
    free = free_blocks(llm)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)
    tokens = ask(llm, prompts_of(random.choices((1, 2, 3, 11), k=1000)), params)
    assert {len(forks[0]) for forks in tokens} == {2}
    assert free_blocks(llm) == free


def test_cached_prefixes_equal_generate(doge):
    torch.manual_seed(6)
    shared = prompts_of((48,))[0]
    prompts = [shared + prompt for prompt in prompts_of((3, 16, 29, 40))]
    options = {"enable_prefix_caching": True, "block_size": 16, "num_gpu_blocks_override": 64}
    with served(doge.folder, max_num_batched_tokens=64, **options) as llm:
        for _ in range(2):
            for prompt, (tokens,) in zip(prompts, ask(llm, prompts), strict=True):
                assert tokens == doge.alone(prompt)
        again = [cached_tokens(llm, prompt) for prompt in prompts]
        beginnings = [prompts_of((60,))[0] for _ in range(2)]  # of chats, such as a system prompt
        hits = []
        for _ in range(4):
            prompt = beginnings[0] + prompts_of((40,))[0]
            hits.append(cached_tokens(llm, prompt))
            assert ask(llm, [prompt]) == [[doge.alone(prompt)]]
        other = cached_tokens(llm, beginnings[1] + prompts_of((40,))[0])
    assert again == [48, 48, 64, 80]  # the last whole block, without the last token
    assert hits == [0, 0, 48, 48] and other == 0


def test_compiled_model_equals_generate(doge):
    torch.manual_seed(7)
    prompts = prompts_of(LENGTHS)
    with served(doge.folder, enforce_eager=False) as llm:
        for prompt, (tokens,) in zip(prompts, ask(llm, prompts), strict=True):
            assert tokens == doge.alone(prompt)


def test_tensor_parallelism_equals_generate(doge, monkeypatch):
    torch.manual_seed(8)
    prompts = prompts_of(LENGTHS)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    with served(doge.folder, tensor_parallel_size=2) as llm:
        for prompt, (tokens,) in zip(prompts, ask(llm, prompts), strict=True):
            assert tokens == doge.alone(prompt)


@pytest.mark.parametrize(
    "family, scorer, saved",
    [
        ("Llama", "hidden", "by save_pretrained"),
        ("Llama", "mlp", "by both"),
        ("Mistral", "hidden", "by save_scores beside the base model"),
    ],
)
def test_learned_scores_equal_generate(tmp_path, family, scorer, saved):
    from scored_models import VOCABULARY, make_base, make_scored

    torch.manual_seed(9)
    model = make_scored(family, scorer=scorer)
    texts = torch.tensor(prompts_of((80,) * 6, VOCABULARY))
    # The states of layers differ in their sizes, or the heads of a layer have lists of equal numbers.
    least = 0.25 if scorer == "hidden" else 1
    set_key_budgets(model, divide_budget(model, texts, mean_keys=24, least=least, progress=False))
    (make_base(family) if "beside" in saved else model).save_pretrained(tmp_path)
    if saved != "by save_pretrained":
        save_scores(model, tmp_path)
    alone = greedy_tokens_by_prompt(model, NEW)
    prompts = prompts_of(LENGTHS, VOCABULARY)
    architecture = {"architectures": ["ScoredLlamaForCausalLM"]}
    with served(tmp_path, hf_overrides=architecture) as llm:
        for prompt, (tokens,) in zip(prompts, ask(llm, prompts), strict=True):
            assert tokens == alone(prompt), len(prompt)
        [cache] = (
            llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.model_runner.kv_caches
        )
        assert cache[0].nbytes == sum(s.nbytes() for s in states_of(model.config, torch.float32))


# ---- The metadata of a step -------------------------------------------------------------------------


def step_of(lengths, totals, blocks, padding):
    """Returns a step of sequences with `lengths` new tokens and `totals` tokens in all, and `padding` sequences
    that pad a CUDA graph."""
    lengths, totals = lengths + [0] * padding, totals + [0] * padding
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    return CommonAttentionMetadata(
        query_start_loc=offsets,
        query_start_loc_cpu=offsets,
        seq_lens=torch.tensor(totals, dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.tensor(totals, dtype=torch.int32),
        num_reqs=len(lengths),
        num_actual_tokens=sum(lengths),
        max_query_len=max(lengths),
        max_seq_len=max(totals),
        block_table_tensor=torch.tensor([*blocks, *[0] * padding], dtype=torch.int32)[:, None],
        slot_mapping=torch.empty(0, dtype=torch.int64),
        is_prefilling=torch.tensor(
            [n > 1 or n == t > 0 for n, t in zip(lengths, totals, strict=True)]
        ),
    )


@pytest.fixture
def builder(llm, monkeypatch):
    """Makes the metadata builder of a GPU, which captures graphs of decoding."""
    config = llm.llm_engine.vllm_config
    monkeypatch.setattr(config.compilation_config, "cudagraph_mode", CUDAGraphMode.FULL_DECODE_ONLY)
    layers = config.compilation_config.static_forward_context
    name, layer = next(iter(layers.items()))
    spec = layer.get_kv_cache_spec(config)
    return layer.get_attn_backend().get_builder_cls()(spec, [name], config, torch.device("cpu"))


def test_graph_rows_have_a_fixed_address_and_those_of_padding_are_negative(builder):
    (rows,) = (
        group.rows
        for group in builder.build(0, step_of([1] * 3, [9, 5, 7], [4, 2, 6], 1)).batch._groups
    )
    assert rows.tolist() == [4, 2, 6, -1]
    again = builder.build(0, step_of([1] * 2, [10, 6], [1, 3], 2))
    assert rows.tolist() == [1, 3, -1, -1] and again.length == 4
    captured = builder.build_for_cudagraph_capture(step_of([1] * 4, [1] * 4, [0] * 4, 0))
    assert (
        rows.tolist() == [-1] * 4 and captured.batch._groups[0].rows.data_ptr() == rows.data_ptr()
    )


def test_prompts_of_one_token_are_decoded_from_an_empty_state(builder):
    layers = builder._layers
    for layer in layers:
        layer.pool.seen[[4, 2]] = 5
    batch = builder.build(0, step_of([1, 1], [9, 1], [4, 2], 0)).batch
    assert batch._groups[0].rows.tolist() == [4, 2]
    assert all(layer.pool.seen[[4, 2]].tolist() == [5, 0] for layer in layers)
    assert not any(layer.pool.counts[2].any() for layer in layers)


def test_metadata_separates_chunks_from_decoding_tokens(builder):
    metadata = builder.build(0, step_of([1, 7, 5], [9, 17, 5], [4, 2, 6], 0))
    groups = [(g.rows.tolist(), g.tokens, g.begins) for g in metadata.batch._groups]
    assert groups == [
        ([4], slice(0, 1), False),
        ([2], slice(1, 8), False),
        ([6], slice(8, 13), True),
    ]
