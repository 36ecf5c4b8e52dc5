"""Learned scores belong to one model: its parameters, files and copies include them, and PEFT, FSDP2, checkpointing and
torch.compile work on it."""

import copy
import io
import math

import pytest
import torch
import torch.distributed as dist
import transformers
from transformers import StaticCache

from flash_dmattn.integrations.transformers import (
    DynamicMaskCache,
    add_learned_scores,
    load_scores,
    remove_learned_scores,
    save_scores,
)
from processes import run_in_processes
from scored_models import RULES, make_base, make_config, make_ids, make_scored, spread_scores
from transformers_version import IS_TRANSFORMERS_4

pytestmark = pytest.mark.transformers
# transformers 4 treats lengths as constants when it builds the causal mask.
since_transformers_5 = pytest.mark.skipif(
    IS_TRANSFORMERS_4, reason="transformers 4 makes its masks for one length"
)


def loss_and_gradients(model, ids, **inputs):
    loss = model(ids, labels=ids, use_cache=False, **inputs).loss
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [loss, *torch.autograd.grad(loss, parameters, allow_unused=True)]


# ---- Copies and files -------------------------------------------------------------------------------


def test_another_model_of_the_same_config_stays_as_it_is():
    config = make_config("Llama")
    first, second = (transformers.LlamaForCausalLM(config).eval() for _ in range(2))
    expected = second(make_ids()).logits
    add_learned_scores(first, keep_window_size=3)
    assert torch.equal(second(make_ids()).logits, expected)
    assert not hasattr(config, "learned_scores")


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copied_model_shares_no_scores(way):
    model, ids = make_scored(), make_ids()
    expected = model(ids).logits
    if way == "deepcopy":
        other = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert torch.equal(other(ids).logits, expected)
    other.set_score_phase("off")
    assert torch.equal(model(ids).logits, expected)
    assert not torch.equal(other(ids).logits, expected)


def first_channel(hidden, key, value):
    return key[..., 0]


@pytest.mark.parametrize("scorer", ["hidden", "mlp", "value", "key_norm", first_channel])
def test_saved_scores_are_loaded(scorer, tmp_path):
    model, ids = make_scored(scorer=scorer), make_ids()
    save_scores(model, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "learned_scores.json", "learned_scores.safetensors"
    }  # fmt: skip
    other = load_scores(make_base(), tmp_path, scorer if callable(scorer) else None)
    assert torch.equal(other(ids).logits, model(ids).logits)
    assert other.config.learned_scores == model.config.learned_scores


@pytest.mark.parametrize("threshold", [None, -math.inf, math.inf])
def test_saved_model_keeps_its_scores(threshold, tmp_path):
    rule, ids = RULES["all"] | {"score_threshold": threshold}, make_ids()
    model = spread_scores(add_learned_scores(make_base("Gemma3"), **rule))
    model.model.head = torch.nn.ModuleDict({"scorer": torch.nn.Linear(2, 2)})  # of the base model
    model.save_pretrained(tmp_path, max_shard_size=100)  # a file for each tensor
    other = load_scores(type(model).from_pretrained(tmp_path), tmp_path).eval()
    assert torch.equal(other(ids).logits, model(ids).logits)


def test_loading_a_scored_folder_without_its_scores_warns(tmp_path):
    make_scored().save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="attends to all keys until load_scores"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_removed_scores_leave_nothing_in_the_model():
    model = make_base()
    before = {name: sorted(vars(module)) for name, module in model.named_modules()}
    remove_learned_scores(add_learned_scores(model, keep_window_size=3))
    assert {name: sorted(vars(module)) for name, module in model.named_modules()} == before


# ---- Training ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["soft", "hard"])
def test_checkpointed_layers_have_the_same_gradients(phase):
    model, ids = make_scored().train().set_score_phase(phase), make_ids()
    expected = loss_and_gradients(model, ids)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.testing.assert_close(loss_and_gradients(model, ids), expected)


