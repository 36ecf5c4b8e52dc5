"""Trains a small language model with all keys, with a sliding window, or with the keys that scores keep under one budget.

python examples/from_scratch.py                  # Python's library, small: minutes on a CPU
python examples/from_scratch.py --device cuda --texts linux-source-6.1 --held-out fs/btrfs net/ipv4 kernel/sched mm
python examples/from_scratch.py --device cuda --forms learned --seeds 1 2    # adds rows, from tokens.xz without the texts
"""

import argparse
import json
import lzma
import random
import time
from functools import partial
from io import BytesIO
from itertools import chain, islice, product
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from command_line import between, device, new_folder
from corpus import random_batch, standard_library, text_files
from flash_dmattn import DynamicMaskAttention, ScoreBudget, flash_dmattn_func, sliding_window
from flash_dmattn.budgets import collected_scores

SIZES = {  # on a CPU, on a GPU
    "context": (512, 8192, "tokens of a text"), "batch": (4, 8, "texts of a step"), "steps": (300, 2000, "of a training"),
    "mean_keys": (96, 772, "of a head at the last token; keys of the window"), "recent": (32, 256, "keys of a learned rule"),
    "layers": (4, 8, "of the model"), "width": (128, 512, "features of a token"), "heads_q": (4, 4, "query heads"),
    "heads_kv": (2, 2, "key heads"), "head_dim": (32, 128, "features of a head"), "samples": (20, 40, "held-out texts"),
    "vocab": (2048, 16384, "tokens of the BPE that is trained if there is no tokens.xz"),
}  # fmt: skip
RATE, WARM_UP_STEPS, SINKS = 2e-3, 60, 4
TEMPERATURE, WEIGHT = 0.3, 4.0  # of sampled gates, of the budget term
SOFT, NARROWING = 0.75, (0.1, 0.5)  # shares of a training: the soft phase, where its target falls
_BYTES = range(2000, 400_000)  # of a file
_MOST_TOKENS = 114_000_000, 3_300_000  # to train with, and held out


def read_files(root: Path | None, held_out: list[str]) -> list[list[str]]:
    """Returns files to train with and held-out ones: of Python's library, or of root, a random order of folders."""
    if root is None:
        return [text.split("\0") for text in standard_library().texts()]
    folders, under = {}, tuple(f"{name.strip('/')}/" for name in held_out)
    for path in text_files(root):
        if path.stat().st_size in _BYTES:
            name = f"{path.parent.relative_to(root).as_posix()}/"
            folders.setdefault(name, []).append(path.read_text(errors="ignore"))
    names = random.Random(1).sample(sorted(folders), len(folders))
    held = {name for name in names if name.startswith(under)} if under else set(names[::20])
    return [[text for n in names if (n in held) == is_held for text in folders[n]] for is_held in (False, True)]  # fmt: skip


def load_tokens(o: argparse.Namespace) -> list[Tensor]:
    """Returns tokens to train with and held-out ones, int32 [tokens], of tokens.xz, which is made if there is none."""
    path, names = o.output / "tokens.xz", ("training", "held_out")
    if not path.exists():
        from tokenizers import ByteLevelBPETokenizer, pre_tokenizers

        parts, bpe = read_files(o.texts, o.held_out), ByteLevelBPETokenizer()
        bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split("\n", "isolated"), bpe.pre_tokenizer])  # fmt: skip
        sample = (f[:30000] for f in random.Random(0).sample(parts[0], min(1500, len(parts[0]))))
        bpe.train_from_iterator(sample, o.vocab, special_tokens=["<file>"], show_progress=False)
        arrays = {"vocab": np.array(o.vocab)}
        for name, part, most in zip(names, parts, _MOST_TOKENS, strict=True):
            groups = (bpe.encode_batch(part[i : i + 256]) for i in range(0, len(part), 256))
            ids = chain.from_iterable([0, *text.ids] for group in groups for text in group)
            arrays[name] = np.fromiter(islice(ids, most), np.uint16)
        np.savez(packed := BytesIO(), **arrays)
        path.write_bytes(lzma.compress(packed.getvalue()))
    arrays = np.load(BytesIO(lzma.decompress(path.read_bytes())))
    o.vocab, sizes = int(arrays["vocab"]), [len(arrays[name]) for name in names]
    print(f"{path}: {sizes[0]} tokens to train with, {sizes[1]} held out; {o.device}")
    if min(sizes) <= o.context:
        o.fail(f"--context: got {o.context}, expected less than each part of {path}, {sizes}")
    return [torch.from_numpy(arrays[name].astype(np.int32)).to(o.device) for name in names]


