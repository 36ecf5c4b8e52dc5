"""Cases of context parallelism, with the results of one process and the visible keys by definition."""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from flash_dmattn import flash_dmattn_func, select_key_intervals
from flash_dmattn.distributed import begin_exchange, context_parallel_dmattn
from flash_dmattn.distributed.attention import seen_keys
from flash_dmattn.keys.rule import SelectionRule
from rules_by_definition import visible_keys

NAN = math.nan
HQ = 4


@dataclass
class Case:
    """A sequence cut into pieces, and the arguments of attention.

    lengths: lengths of the pieces. scores: how they are drawn. mask: the padding. documents: how the sequence is packed.
    bias: "own" is a separate tensor, not the scores. rule, call: further arguments of the selection and of attention.
    """

    lengths: list
    window: object
    scores: str = "normal"
    mask: str = ""
    documents: str = ""
    bias: str = "scores"
    rule: dict = field(default_factory=dict)
    call: dict = field(default_factory=dict)
    batch: int = 2
    heads: int = 2
    score_heads: int = 0
    d: int = 16
    dv: int = 16

    def selection(self):
        return SelectionRule(self.window, **self.rule)


def cases(ranks):
    def even(n):
        return [n] * ranks

    uneven = [40, 7, 61, 24, 33, 2, 50, 18][:ranks]
    tiny = [0, 50, 1, 30][4 - ranks :] if 2 < ranks <= 4 else [1, *even(50)[1:]]
    recent = {"recent_window": 7, "recent_competes": True}
    delayed = {"recent_window": 9}
    return {
        "random": Case(even(48), 17),
        "ties": Case(even(48), 17, "ties"),
        "all equal": Case(even(48), 17, "equal"),
        "falling, so that all seen keys are of rank 0": Case(even(48), 17, "falling"),
        "rising": Case(even(48), 17, "rising"),
        "signed zeros, NaN, masking fills": Case(even(40), 11, "odd"),
        "window of 0": Case(even(24), 0),
        "window of 1": Case(even(40), 1, "ties"),
        "window beyond the sequence": Case(even(24), 24 * ranks + 5),
        "window of all but one": Case(even(24), 24 * ranks - 1, "ties"),
        "window between a piece and the sequence": Case(even(16), 25, "ties"),
        "padding left": Case(even(40), 13, "ties", mask="left"),
        "padding right": Case(even(40), 13, mask="right"),
        "first piece is padding": Case(even(40), 13, mask="first"),
        "random padding, fewer keys than the window": Case(even(40), 60, mask="random"),
        "uneven": Case(uneven, 19, "ties"),
        "empty and tiny pieces": Case(tiny, 9),
        "last piece is empty": Case([30] * (ranks - 1) + [0], 9, mask="random"),
        "documents": Case(even(48), 17, documents="random"),
        "documents, ties, uneven": Case(uneven, 13, "ties", documents="random"),
        "documents of each row": Case(even(48), 17, documents="rows"),
        "documents end at boundaries": Case(even(40), 13, documents="boundaries"),
        "one document, window beyond a piece": Case(even(24), 30, documents="one"),
        "documents with padding after": Case(even(40), 13, documents="padded", mask="random"),
        "documents of one token": Case(even(24), 40, documents="tiny"),
        "another bias": Case(even(48), 17, bias="own"),
        "another bias that masks": Case(even(48), 17, bias="masks", scores="ties"),
        "no bias": Case(even(48), 17, "ties", bias="none"),
        "one key head, odd head dimensions": Case(even(40), 13, heads=1, d=10, dv=14),
        "as many key heads as query heads": Case(even(40), 13, heads=4),
        "one score for all heads": Case(even(40), 13, score_heads=1),
        "softcap and scale": Case(even(40), 13, call={"softcap": 3.0, "scale": 0.7}),
        "recent keys": Case(even(40), 13, "ties", rule=recent),
        "recent keys that do not compete": Case(even(40), 13, "ties", rule=delayed),
        "recent keys beyond a piece": Case(even(12), 5, rule={**delayed, "recent_window": 17}),
        "sliding window": Case(even(40), 0, rule={"recent_window": 13}, bias="none"),
        "sliding window beyond a piece": Case(even(12), 0, rule={"recent_window": 29}),
        "sinks": Case(even(40), 13, "falling", rule={"sink_tokens": 3}, mask="left"),
        "sinks of documents": Case(even(40), 9, rule={"sink_tokens": 3, **recent}, documents="random"),
        "more sinks than a piece": Case(even(12), 5, "rising", rule={"sink_tokens": 15}),
        "sinks, recent keys, uneven, padding": Case(
            uneven, 9, "ties", rule={"sink_tokens": 4, **delayed}, mask="random"
        ),
        "threshold": Case(even(40), 13, rule={"score_threshold": 0.3, "recent_window": 5}),
        "a window for each head": Case(even(40), (5, 21), "ties", rule=recent),
        "documents and recent keys": Case(even(40), 9, "ties", rule=delayed, documents="random"),
        "delayed bias": Case(even(40), 13, call={"bias_delay": 11}),
        "delayed bias in documents": Case(even(40), 13, call={"bias_delay": 11}, documents="random"),
        "sink logits": Case(even(40), 13, call={"sink_logits": True}),
    }  # fmt: skip


