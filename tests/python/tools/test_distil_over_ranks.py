"""Scores that transformers' Trainer trains in accumulated steps or over two processes (DDP, FSDP2 by accelerate) equal those of one."""

import os

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from processes import run_in_processes

for needed in ("accelerate", "matplotlib", "tqdm", "transformers"):
    pytest.importorskip(needed)
pytest.importorskip("transformers", minversion="5")
pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")

STEPS, BATCH = 6, 4
TINY = [
    "--length", "96", "--width", "32", "--layers", "2", "--batch", "2", "--pretraining-steps", "2", "--tests", "2",
    "--parts", "4", "--keep", "8", "--recent", "4", "--device", "cpu",
]  # fmt: skip


def scores_after_training(folder, batch, temperature=None, weight=0.0, **options):
    """Returns the losses of every step, and the scorers. By default nothing in the training is random."""
    from transformers import TrainingArguments

    from flash_dmattn.integrations.transformers import save_scores
    from learned_scores.training import Schedule, ScoreTrainer, freeze_all_but_scores
    from scored_models import make_ids, make_scored

    model = make_scored().train()
    freeze_all_but_scores(model)
    arguments = TrainingArguments(
        str(folder), use_cpu=True, max_steps=STEPS, per_device_train_batch_size=batch, logging_steps=1, report_to=[],
        save_strategy="no", learning_rate=1e-2, lr_scheduler_type="constant", disable_tqdm=True, remove_unused_columns=False,
        **options,
    )  # fmt: skip
    trainer = ScoreTrainer(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in make_ids(batch=8 * BATCH)],
        schedule=Schedule(soft=0.5, weight=weight, temperature=temperature),
    )
    trainer.train()
    save_scores(model, folder)
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return losses, load_file(folder / "learned_scores.safetensors"), trainer.model_wrapped


def join_accelerate(rank, way):
    """Makes accelerate use the processes of this test, and FSDP2 on CPUs, which it supports only on GPUs."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    if way == "DDP":
        return
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    os.environ |= {
        "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    }  # fmt: skip
    PartialState._prepare_backend = lambda *args, **options: ("gloo", DistributedType.MULTI_GPU)
    PartialState.set_device = lambda state: setattr(state, "device", torch.device("cpu"))


CLASSES = {"DDP": "DistributedDataParallel", "FSDP2": "FSDPModule"}


def compare_with_one(rank, folder, way, losses, scores):
    join_accelerate(rank, way)
    rank_losses, tensors, wrapped = scores_after_training(folder / "two", BATCH // 2)
    assert CLASSES[way] in {base.__name__ for base in type(wrapped).__mro__}
    torch.testing.assert_close(rank_losses, losses, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(tensors, scores, rtol=1e-4, atol=1e-5)
    run_the_program(rank, folder / "program")


def run_the_program(rank, folder):
    """Runs the program. Only the first process writes results, and a checkpoint resumes the run."""
    from learned_scores import distil
    from small_corpus import small_corpus

    distil.standard_library = small_corpus
    options = [*TINY, "--output", str(folder)]
    results = distil.main([*options, "--steps", "4"])
    assert bool(results) == (rank == 0)
    results = distil.main([*options, "--steps", "6", "--resume"])
    if rank == 0:
        steps = [row["step"] for row in results["log"] if "own_loss" in row]
        assert steps == [1, 2, 3, 4, 5, 6, 6] and "learned" in results["quality"]


@pytest.mark.parametrize("way", CLASSES)
def test_scores_of_two_processes_equal_one_process(way, tmp_path):
    losses, scores, _ = scores_after_training(tmp_path / "one", BATCH)
    assert len(losses) == STEPS and losses[0] > 0
    run_in_processes(2, compare_with_one, tmp_path, way, losses, scores)


def test_accumulated_steps_equal_a_larger_batch(tmp_path):
    expected = scores_after_training(tmp_path / "one", BATCH)[:2]
    losses_and_scores = scores_after_training(
        tmp_path / "two", BATCH // 2, gradient_accumulation_steps=2
    )[:2]
    torch.testing.assert_close(losses_and_scores, expected, rtol=1e-4, atol=1e-5)


def test_checkpointed_layers_draw_the_same_gates_again(tmp_path):
    drawn = {"temperature": 0.1, "weight": 4.0}
    expected = scores_after_training(tmp_path / "whole", BATCH, **drawn)[:2]
    options = {"gradient_checkpointing": True}
    *losses_and_scores, model = scores_after_training(tmp_path / "parts", BATCH, **drawn, **options)
    torch.testing.assert_close(tuple(losses_and_scores), expected, rtol=1e-4, atol=1e-5)
    assert not any(m._forward_hooks for name, m in model.named_modules() if "scorer" in name)
    with pytest.raises(ValueError, match="^gradient_checkpointing_kwargs: got use_reentrant=True"):
        options["gradient_checkpointing_kwargs"] = {"use_reentrant": True}
        scores_after_training(tmp_path / "reentrant", BATCH, **drawn, **options)