@pytest.mark.parametrize(
    ("phase", "scorer"), [("soft", "hidden"), ("hard", "mlp"), ("hard", "value")]
)
def test_bf16_models_have_float32_scores(phase, scorer):
    model, ids = make_scored(scorer=scorer, torch_dtype=torch.bfloat16).bfloat16(), make_ids()
    model.set_score_phase(phase)
    seen = []
    layer = model.model.layers[0].self_attn
    layer.scorer.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    loss = model(ids, labels=ids).loss
    loss.backward()
    assert seen == [torch.float32]
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_peft_trains_adapters_and_scorers():
    peft = pytest.importorskip("peft")
    model, ids = make_scored(), make_ids()
    expected = model(ids).logits
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], modules_to_save=["scorer"])
    adapted = peft.get_peft_model(model, config)
    torch.testing.assert_close(adapted(ids).logits, expected)
    trained = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert {"lora" in name or "scorer" in name for name in trained} == {True}
    adapted.set_score_phase("soft")
    adapted(ids, labels=ids).loss.backward()
    scorers = [p.grad for n, p in adapted.named_parameters() if "scorer" in n and p.requires_grad]
    assert scorers and all(gradient.any() for gradient in scorers)


def test_adapter_files_hold_the_scores(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["scorer"])
    adapted = peft.get_peft_model(make_scored(), config)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3)
    adapted.save_pretrained(tmp_path)
    fresh = add_learned_scores(make_base(), **RULES["all"])
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path).eval()
    ids, mask = make_ids(), torch.ones(2, 21, dtype=torch.long)
    torch.testing.assert_close(loaded(ids).logits, adapted.eval()(ids).logits)
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    with torch.no_grad():
        written = loaded.generate(ids, **options, past_key_values=DynamicMaskCache(fresh.config))
        assert torch.equal(written, adapted.generate(ids, **options))