def rotate(query: Tensor, key: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
    """Normalises queries and keys [B, S, H, D], and rotates them by their positions [1, S]."""
    half = query.shape[-1] // 2
    speeds = 500000.0 ** (-torch.arange(half, device=query.device) / half)
    cos, sin = (f(positions[..., None, None] * speeds) for f in (torch.cos, torch.sin))
    halves = (F.rms_norm(x.float(), (2 * half,)).split(half, -1) for x in (query, key))
    return tuple(torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(query.dtype) for a, b in halves)  # fmt: skip


def feed_forward(x: Tensor, attended: Tensor, up: Tensor, gate: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Adds the results of attention and of an MLP to the stream x. Returns it and the next layer's input."""
    x = x + attended.float()
    h = F.rms_norm(x, x.shape[-1:]).to(attended.dtype)
    x = x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down).float()
    return x, F.rms_norm(x, x.shape[-1:]).to(attended.dtype)


def token_losses(h: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h, embedding.to(h.dtype)).float().flatten(0, 1), targets.flatten(), reduction="none")  # fmt: skip


class PlainAttention(DynamicMaskAttention):  # without scores, for keys by self.intervals
    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = (project(hidden).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj))  # fmt: skip
        q, k = self.rope(q, k, torch.arange(hidden.shape[1], device=hidden.device)[None])
        out = flash_dmattn_func(q, k, v, is_causal=True, key_intervals=self.intervals)
        return self.o_proj(out.flatten(2))


class Model(nn.Module):
    """A decoder whose embedding is also its output. On a GPU all but attention is compiled."""

    def __init__(self, form: str, o: argparse.Namespace):
        super().__init__()
        compiled = partial(torch.compile, dynamic=False, disable=not o.on_gpu)
        rope, self.feed_forward, self.token_losses = map(compiled, (rotate, feed_forward, token_losses))  # fmt: skip
        self.embed, self.layers = nn.Embedding(o.vocab, o.width), nn.ModuleList()
        nn.init.normal_(self.embed.weight, std=0.02)
        kind = DynamicMaskAttention if form == "learned" else PlainAttention
        linear, mlp = partial(nn.Linear, bias=False), o.width * 11 // 4
        for _ in range(o.layers):
            layer = kind(o.width, o.heads_q, o.heads_kv, o.context, recent_window=o.recent, sink_tokens=SINKS, head_dim=o.head_dim, rope=rope)  # fmt: skip
            layer.intervals = sliding_window(o.context, o.mean_keys, device=o.device) if form == "window" else None  # fmt: skip
            parts = layer, linear(o.width, mlp), linear(o.width, mlp), linear(mlp, o.width)
            self.layers.append(nn.ModuleList(parts))
            nn.init.zeros_(layer.o_proj.weight)
            nn.init.zeros_(parts[-1].weight)

    def forward(self, ids: Tensor) -> Tensor:
        """Returns the loss of each token but the first, [B * S]. ids: [B, 1 + S]."""
        x = self.embed(ids[:, :-1])
        h = F.rms_norm(x, x.shape[-1:])
        with torch.autocast("cuda", torch.bfloat16, enabled=ids.is_cuda):
            for attention, *mlp in self.layers:
                x, h = self.feed_forward(x, attention(h), *(linear.weight for linear in mlp))
        return self.token_losses(h, self.embed.weight, ids[:, 1:])


