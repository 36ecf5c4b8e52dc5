"""The demo from beginning to end."""

import argparse
import logging
import sys
import textwrap
from collections.abc import Sequence

import torch

from flash_dmattn import is_available

from .corpus import even_batch, standard_library
from .cost import Cost, lengths_of, measure
from .pictures import draw_cost, draw_keys, draw_loss, draw_token_cost
from .token_cost import CONTEXTS, TokenCost, measure_tokens
from .training import History, held_out_bits_per_byte, make_model, train, write_text

_PROMPT = "import os\n\n\ndef "
_SAMPLE_BYTES = 400
_COST_SECONDS = 15  # for each implementation


def run(options: argparse.Namespace) -> int:
    """Trains, measures, draws and prints; see `--help`. Returns the exit status."""
    corpus = standard_library()
    if options.context > len(corpus.held_out):
        held_out = f"{len(corpus.held_out)} bytes that are held out"
        print(f"--context: got {options.context}, expected at most the {held_out}", file=sys.stderr)
        return 2
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(options.seed)
    output = options.output
    output.mkdir(parents=True, exist_ok=True)
    (output / "sample.txt").touch()  # fails before the training rather than after it

    device = options.device
    if device == "auto":
        device = "cuda" if is_available("cuda") else "cpu"
    model = make_model(options.context, options.window).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{corpus.files} files of the Python standard library: {len(corpus.training) / 1e6:.1f} MB to "
        f"train on, {len(corpus.held_out) / 1e6:.1f} MB held out\n"
        f"a Doge model of {parameters / 1e6:.1f} million parameters, context {options.context}, "
        f"every query keeps {options.window} keys, on {device}"
    )
    before = held_out_bits_per_byte(model, corpus, options.context)
    print(f"held out before training: {before:.3f} bits per byte")
    history = train(
        model,
        corpus,
        steps=options.steps,
        seconds=options.seconds,
        context=options.context,
        batch_size=options.batch_size,
        seed=options.seed,
    )
    after = held_out_bits_per_byte(model, corpus, options.context)
    print(f"held out after training: {after:.3f} bits per byte")
    missing_steps = _missing_steps(history, options)
    if missing_steps:
        print(f"{missing_steps}; text of so little training is noise")

    sample = write_text(model, _PROMPT, min(_SAMPLE_BYTES, options.context), options.seed)
    (output / "sample.txt").write_text(sample, encoding="utf-8")
    print("the model writes:")
    print(textwrap.indent(_printable(sample), "  | "))
    draw_loss(output / "loss.png", history.bits_per_byte, before, after, missing_steps)
    held_out = even_batch(corpus.held_out, 1, options.context)[0]
    draw_keys(output / "keys.png", model, held_out.to(device))

    costs = {}
    for implementation in ("eager", "flash_dmattn"):
        print(f"measuring one training step as N grows: {implementation}")
        costs[implementation] = measure(
            implementation, options.window, _COST_SECONDS, options.seed, model.device.type
        )
    lengths = {name: lengths_of(name, model.device.type) for name in costs}
    missing_lengths = _missing_lengths(costs, lengths)
    draw_cost(output / "cost.png", costs, options.window, missing_lengths)
    tokens = {}
    for implementation in ("eager", "flash_dmattn"):
        print(f"measuring a generated token as the text grows: {implementation}")
        tokens[implementation] = measure_tokens(model, implementation, _COST_SECONDS, options.seed)
    missing_contexts = _missing_lengths(tokens, dict.fromkeys(tokens, CONTEXTS))
    draw_token_cost(output / "token.png", tokens, options.window, missing_contexts)

    _print_table(
        [
            ("held-out bits per byte", f"{before:.3f} -> {after:.3f}"),
            ("steps, bytes", f"{len(history.bits_per_byte)}, {history.bytes_seen:,}"),
            ("training", f"{history.seconds:.0f} s, {history.bytes_per_second:,.0f} bytes/s"),
            ("gradients", f"{history.gradients_checked:,} checked, all finite"),
            *_cost_rows(costs),
            *_token_rows(tokens),
            *(
                ("cut short", note)
                for note in (missing_steps, missing_lengths, missing_contexts)
                if note
            ),
            ("files", ", ".join(f"{output / f}" for f in _FILES)),
        ]
    )
    return 0


_FILES = ("sample.txt", "loss.png", "keys.png", "cost.png", "token.png")


def _missing_steps(history: History, options: argparse.Namespace) -> str:
    """Which steps the time of the training left out; "" where it left out none."""
    steps = len(history.bits_per_byte)
    if steps == options.steps:
        return ""
    needed = history.seconds / steps * options.steps
    return f"{steps} of {options.steps} steps in {options.seconds} s; all need --seconds {needed:.0f} on this machine"


def _missing_lengths(
    costs: dict[str, list[Cost] | list[TokenCost]], lengths: dict[str, Sequence[int]]
) -> str:
    """Which lengths were not measured; "" where all were."""
    reached = {name: max((p.length for p in points), default=0) for name, points in costs.items()}
    missing = [
        f"{name} ends at {reached[name]} of {lengths[name][-1]}"
        for name in costs
        if reached[name] != lengths[name][-1]
    ]
    limit = f"more would not fit into {_COST_SECONDS} s or the memory"
    return f"{', '.join(missing)}: {limit}" if missing else ""


def _printable(text: str) -> str:
    """Without characters that steer a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _cost_rows(costs: dict[str, list[Cost]]) -> list[tuple[str, str]]:
    """The longest sequence that eager attention reached, and the longest of ours."""
    eager, ours = ({c.length: c for c in costs[name]} for name in ("eager", "flash_dmattn"))
    rows = []
    shared = max(eager.keys() & ours.keys(), default=None)
    if shared is not None:
        a, b = eager[shared], ours[shared]
        rows.append((f"one layer, N = {shared}", f"eager {_cost(a)}; flash_dmattn {_cost(b)}"))
    longest = max(ours, default=None)
    if longest not in (None, shared):
        rows.append((f"one layer, N = {longest}", f"flash_dmattn {_cost(ours[longest])}"))
    return rows


def _cost(cost: Cost) -> str:
    return f"{cost.seconds:.2f} s, {cost.mebibytes:,.0f} MiB"


def _token_rows(costs: dict[str, list[TokenCost]]) -> list[tuple[str, str]]:
    """The longest text after which both have generated."""
    eager, ours = ({c.length: c for c in costs[name]} for name in ("eager", "flash_dmattn"))
    longest = max(eager.keys() & ours.keys(), default=None)
    if longest is None:
        return []
    parts = (
        f"{name} {cost.per_second:,.0f} bytes/s, cache {cost.mebibytes:.1f} MiB"
        for name, cost in (("eager", eager[longest]), ("flash_dmattn", ours[longest]))
    )
    return [(f"generating after {longest} bytes", "; ".join(parts))]


def _print_table(rows: list[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in rows)
    print()
    for name, value in rows:
        print(f"  {name:<{width}}   {value}")
