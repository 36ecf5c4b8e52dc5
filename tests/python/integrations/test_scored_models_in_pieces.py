"""A decoder with learned scores whose sequences are split over ranks has the loss and gradients of one process,
under every rule."""

import pytest
import torch
import torch.distributed as dist
import transformers
from transformers.models.llama.modeling_llama import LlamaAttention

from doge_in_pieces import VOCABULARY, compare_generation, compare_step
from flash_dmattn.integrations.transformers import (
    DynamicMaskCache,
    add_learned_scores,
    enable_flash_dmattn,
    remove_learned_scores,
)
from processes import run_in_processes
from scored_models import RULES, make_base, make_scored, spread_scores
from transformers_version import IS_TRANSFORMERS_4

pytestmark = [
    pytest.mark.transformers,
    pytest.mark.skipif(not dist.is_available(), reason="torch without distributed"),
]

FAMILIES = ("Llama", "Qwen2", "Qwen3", "Mistral")
MOVABLE = [rule for rule in RULES if "keep_window_size" in RULES[rule]]


def make(family="Llama", rule="all", pieces=False, own=False, **options):
    if own:  # a class of layers that no table has
        model = make_base(family, vocab_size=VOCABULARY, **options)
        kind = type("OwnAttention", (torch.nn.Module,), {"forward": LlamaAttention.forward})
        for layer in model.model.layers:
            layer.self_attn.__class__ = kind
        model = spread_scores(add_learned_scores(model, **RULES[rule], attention=kind)).train()
    else:
        model = make_scored(family, rule, vocab_size=VOCABULARY, **options).train()
    return enable_flash_dmattn(model, context_parallel=dist.group.WORLD) if pieces else model


def compare_scored(kind, *settings, checkpointed=False, compiled=False, **options):
    model, pieces = make(*settings, **options), make(*settings, pieces=True, **options)
    largest = compare_step(model, pieces, kind, 5e-5, checkpointed, compiled)
    scores_learn = any("scorer" in name and scale > 0 for name, scale in largest.items())
    assert scores_learn or settings[1:] == ("streaming",)


def compare_all(rank):
    for family in FAMILIES:
        compare_scored("whole", family)
    for number, rule in enumerate(MOVABLE):
        compare_scored(("padded", "packed")[number % 2], "Llama", rule)
    compare_scored("packed", "Llama", "all", checkpointed=True)
    if not IS_TRANSFORMERS_4:  # as other tests of compiled models with scores
        compare_scored("packed", "Llama", "all", compiled=True)
    compare_scored("padded", "Llama", "all", scorer="value")
    compare_scored("whole", "Llama", "all", own=True)
    compare_generation(rank, make().eval(), make(pieces=True).eval())
    refusals(rank)


def refusals(rank):
    model = make()
    model.model.__class__ = type(
        "OwnModel", (type(model.model),), {"forward": lambda *a, **k: None}
    )
    with pytest.raises(ValueError, match="got a OwnModel whose forward has no argument position"):
        enable_flash_dmattn(model, context_parallel=dist.group.WORLD)
    model = make(pieces=True)
    tokens = torch.zeros(1, 8, dtype=torch.long)
    positions = {"position_ids": torch.arange(8 * rank, 8 * rank + 8)[None]}
    with pytest.raises(ValueError, match="position_ids: got None with context parallelism"):
        model(tokens)
    with pytest.raises(ValueError, match="shift_labels: got None"):
        model(tokens, labels=tokens, **positions)
    model.set_score_phase("soft")
    with pytest.raises(ValueError, match="phase: got 'soft' with context parallelism"):
        model(tokens, **positions)
    model.set_score_phase("off")
    with pytest.raises(ValueError, match="attn_implementation: got 'eager' with context"):
        model(tokens, **positions)
    remove_learned_scores(model)
    model(tokens, labels=tokens)
    prompts = make_base("Llama", vocab_size=VOCABULARY)
    add_learned_scores(prompts, 8, dense_prefill=True)
    enable_flash_dmattn(prompts, context_parallel=dist.group.WORLD)
    cache = DynamicMaskCache(prompts.config)
    with torch.no_grad(), pytest.raises(ValueError, match="dense_prefill: got True with a cache"):
        prompts(tokens, past_key_values=cache, **positions)
    with pytest.raises(ValueError, match="keep_window_size: got None"):
        make(rule="threshold", pieces=True)(tokens, **positions)
    model = make()
    dist.set_debug_level(dist.DebugLevel.INFO)  # ranks compare the arguments of every call
    enable_flash_dmattn(model, context_parallel=dist.group.WORLD)
    for phase, words in (
        ("soft", "phase: got 'soft'"),
        ("off", "attn_implementation: got 'eager'"),
    ):
        if rank == 0:
            model.set_score_phase(phase)
        with pytest.raises(
            ValueError, match=r"invalid arguments on ranks \[0\]" if rank else words
        ):
            model(tokens, **positions)


def test_families_and_rules_equal_one_process():
    run_in_processes(2, compare_all)


def test_doge_layers_beside_scores_are_replaced_too():
    config = transformers.DogeConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, pad_token_id=None,
    )  # fmt: skip
    both = torch.nn.ModuleList([make_scored(), transformers.DogeForCausalLM(config)])
    enable_flash_dmattn(both)
    layers = [type(layer.self_attn).__name__ for layer in both[1].model.layers]
    assert layers == ["FlashDogeAttention"] * 2