def test_scores_of_an_adapted_model_are_saved_for_any_model(tmp_path):
    """The files have the scores that the adapter trains, not the earlier ones that PEFT keeps."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["scorer"])
    adapted, ids = peft.get_peft_model(make_scored(), config), make_ids()
    before = adapted(ids).logits
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad and "scorer" in name:
                parameter.normal_()
    save_scores(adapted, tmp_path)
    expected = adapted(ids).logits
    assert not torch.allclose(expected, before)
    torch.testing.assert_close(load_scores(make_base(), tmp_path)(ids).logits, expected)
    again = peft.get_peft_model(make_scored(), config)
    torch.testing.assert_close(load_scores(again, tmp_path)(ids).logits, expected)


def test_scores_are_added_to_an_adapted_model():
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(make_base(), peft.LoraConfig(target_modules=["q_proj"]))
    expected = adapted(make_ids()).logits
    add_learned_scores(adapted, **RULES["all"]).set_score_phase("soft")
    torch.testing.assert_close(adapted(make_ids()).logits, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("scorer", ["hidden", "mlp", "value"])
def test_adapters_of_all_linear_layers_reach_the_scorer(scorer):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    adapted = peft.get_peft_model(make_scored(scorer=scorer).set_score_phase("soft"), config)
    ids, before = make_ids(), None
    adapters = [p for name, p in adapted.named_parameters() if "lora" in name and "scorer" in name]
    for _ in range(2):
        loss = adapted(input_ids=ids, labels=ids, use_cache=False).loss
        gradients = torch.autograd.grad(loss, adapters)  # raises for one that has no effect
        assert all(gradient.abs().max() > 0 for gradient in gradients) and loss != before
        with torch.no_grad():
            before = loss
            for adapter in adapters:
                adapter.mul_(2)


@pytest.mark.skipif(IS_TRANSFORMERS_4, reason="transformers 4 reads no layer onto the disk")
@pytest.mark.parametrize("scorer", ["hidden", "mlp", "value"])
def test_offloaded_models_keep_their_scores(scorer, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model, ids = make_scored(scorer=scorer), make_ids()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        on_disk = type(model).from_pretrained(
            tmp_path, device_map={"": "disk"}, offload_folder=tmp_path / "offload",
            attn_implementation="eager",
        )  # fmt: skip
        loaded = load_scores(on_disk, tmp_path)
        torch.testing.assert_close(loaded(ids, use_cache=False).logits, expected)
        offloaded = accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        torch.testing.assert_close(offloaded(ids, use_cache=False).logits, expected)
    for call in (load_scores, save_scores):
        with pytest.raises(ValueError, match="^model: got a scorer in layer 0 that is offloaded"):
            call(offloaded, tmp_path)


INPUTS = {
    "no_mask": {},
    "padding": {"attention_mask": torch.tensor([[0] * 4 + [1] * 17, [1] * 21])},
    "packed": {"position_ids": torch.cat([torch.arange(13), torch.arange(8)])[None]},
}


# A layer takes seconds to compile, so models have one; a Gemma needs a second one for its windows. In the soft phase the masks
# that transformers makes would work, too. Prompts below are compiled without a mask.
COMPILED = [
    ("Llama", "padding", "soft", "eager"),
    ("Gemma2", "packed", "hard", "aot_eager_decomp_partition"),
]


@since_transformers_5
@pytest.mark.parametrize(("family", "name", "phase", "backend"), COMPILED)
def test_compiled_model_is_one_graph(family, name, phase, backend):
    torch._dynamo.reset()
    layers = 1 if family == "Llama" else 2
    model, ids = make_scored(family, num_hidden_layers=layers).set_score_phase(phase), make_ids()
    expected = loss_and_gradients(model, ids, **INPUTS[name])
    model.compile(fullgraph=True, backend=backend)
    results = loss_and_gradients(model, ids, **INPUTS[name])
    torch.testing.assert_close(results, expected, rtol=1e-4, atol=1e-6)


def opt():
    """Makes an OPT, which passes no positions to its mask and derives missing positions from the padding."""
    config = transformers.OPTConfig(
        vocab_size=64, hidden_size=32, ffn_dim=32, num_hidden_layers=1, num_attention_heads=2, word_embed_proj_dim=32,
        max_position_embeddings=64,
    )  # fmt: skip
    return transformers.OPTForCausalLM(config)


def qwen2_vl():
    """Makes a Qwen2-VL, which has three axes of positions and passes none of them to its mask."""
    config = transformers.Qwen2VLTextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    )  # fmt: skip
    return transformers.Qwen2VLTextModel(config)


@since_transformers_5
@pytest.mark.parametrize("make", [opt, qwen2_vl])
def test_compiled_decoder_with_mask_without_positions_sees_one_text(make):
    """transformers itself also treats a row with several positions 0 as one text there."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    model, ids = make().eval(), torch.randint(3, 64, (1, 21))
    expected = model(ids, use_cache=False, **INPUTS["packed"])[0]
    add_learned_scores(model, keep_window_size=21)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    out = compiled(ids, use_cache=False, **INPUTS["packed"])[0]
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@since_transformers_5
def test_removing_scores_from_compiled_model_restores_its_bits():
    torch._dynamo.reset()
    model, ids = make_base(num_hidden_layers=1), make_ids()
    expected = model(ids, use_cache=False).logits
    add_learned_scores(model, **RULES["all"])
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    compiled(ids, use_cache=False)
    remove_learned_scores(compiled)
    assert torch.equal(compiled(ids, use_cache=False).logits, expected)
    assert not hasattr(model, "set_score_phase") and not hasattr(compiled, "set_score_phase")


@since_transformers_5
def test_compiled_prompt_fills_a_cache_like_an_uncompiled_one():
    torch._dynamo.reset()
    model, ids = make_scored(num_hidden_layers=1), make_ids()
    logits = []
    with torch.no_grad():
        for prompt in (model, torch.compile(model, fullgraph=True, backend="eager")):
            out = prompt(ids, use_cache=True)
            step = model(ids[:, :1], past_key_values=out.past_key_values)
            logits.append([out.logits, step.logits])
    torch.testing.assert_close(logits[1], logits[0])


@since_transformers_5
@pytest.mark.parametrize("dense", [False, True])
def test_compiled_prompts_of_a_static_cache_equal_uncompiled_ones(dense):
    """The cache has memory before its first tokens, as in `generate` with prefill_chunk_size on a GPU, and gets a second text."""
    torch._dynamo.reset()
    model = add_learned_scores(make_base(num_hidden_layers=1), **RULES["all"], dense_prefill=dense)
    spread_scores(model).requires_grad_(False)
    logits = []
    for compiled in (False, True):
        cache, logits = StaticCache(config=model.config, max_cache_len=24), [*logits, []]
        cache.early_initialization(2, 2, 8, torch.float32, torch.device("cpu"))
        for ids, whole in zip(make_ids(42).split(21, 1), (False, True), strict=True):
            prompt = torch.compile(model, fullgraph=whole, backend="eager") if compiled else model
            parts = ids.split([15, 3, 3], 1)
            logits[-1] += [prompt(part, past_key_values=cache).logits for part in parts]
            cache.reset()
    torch.testing.assert_close(logits[1], logits[0])