def tensors(case, seed):
    """Returns the tensors of the whole sequence: query, key, value, scores, bias or None, dout, key_mask or None, offsets
    [B or 1, documents + 1] or None."""
    N, b, hkv = sum(case.lengths), case.batch, case.heads
    g = torch.Generator().manual_seed(seed)
    q, k, v, do = (
        torch.randn(b, N, h, e, generator=g)
        for h, e in ((HQ, case.d), (hkv, case.d), (hkv, case.dv), (HQ, case.dv))
    )
    s = torch.randn(b, case.score_heads or hkv, N, generator=g)
    at = torch.arange(N)
    if case.scores == "ties":
        s = (s * 2).round() / 2
    elif case.scores == "equal":
        s = torch.zeros_like(s)
    elif case.scores in ("falling", "rising"):
        s = at.expand_as(s) / N * (1 if case.scores == "rising" else -1)
    elif case.scores == "odd":
        s = torch.tensor([0.0, -0.0, 1.5, -1e30, NAN, 0.0])[
            torch.randint(0, 6, s.shape, generator=g)
        ]
    mask = {
        "": lambda: None,
        "left": lambda: at >= torch.tensor([[N // 3], [0]]),
        "right": lambda: at < torch.tensor([[N - N // 3], [N]]),
        "first": lambda: at >= torch.tensor([[case.lengths[0]], [case.lengths[0] + 3]]),
        "random": lambda: torch.rand(b, N, generator=g) < torch.tensor([[0.4], [0.8]]),
    }[case.mask]()

    def cuts():
        return [0, *sorted((torch.randperm(N - 1, generator=g)[:4] + 1).tolist()), N]

    edge = case.lengths[0]
    offsets = {
        "": lambda: None,
        "random": lambda: [cuts()],
        "rows": lambda: [cuts(), cuts()],
        "boundaries": lambda: [sorted([0, 5, edge, edge, N - 3, N])],
        "one": lambda: [[0, N]],
        "padded": lambda: [[0, 11, min(edge + 9, N - 26), N - 25]],
        "tiny": lambda: [[*range(N - 15), N]],
    }[case.documents]()
    offsets = None if offsets is None else torch.tensor(offsets)
    bias = None
    if case.bias in ("own", "masks"):
        bias = torch.randn(b, hkv, N, generator=g)
        if case.bias == "masks":
            bias = bias.masked_fill(torch.rand(b, hkv, N, generator=g) < 0.2, -torch.inf)
    return q, k, v, s.clone(), bias, do, mask, offsets


def present_keys(case, added, mask):
    """Returns bool [B, Hkv, N]. Padding is not present, and under a rule with sinks neither is a key that the bias masks."""
    B, H, N = case.batch, case.heads, sum(case.lengths)
    present = torch.ones(B, H, N, dtype=torch.bool)
    if mask is not None:
        present = present & mask[:, None]
    if case.rule.get("sink_tokens") and added is not None:
        present = present & (added > -1e30)
    return present


def attention_in_one_process(case, q, k, v, s, bias, mask, offsets, sink_logits):
    """Returns out and lse of ordinary calls, without pieces."""
    call = {"return_lse": True, **case.call}
    if "sink_logits" in call:
        call["sink_logits"] = sink_logits
    added = s if case.bias == "scores" else bias
    rule = {"keep_window_size": case.window, **case.rule}
    if offsets is not None:
        key_mask = present_keys(case, added, mask)
        scores = s.expand(-1, k.shape[2], -1)
        chosen = select_key_intervals(scores, **rule, cu_seqlens_k=offsets, key_mask=key_mask)
        return flash_dmattn_func(q, k, v, attn_bias=added, key_intervals=chosen, **call)
    choice = {} if case.bias == "scores" else {"selection_scores": s.detach()}
    return flash_dmattn_func(q, k, v, mask, added, is_causal=True, **rule, **choice, **call)


def keys_by_definition(case, s, bias, mask, offsets):
    """Returns which keys each query sees, bool [B, Hkv, N, N]."""
    B, H, N = case.batch, case.heads, s.shape[-1]
    s = s.expand(B, H, N)
    at = torch.arange(N)
    seen = torch.zeros(B, H, N, N, dtype=torch.bool)
    added = s if case.bias == "scores" else bias
    present_in = present_keys(case, added, mask)
    windows = case.window if isinstance(case.window, tuple) else (case.window,) * H
    for b in range(B):
        in_documents = torch.ones(N, dtype=torch.bool)
        document = torch.zeros(N, dtype=torch.long)
        if offsets is not None:
            row = offsets[min(b, len(offsets) - 1)]
            document = torch.bucketize(at, row[1:], right=True)
            in_documents = at < row[-1]
        for h in range(H):
            scores = s[b, h]
            if bias is not None:
                scores = scores.masked_fill(bias[b, h] <= -1e30, NAN)
            rule = SelectionRule(windows[h], **case.rule)
            present = present_in[b, h] & in_documents
            seen[b, h] = visible_keys(
                scores, rule, is_causal=True, query_positions=at, query_documents=document, key_positions=at,
                key_documents=document, present=present, last_position=None,
            )  # fmt: skip
    return seen


class Whole(NamedTuple):
    """A case and the results of one process, with which all ranks and exchanges are compared."""

    case: Case
    inputs: tuple  # of `tensors`
    sink_logits: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor
    gradients: tuple  # by query, key, value, scores, and bias if there is one of its own
    keys: torch.Tensor  # that each query sees, by definition


def in_one_process(case, seed):
    """Computes a case in one process."""
    inputs = q, k, v, s, bias, do, mask, offsets = tensors(case, seed)
    sinks = torch.linspace(-1, 1, HQ) if case.call.get("sink_logits") else None
    leaves = [t.clone().requires_grad_() for t in (q, k, v, s, *([] if bias is None else [bias]))]
    whole_bias = None if bias is None else leaves[-1]
    out, lse = attention_in_one_process(case, *leaves[:4], whole_bias, mask, offsets, sinks)
    gradients = torch.autograd.grad(out, leaves, do, allow_unused=True)
    keys = keys_by_definition(case, s, bias, mask, offsets)
    return Whole(case, inputs, sinks, out.detach(), lse.detach(), gradients, keys)


def compare_with_one_process(whole, group, rank, exchange):
    """Fails if the piece of a rank differs from the same rows of one process. out, lse and gradients may differ by rounding, the
    visible keys must be equal."""
    case, sinks = whole.case, whole.sink_logits
    q, k, v, s, bias, do, mask, offsets = whole.inputs
    begin = sum(case.lengths[:rank])
    rows = slice(begin, begin + case.lengths[rank])
    piece = [t[:, rows].clone().requires_grad_() for t in (q, k, v)]
    piece += [t[..., rows].clone().requires_grad_() for t in (s, *([] if bias is None else [bias]))]
    call = case.call if sinks is None else {"sink_logits": sinks}
    added = {"scores": "scores", "none": None}.get(case.bias, piece[-1])
    options = {
        "group": group,
        "keep_window_size": case.window,
        **case.rule,
        "attn_bias": added,
        "key_mask": None if mask is None else mask[:, rows],
        "cu_seqlens": offsets,
        "lengths": case.lengths if len(set(case.lengths)) > 1 else None,
        "exchange": exchange,
    }

    def once():
        out = context_parallel_dmattn(*piece[:4], **options, **call, return_lse=True)
        return *out, *torch.autograd.grad(out[0], piece, do[:, rows], allow_unused=True)

    results = once()
    expected = [whole.out[:, rows], whole.lse[..., rows]]
    expected += [g if g is None else g[:, rows] for g in whole.gradients[:3]]
    expected += [g if g is None else g[..., rows] for g in whole.gradients[3:]]
    names = ("out", "lse", "dquery", "dkey", "dvalue", "dscores", "dbias")
    for name, actual, wanted, again in zip(names, results, expected, once(), strict=False):
        if wanted is None or actual is None:
            assert all(t is None or not t.any() for t in (wanted, actual)), name
            continue
        assert torch.equal(actual, again), f"{name} differs between two runs"
        torch.testing.assert_close(
            actual, wanted, rtol=2e-5, atol=5e-6, msg=lambda m, n=name: f"{n}: {m}"
        )

    exchanged = begin_exchange(*piece[1:4], **options)
    assert torch.equal(keys_seen(exchanged), whole.keys[:, :, rows]), "keys"


def keys_seen(exchanged):
    """Returns which keys the queries of a rank see, bool [B, Hkv, n, N]."""
    _, visible = seen_keys(exchanged)
    mask = visible.intervals.to_mask()
    begins = exchanged.boundary.pieces.begins
    B, H, n, _ = mask.shape
    own_positions = torch.arange(exchanged.boundary.pieces.begin(), exchanged.boundary.pieces.end())
    positions = torch.cat([exchanged.positions.long(), own_positions.expand(B, H, -1)], -1)
    seen = torch.zeros(B, H, n, begins[-1] + 1, dtype=torch.int32)
    at = positions.where(positions >= 0, begins[-1])
    seen.scatter_add_(-1, at[:, :, None].expand(mask.shape), mask.int())
    assert not seen[..., -1].any()
    assert seen.max() <= 1 if seen.numel() else True
    return seen[..., :-1].bool()


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def whole_and_piece(rank, count, n=40, heads=2, w=17, seed=0, batch=2):
    """Draws q, k, v, dout and scores of the whole sequence, and returns them with the rows of a rank."""
    q, k, v, do = (
        normal(batch, n * count, h, 16, seed=seed + i) for i, h in enumerate((4, heads, heads, 4))
    )
    s = (normal(batch, heads, n * count, seed=seed + 4) * 2).round() / 2
    return q, k, v, do, s, slice(rank * n, rank * n + n)
