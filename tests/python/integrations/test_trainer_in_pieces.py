"""transformers' Trainer with sequences split over two ranks, and FSDP2 over a mesh of batches and pieces, train
like one process."""

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from doge_in_pieces import VOCABULARY, N, batch_of, make_doge
from processes import run_in_processes

pytest.importorskip("transformers.models.doge", reason="transformers with Doge is not installed")
pytestmark = [
    pytest.mark.transformers,
    pytest.mark.skipif(not dist.is_available(), reason="torch without distributed"),
]


def make_llama():
    from scored_models import make_scored

    return make_scored("Llama", "all", vocab_size=VOCABULARY)


MODELS = {"Doge": make_doge, "Llama with scores": make_llama}


def data():
    rows = []
    for seed in range(8):
        tokens, labels, _ = batch_of("whole", seed)
        rows += [{"input_ids": t, "labels": label} for t, label in zip(tokens, labels, strict=True)]
    return rows


def train(folder, name, pieces):
    from transformers import Trainer, TrainingArguments

    from flash_dmattn.integrations.transformers import enable_flash_dmattn
    from flash_dmattn.integrations.transformers.context_parallel import ContextParallelTrainerMixin

    class PiecesTrainer(ContextParallelTrainerMixin, Trainer):
        pass

    options = {}
    if pieces:
        from accelerate import ParallelismConfig

        options["parallelism_config"] = ParallelismConfig(cp_size=dist.get_world_size())
    model = MODELS[name]()
    arguments = TrainingArguments(
        folder, use_cpu=True, max_steps=3, per_device_train_batch_size=2, logging_steps=1, report_to=[],
        save_strategy="no", learning_rate=1e-3, lr_scheduler_type="constant", disable_tqdm=True, **options,
    )  # fmt: skip
    trainer = PiecesTrainer(model=model, args=arguments, train_dataset=data())
    if pieces:
        mesh = trainer.accelerator.torch_device_mesh["cp"]
        enable_flash_dmattn(model, context_parallel=mesh)
    trainer.train()
    return torch.tensor([step["loss"] for step in trainer.state.log_history if "loss" in step])


def train_in_pieces(rank, folder, expected_losses):
    from accelerate import ParallelismConfig

    count = dist.get_world_size()
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    # accelerate refuses all parallelism on CPUs, although it could join CPU processes in the same way.
    with mock.patch.object(ParallelismConfig, "_validate_accelerator"):
        losses = {name: train(folder, name, pieces=True) for name in MODELS}
    torch.testing.assert_close(losses, expected_losses, rtol=1e-4, atol=0)


def test_trainer_losses_equal_one_process(tmp_path):
    try:  # the Trainer imports it where it is installed
        import datasets  # noqa: F401
    except ModuleNotFoundError:
        pass
    except ImportError as error:
        pytest.skip(f"datasets does not go with this huggingface_hub: {error}")
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    if not hasattr(accelerate, "ParallelismConfig"):
        pytest.skip("accelerate without ParallelismConfig")
    expected = {name: train(str(tmp_path), name, pieces=False) for name in MODELS}
    assert all(len(losses) == 3 for losses in expected.values())
    run_in_processes(2, train_in_pieces, str(tmp_path), expected)


def compare_with_fsdp(rank):
    """Compares a batch of two rows with two pieces each; parameters are sharded over all four ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from flash_dmattn.distributed import ContextParallel

    tokens, labels, _ = batch_of("whole")
    labels = labels.clone()
    labels[0, :31] = -100  # rows with different numbers of labels

    def loss_of(model, ids, shifted, **options):
        logits = model(ids, use_cache=False, **options).logits
        return F.cross_entropy(
            logits.reshape(-1, VOCABULARY), shifted.reshape(-1), ignore_index=-100, reduction="sum"
        )

    model = make_doge()
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
    count = (shifted != -100).sum()
    loss = loss_of(model, tokens, shifted) / count
    loss.backward()

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    every = mesh["dp", "cp"]._flatten("dp_cp")
    sharded = make_doge(context_parallel=mesh["cp"])
    for layer in sharded.model.layers:
        fully_shard(layer, mesh=every)
    fully_shard(sharded, mesh=every)
    row = slice(mesh.get_local_rank("dp"), mesh.get_local_rank("dp") + 1)
    piece = ContextParallel(mesh["cp"]).shard(tokens[row], labels[row])
    assert piece.input_ids.shape == (1, N // 2)
    total = loss_of(sharded, piece.input_ids, piece.shift_labels, position_ids=piece.position_ids)
    # The mean over all labels of all rows and pieces.
    mean = ContextParallel(every).mean(total, (piece.shift_labels != -100).sum())
    torch.testing.assert_close(mean, loss, rtol=1e-5, atol=0)
    mean.backward()
    for (name, parameter), other in zip(
        sharded.named_parameters(), model.parameters(), strict=True
    ):
        gradient = parameter.grad.full_tensor()
        assert (gradient - other.grad).abs().max() <= 3e-5 * other.grad.abs().max(), name


def test_fsdp_gradients_over_batches_and_pieces_equal_one_process():
    run_in_processes(4, compare_with_fsdp)
