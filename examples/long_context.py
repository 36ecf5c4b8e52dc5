"""Trains a Doge from scratch with one long sequence per step, split over several GPUs.

    torchrun --nproc_per_node 2 examples/long_context.py --seq-len 262144
    torchrun --nproc_per_node 2 examples/long_context.py --seq-len 262144 --cp 1     # the same batches, whole sequences

Ranks form a mesh (dp, cp): parameters are sharded over all ranks (FSDP2), and every sequence over cp. The text is Python's
standard library as bytes. Without a GPU the ranks are processes on the CPU. A run with --output resumes bit for bit at the step
where it was stopped, and writes a record and a picture of its losses there.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import DogeConfig, DogeForCausalLM

from command_line import between, new_folder, rate
from corpus import random_batch, standard_library
from flash_dmattn.distributed import ContextParallel, exchanged_bytes
from flash_dmattn.integrations.transformers import enable_flash_dmattn

VOCABULARY = 256  # bytes
RECORD = "record.json"
TOKENS_OF_LOGITS = 8192  # tokens whose logits exist at a time; those of a million would not fit


class Trainee(nn.Module):
    """A Doge with the sum of its losses. Logits exist only for some tokens at a time, with Liger's kernels if they are installed
    and there is a GPU, otherwise in a loop."""

    def __init__(self, doge: DogeForCausalLM):
        super().__init__()
        self.doge = doge

    def forward(self, input_ids: Tensor, position_ids: Tensor, shift_labels: Tensor) -> Tensor:
        hidden = self.doge.model(
            input_ids, position_ids=position_ids, use_cache=False
        ).last_hidden_state
        hidden, labels = hidden.flatten(0, 1), shift_labels.flatten()
        if hidden.is_cuda and importlib.util.find_spec("liger_kernel"):
            from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

            return liger_fused_linear_cross_entropy(
                hidden, self.doge.lm_head.weight, labels, reduction="sum", accum_dtype=torch.float32
            )
        parts = zip(hidden.split(TOKENS_OF_LOGITS), labels.split(TOKENS_OF_LOGITS), strict=True)
        return sum(checkpoint(self.losses, *part, use_reentrant=False) for part in parts)

    def losses(self, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = self.doge.lm_head(hidden).float()
        return F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")


def make_trainee(options: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> Trainee:
    torch.manual_seed(options.seed)  # the same parameters on all ranks
    config = DogeConfig(
        vocab_size=VOCABULARY,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // options.head_dim,
        num_key_value_heads=max(1, options.hidden // options.head_dim // 2),
        max_position_embeddings=options.seq_len,
        keep_window_size=options.window,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    doge = DogeForCausalLM(config).to(device)
    enable_flash_dmattn(doge, context_parallel=mesh["cp"] if mesh["cp"].size() > 1 else None)
    if options.checkpoint:
        doge.gradient_checkpointing_enable({"use_reentrant": False})
    if options.compile:
        for layer in doge.model.layers:
            layer.compile(dynamic=False, backend=options.compile)  # a run has one length
    trainee = Trainee(doge).train()
    every = mesh["dp", "cp"]._flatten("dp_cp")
    precision = MixedPrecisionPolicy()
    if device.type == "cuda":
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in doge.model.layers:
        fully_shard(layer, mesh=every, mp_policy=precision)
    return fully_shard(trainee, mesh=every, mp_policy=precision)


def batch_of(text: Tensor, step: int, options: argparse.Namespace, dp_rank: int) -> Tensor:
    """Returns the sequences of a step. They depend neither on the number of pieces nor on whether the run was resumed."""
    generator = torch.Generator().manual_seed(options.seed * 1000003 + step)
    batch = random_batch(text, options.batch, options.seq_len, generator)
    return batch.tensor_split(options.dp)[dp_rank]


def make_mesh(options: argparse.Namespace) -> tuple[DeviceMesh, torch.device]:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    shape = (options.dp, options.cp)
    return init_device_mesh(device.type, shape, mesh_dim_names=("dp", "cp")), device


def train(options: argparse.Namespace) -> list[dict]:
    """Trains, and returns the record of each step on every rank. On rank 0 it includes the steps before a stop."""
    mesh, device = make_mesh(options)
    cuda = device.type == "cuda"
    trainee = make_trainee(options, mesh, device)
    cp, every = ContextParallel(mesh["cp"]), ContextParallel(mesh["dp", "cp"]._flatten("dp_cp"))
    optimizer = torch.optim.AdamW(trainee.parameters(), lr=options.learning_rate)
    text, first, record = standard_library().training, 0, []
    if options.seq_len > len(text):
        options.fail(
            f"--seq-len: got {options.seq_len}, expected at most the {len(text)} of the text"
        )
    saved = options.output and options.output / "state"
    if saved and (saved / ".metadata").exists():
        first = load(saved, trainee, optimizer)
        if every.rank == 0:
            record = json.loads((options.output / RECORD).read_text())[:first]
    for step in range(first, options.steps):
        began, moved = time.perf_counter(), exchanged_bytes(mesh["cp"])
        tokens = batch_of(text, step, options, mesh.get_local_rank("dp")).to(device)
        loss = backward(trainee, tokens, cp, every)
        norm = nn.utils.clip_grad_norm_(trainee.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step_record = {
            "step": step,
            "loss": loss.item(),
            "gradient_norm": float(norm.full_tensor()),
        }
        seconds = time.perf_counter() - began
        step_record["tokens_per_second_and_rank"] = (
            options.batch * options.seq_len / seconds / every.size
        )
        step_record["exchanged_mb"] = (exchanged_bytes(mesh["cp"]).received - moved.received) / 1e6
        if cuda:
            step_record["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        record.append(step_record)
        if every.rank == 0:
            fields = " ".join(f"{name} {value:.6g}" for name, value in step_record.items())
            minutes_left = seconds * (options.steps - step - 1) / 60
            print(f"{fields} of {options.steps}, {minutes_left:.1f} minutes left", flush=True)
        if saved and ((step + 1) % options.save_every == 0 or step + 1 == options.steps):
            save(saved, trainee, optimizer, step + 1)
            if every.rank == 0:
                (options.output / RECORD).write_text(json.dumps(record, indent=1))
    return record


def backward(
    trainee: Trainee, tokens: Tensor, cp: ContextParallel, every: ContextParallel
) -> Tensor:
    """Runs forward and backward. Returns the mean loss over the batches and pieces of all ranks."""
    piece = cp.shard(tokens, tokens, multiple=8)
    total = trainee(piece.input_ids, piece.position_ids, piece.shift_labels)
    loss = every.mean(total, (piece.shift_labels != -100).sum())
    loss.backward()
    return loss.detach()


def save(folder: Path, trainee: Trainee, optimizer: torch.optim.Optimizer, step: int) -> None:
    model, states = get_state_dict(trainee, optimizer)
    dcp.save({"model": model, "optimizer": states, "step": step}, checkpoint_id=folder)


def load(folder: Path, trainee: Trainee, optimizer: torch.optim.Optimizer) -> int:
    """Loads the checkpoint in a folder, and returns the step with which the training continues."""
    model, states = get_state_dict(trainee, optimizer)
    state = {"model": model, "optimizer": states, "step": 0}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        trainee, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return state["step"]


def draw_losses(record: list[dict], path: Path) -> None:
    """Draws the loss of every step if matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return
    from matplotlib.figure import Figure

    axes = Figure(figsize=(6, 4), layout="constrained").add_subplot()
    axes.plot([step["step"] for step in record], [step["loss"] for step in record])
    axes.set(xlabel="step", ylabel="loss, nats a byte")
    axes.figure.savefig(path)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--seq-len", type=between(1), default=65536, help="tokens of a sequence")
    add("--cp", type=between(1), help="ranks that share a sequence; all of them by default")
    add(
        "--batch",
        type=between(1),
        help="sequences of a step; by default one for each group of ranks",
    )
    add("--steps", type=between(1), default=50)
    add("--window", type=between(1), default=2048, help="keys that a query keeps")
    add("--layers", type=between(1), default=8)
    add("--hidden", type=between(2), default=1024)
    add("--head-dim", type=between(2), default=128)
    add("--learning-rate", type=rate, default=1e-3)
    add("--seed", type=between(0), default=0)
    add("--checkpoint", action="store_true", help="compute layers again in the backward")
    add(
        "--compile", nargs="?", const="inductor", metavar="BACKEND",
        help="compile each layer, by inductor unless another backend of torch.compile is named",
    )  # fmt: skip
    add("--save-every", type=between(1), default=50, help="steps")
    add("--output", type=new_folder, help="folder of the state, the record and the picture")
    options = parser.parse_args(arguments)
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    options.cp = ranks if options.cp is None else options.cp
    if ranks % options.cp:
        parser.error(f"--cp: got {options.cp}, expected a divisor of {ranks} ranks")
    options.dp = ranks // options.cp
    options.batch = options.dp if options.batch is None else options.batch
    if options.batch % options.dp:
        parser.error(f"--batch: got {options.batch}, expected a multiple of {options.dp}")
    heads = options.hidden // options.head_dim
    if options.hidden % options.head_dim or (heads > 1 and heads % 2) or options.head_dim % 2:
        parser.error(
            f"--hidden, --head-dim: got {options.hidden}, {options.head_dim}, expected an even head dimension and as many features as "
            "one head or an even number of heads has"
        )
    options.fail = parser.error
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if not (dist.is_initialized() or {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= os.environ.keys()):
        program = f"torchrun --nproc_per_node 2 {sys.argv[0]}"
        options.fail(f"got no rank of this process, expected that of torchrun: {program}")
    record = train(options)
    if options.output and dist.get_rank() == 0:
        draw_losses(record, options.output / "losses.png")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads outlive their group


if __name__ == "__main__":
    main()