@torch.no_grad()
def evaluate(model: Model, form: str, held_out: Tensor, o: argparse.Namespace) -> dict:
    """Returns numbers of keys, losses by position, and "far": that of tokens which complete a trigram seen far before and not since."""
    losses, far, seen, n = [], [], [], o.context
    plain = (torch.arange(n) + 1).clamp(max=o.mean_keys if form == "window" else n)[None, None]
    layers = [layer[0] for layer in model.layers]
    for start in torch.linspace(0, len(held_out) - n - 1, o.samples).long().tolist():
        ids, last = held_out[None, start : start + n + 1].long(), {}
        with collected_scores([layer.scores for layer in layers]) as scores:
            losses.append(model(ids).cpu())
        runs = [layer[0] for layer in scores if layer]
        seen.append(torch.stack(list(map(seen_keys, layers, runs))) if runs else plain)
        for t, trigram in enumerate(ids[0].unfold(0, 3, 1).tolist(), start=1):  # of losses
            if t - last.get(tuple(trigram), t) > n // 8:
                far.append(losses[-1][t])
            last[tuple(trigram)] = t
    counts, loss = torch.stack(seen).double(), torch.stack(losses).mean(0)
    parts = (0, n // 8), (n // 8, n // 4), (n // 4, n // 2), (n // 2, n), (n // 4, n)
    facts = {"keys": counts[..., -1].mean().item(), "keys, all queries": counts.mean().item()}
    facts |= {f"loss {a}-{b}": loss[a:b].mean().item() for a, b in parts}
    return facts | {"far": torch.tensor(far).mean().item(), "heads": counts[..., -1].mean(0).tolist()}  # fmt: skip


def seen_keys(layer: DynamicMaskAttention, scores: Tensor) -> Tensor:
    """Returns how many keys each query sees under the layer's rule, [heads, S]. scores: [heads, S]."""
    rule, seen = layer.rule, torch.arange(scores.shape[1]) + 1
    is_kept = (scores >= rule.score_threshold) & (seen > SINKS)
    old = F.pad(is_kept.cumsum(1), (rule.recent_window, 0))[:, : len(seen)]
    old = torch.minimum(old, torch.tensor(rule.windows())[:, None])
    return torch.minimum(old + rule.recent_window + SINKS, seen)


def train(form: str, seed: int, tokens: list[Tensor], o: argparse.Namespace) -> dict:
    """Trains a model, and returns its record."""
    torch.manual_seed(seed)
    model, draw = Model(form, o).to(o.device), torch.Generator().manual_seed(1000 + seed)
    samples = random_batch(tokens[0], 16, o.context + 1, torch.Generator().manual_seed(7)).split(1)
    share = (o.mean_keys - o.recent - SINKS) / (o.context - o.recent - SINKS)
    budget, phase = ScoreBudget(model), "soft" if form == "learned" else form
    budget.set_phase("soft", TEMPERATURE)
    parts = [[p for name, p in model.named_parameters() if (".scores." in name) == is_score] for is_score in (True, False)]  # fmt: skip
    optimizer = torch.optim.AdamW(sum(parts, []), betas=(0.9, 0.95), weight_decay=0.1, fused=o.on_gpu)  # fmt: skip
    step, progress, speeds, began = 0, 0.0, {}, time.perf_counter()
    while progress < 1:
        mark, count = time.perf_counter(), min(max(1, o.steps // 20), o.steps - step)
        for _ in range(count):
            optimizer.param_groups[0]["lr"] = RATE * min(1, (step + 1) / WARM_UP_STEPS, max(0.05, 2.5 * (1 - progress)))  # fmt: skip
            loss = model(random_batch(tokens[0], o.batch, o.context + 1, draw)).mean()
            target = np.interp(progress, NARROWING, (1, share)).item()
            (loss + WEIGHT * budget.loss(target) if phase == "soft" else loss).backward()
            for part in parts:
                nn.utils.clip_grad_norm_(part, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            progress = max(step / o.steps, (time.perf_counter() - began) / o.seconds)
        print(f"{form} {seed}: step {step}, {phase}, loss {loss.item():.3f}", flush=True)
        speeds.setdefault(phase, []).append(count * o.batch * o.context / (time.perf_counter() - mark))  # fmt: skip
        if phase == "soft" and progress >= SOFT:
            budget.follow(budget.divide(samples, o.mean_keys, quantile=0.99))
            budget.set_phase(phase := "hard")
            for layer in budget.layers:  # freezes scores
                layer.scores.register_forward_hook(lambda *call: call[-1].detach())
        if phase == "hard":  # also after the last step
            budget.follow(budget.divide(samples, o.mean_keys, quantile=0.99))
    record = {"form": form, "seed": seed, "steps": step} | evaluate(model, form, tokens[1], o)
    return record | {"tokens/s": ", ".join(f"{np.median(v):.0f} {n}" for n, v in speeds.items())}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add, forms = parser.add_argument, ("all", "window", "learned")
    add("--forms", nargs="+", choices=forms, default=forms, help="by default each of them")
    add("--seeds", type=between(0), nargs="+", default=[0], help="one training of each form each")
    add("--texts", type=Path, help="a folder of texts (default: Python's library)")
    add("--held-out", nargs="+", default=[], help="its folders that are not trained (one in 20)")
    add("--device", type=device, default="cuda" if torch.cuda.is_available() else "cpu")
    add("--seconds", type=between(1), default=float("inf"), help="a training ends after this time")
    add("--output", type=new_folder, default="build/from_scratch", help="of tokens and records")
    for name, (small, large, meaning) in SIZES.items():
        add(f"--{name.replace('_', '-')}", type=between(1), help=f"{meaning} ({large}, {small} on a CPU)")  # fmt: skip
    o = parser.parse_args(arguments)
    o.on_gpu, o.fail = o.device != "cpu", parser.error
    for name, sizes in SIZES.items():
        setattr(o, name, getattr(o, name) or sizes[o.on_gpu])
    if not o.recent + SINKS < o.mean_keys <= o.context:
        o.fail(f"--mean-keys: got {o.mean_keys}, expected {o.recent + SINKS + 1} to {o.context}")
    if o.texts and not o.texts.is_dir():
        o.fail(f"--texts: got {o.texts}, expected a folder")
    tokens, path = load_tokens(o), o.output / "record.json"
    records = json.loads(path.read_text()) if path.exists() else []
    for seed, form in product(o.seeds, o.forms):
        record = train(form, seed, tokens, o)
        row = {k: f"{v:.4g}" if isinstance(v, float) else f"{v}" for k, v in record.items() if k != "heads"}  # fmt: skip
        print(f"| {' | '.join(row)} |\n| {' | '.join(row.values())} |", flush=True)
        records.append(record | {"options": {k: str(v) for k, v in vars(o).items() if k != "fail"}})
        path.write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
