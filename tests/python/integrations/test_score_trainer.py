"""Scores that ScoreTrainer trains in accumulated steps or over two processes (DDP, FSDP2 by accelerate) equal those of one, and
its loss has the parts that it names."""

import copy
import os

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from processes import run_in_processes

for needed in ("accelerate", "transformers"):
    pytest.importorskip(needed)
pytest.importorskip("transformers", minversion="5")
pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")

STEPS, BATCH = 4, 4


def scores_after_training(
    folder, batch, temperature=None, weight=0.0, resume=None, has_teacher=False, **options
):
    """Returns the losses of every step, and the scorers. By default nothing in the training is random."""
    from transformers import TrainingArguments

    from flash_dmattn.integrations.transformers import (
        ScoreSchedule,
        freeze_all_but_scores,
        remove_learned_scores,
        save_scores,
    )
    from flash_dmattn.integrations.transformers.score_trainer import ScoreTrainer
    from scored_models import make_ids, make_scored

    model = make_scored().train()
    freeze_all_but_scores(model)
    arguments = TrainingArguments(
        str(folder), use_cpu=True, max_steps=STEPS, per_device_train_batch_size=batch, logging_steps=1, report_to=[],
        save_strategy="steps", save_steps=STEPS // 2, learning_rate=1e-2, lr_scheduler_type="constant", disable_tqdm=True, remove_unused_columns=False,
        **options,
    )  # fmt: skip
    trainer = ScoreTrainer(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in make_ids(batch=8 * BATCH)],
        schedule=ScoreSchedule(soft=0.5, weight=weight, temperature=temperature),
        teacher=remove_learned_scores(copy.deepcopy(model)) if has_teacher else None,
    )
    trainer.train(resume_from_checkpoint=resume)
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


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Returns the losses and scores of one process."""
    losses, scores, _ = scores_after_training(tmp_path_factory.mktemp("one"), BATCH)
    assert len(losses) == STEPS and losses[0] > 0
    return losses, scores


@pytest.mark.parametrize("way", CLASSES)
def test_scores_of_two_processes_equal_one_process(way, trained, tmp_path):
    run_in_processes(2, compare_with_one, tmp_path, way, *trained)


def test_accumulated_steps_and_a_teacher_like_the_base_change_nothing(trained, tmp_path):
    taught = scores_after_training(tmp_path / "taught", BATCH, has_teacher=True)[:2]
    torch.testing.assert_close(taught, trained, rtol=0, atol=0)
    losses_and_scores = scores_after_training(
        tmp_path / "two", BATCH // 2, gradient_accumulation_steps=2
    )[:2]
    torch.testing.assert_close(losses_and_scores, trained, rtol=1e-4, atol=1e-5)


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


def test_resumed_training_equals_one_without_a_break(tmp_path):
    drawn = {"temperature": 0.1, "weight": 4.0}
    _, expected, _ = scores_after_training(tmp_path / "whole", BATCH, **drawn)
    checkpoint = str(tmp_path / "whole" / f"checkpoint-{STEPS // 2}")
    _, scores, _ = scores_after_training(tmp_path / "resumed", BATCH, resume=checkpoint, **drawn)
    assert all(torch.equal(scores[name], tensor) for name, tensor in expected.items())


def test_evaluation_samples_no_gates(tmp_path):
    from transformers import TrainingArguments

    from flash_dmattn.integrations.transformers import ScoreSchedule
    from flash_dmattn.integrations.transformers.score_trainer import ScoreTrainer
    from scored_models import make_ids, make_scored

    model, ids = make_scored(), make_ids(batch=1)
    trainer = ScoreTrainer(
        model=model,
        args=TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]),
        eval_dataset=[{"input_ids": ids[0], "labels": ids[0]}],
        schedule=ScoreSchedule(),
    )
    losses = [trainer.evaluate()["eval_loss"] for _ in range(2)]
    assert losses[0] == losses[1] >= 0
    calls = []
    model.train().register_forward_pre_hook(lambda *_: calls.append(model.training))
    trainer.compute_loss(model, {"input_ids": ids})
    assert calls == [False, True]  # the teacher has no dropout