@since_transformers_5
def test_compiled_keys_without_scores_raise():
    torch._dynamo.reset()
    model, ids = make_scored(num_hidden_layers=1).requires_grad_(False), make_ids()
    cache = StaticCache(config=model.config, max_cache_len=24)
    make_base(num_hidden_layers=1)(ids[:, :9], past_key_values=cache)
    with pytest.raises(ValueError, match="got keys without scores in layer 0"):
        torch.compile(model, backend="eager")(ids[:, 9:], past_key_values=cache)


@pytest.mark.parametrize("compiled", [False, True])
def test_documents_of_a_dense_mask_equal_those_of_positions(compiled):
    """Compiled code cannot turn such a mask into intervals."""
    torch._dynamo.reset()
    model, ids = make_scored(num_hidden_layers=1).set_score_phase("soft"), make_ids()
    positions = INPUTS["packed"]["position_ids"]
    documents = (positions == 0).cumsum(1)
    mask = (documents[..., None] == documents[:, None]).tril()[:, None].expand(2, -1, -1, -1)
    expected = model(ids, use_cache=False, position_ids=positions).logits
    if compiled:
        model = torch.compile(model, fullgraph=True, backend="eager")
    logits = model(ids, use_cache=False, position_ids=positions, attention_mask=mask).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


@since_transformers_5
@pytest.mark.parametrize("kind", ["all_keys", "slots"])
def test_compiled_step_of_a_static_cache_is_one_graph(kind):
    torch._dynamo.reset()
    model, ids = make_scored(num_hidden_layers=1).requires_grad_(False), make_ids(12)
    logits = []
    for compiled in (False, True):
        if kind == "slots":
            cache = DynamicMaskCache(model.config, static=True)
        else:
            cache = transformers.StaticCache(config=model.config, max_cache_len=16)
        with torch.no_grad():
            model(ids[:, :9], past_key_values=cache)
            step = torch.compile(model, fullgraph=True, backend="eager") if compiled else model
            logits.append(
                [step(ids[:, i : i + 1], past_key_values=cache).logits for i in (9, 10, 11)]
            )
    torch.testing.assert_close(logits[1], logits[0])


def _compare_sharded(rank, folder):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DeviceMesh, DTensor

    ids = make_ids(batch=4)
    mesh = DeviceMesh("cpu", [0, 1])
    for phase in ("soft", "hard"):
        model = make_scored().set_score_phase(phase)
        model(ids, labels=ids).loss.backward()
        expected = {name: p.grad for name, p in model.named_parameters()}
        sharded = make_scored().set_score_phase(phase)
        for layer in sharded.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        save_scores(sharded, folder)
        saved = load_scores(make_base(), folder)
        mine = ids[2 * rank : 2 * rank + 2]
        sharded(mine, labels=mine).loss.backward()
        base_parameters = dict(make_scored().named_parameters())
        for name, parameter in saved.named_parameters():
            torch.testing.assert_close(parameter, base_parameters[name])
        for name, parameter in sharded.named_parameters():
            gradient = parameter.grad
            whole_gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            torch.testing.assert_close(whole_gradient, expected[name], rtol=1e-4, atol=1e-6)
        with pytest.raises(ValueError, match="with learned scores, expected one without"):
            add_learned_scores(sharded, keep_window_size=3)


def _save_on_one_rank(rank, folder):
    if rank == 1:
        save_scores(make_scored(), folder)
        load_scores(make_base(), folder)


@pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
def test_one_rank_alone_saves_scores(tmp_path):
    run_in_processes(2, _save_on_one_rank, str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
def test_sharded_model_has_the_gradients_and_files_of_one_process(tmp_path):
    run_in_processes(2, _compare_sharded, str(tmp_path))
