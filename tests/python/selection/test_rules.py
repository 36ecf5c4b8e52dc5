"""Compares rules with recent keys, sinks, thresholds and windows per head with their definition."""

import pytest
import torch

from cpu_backends import CPU_BACKENDS
from dense_in_double import dense_in_double
from flash_dmattn import (
    flash_dmattn_func,
    flash_dmattn_varlen_func,
    from_padding,
    packed_documents,
    prefix_lm,
    select_key_intervals,
    sliding_window,
)
from flash_dmattn.keys.rule import SelectionRule
from rules_by_definition import visible_keys

THRESHOLDS = [None, None, -torch.inf, torch.inf, 0.0, 0.5, 1.0, 0.3]


def pick(generator, choices):
    return choices[int(torch.randint(len(choices), (), generator=generator))]


def below(generator, end):
    return int(torch.randint(end, (), generator=generator))


def random_rule(generator, length, heads, is_causal):
    window = below(generator, length + 3)
    if below(generator, 3) == 0:
        window = [below(generator, length + 3) for _ in range(heads)]
    threshold = pick(generator, THRESHOLDS)
    if threshold is not None and below(generator, 3) == 0:
        window = None
    return SelectionRule(
        window,
        pick(generator, ["per_query", "per_query", "global"]),
        pick(generator, [0, 1, 3, length, length + 5]) if is_causal else 0,
        below(generator, 2) == 0,
        pick(generator, [0, 0, 1, 3, length + 2]),
        threshold,
    ).checked_rule()


def random_scores(generator, *shape):
    if below(generator, 2):
        scores = torch.randint(-2, 3, shape, generator=generator) / 2
    else:
        scores = torch.randn(shape, generator=generator)
    for value in (torch.nan, -0.0, torch.inf, -torch.inf):
        if below(generator, 2):
            scores[torch.rand(shape, generator=generator) < 0.1] = value
    return scores.to(pick(generator, [torch.float32, torch.bfloat16, torch.float16, torch.float64]))


def definition(scores, rule, mask, **places):
    """Returns which keys each query sees by definition, [B, H, Sq, Sk], for scores [B, H, Sk]."""
    batch, heads, _ = scores.shape
    windows = list(rule.windows()) or [None]
    rows = []
    for b in range(batch):
        row_places = {
            name: value[b] if value.dim() == 2 else value
            for name, value in places.items()
            if name != "is_causal"
        }
        for h in range(heads):
            head_rule = rule._replace(keep_window_size=windows[h % len(windows)])
            rows.append(
                visible_keys(scores[b, h], head_rule, present=mask[b, h], is_causal=places["is_causal"], **row_places)
            )  # fmt: skip
    return torch.stack(rows).unflatten(0, (batch, heads))


def assert_bound_holds(chosen):
    if chosen.bound is None:
        return
    base, per_query = chosen.bound
    seen = chosen.to_mask()
    for queries in (1, 3):
        if queries <= chosen.query_length:
            together = seen.unfold(2, queries, 1).any(-1).sum(-1)
            assert together.numel() == 0 or int(together.max()) <= base + per_query * queries


@pytest.mark.parametrize("seed", range(20))
def test_rule_in_one_row_equals_definition(seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(30):
        length, queries = 1 + below(generator, 20), 1 + below(generator, 24)
        heads, is_causal = 1 + below(generator, 3), below(generator, 4) > 0
        scores = random_scores(generator, 2, heads, length)
        mask = torch.rand(scores.shape, generator=generator) < 0.8
        rule = random_rule(generator, length, heads, is_causal)
        chosen = select_key_intervals(
            scores, **rule._asdict(), key_mask=mask, query_length=queries, is_causal=is_causal
        )
        rows = torch.arange(queries)
        expected = definition(
            scores, rule, mask, is_causal=is_causal,
            query_positions=rows + length - queries, query_documents=torch.zeros_like(rows),
            key_positions=torch.arange(length), key_documents=torch.zeros(length, dtype=torch.long),
            last_position=torch.tensor([length - 1]),
        )  # fmt: skip
        assert torch.equal(chosen.to_mask(), expected), rule
        assert_bound_holds(chosen)


@pytest.mark.parametrize("seed", range(20))
def test_rule_in_documents_equals_definition(seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(20):
        documents = below(generator, 5)
        lengths_k = torch.randint(0, 9, (2, documents), generator=generator)
        same = below(generator, 2) == 0
        lengths_q = lengths_k if same else torch.randint(0, 9, (2, documents), generator=generator)
        if below(generator, 2):  # the same documents in all rows
            lengths_k, lengths_q = lengths_k[:1].expand(2, -1), lengths_q[:1].expand(2, -1)
        cu_k, cu_q = (
            torch.cat([n.new_zeros(2, 1), n.cumsum(1)], 1).int() for n in (lengths_k, lengths_q)
        )
        total_k, total_q = int(cu_k[:, -1].max()) + 2, int(cu_q[:, -1].max()) + 2
        heads, is_causal = 1 + below(generator, 2), below(generator, 4) > 0
        scores = random_scores(generator, 2, heads, total_k)
        mask = torch.rand(scores.shape, generator=generator) < 0.8
        rule = random_rule(generator, 8, heads, is_causal)
        offsets = {"cu_seqlens_k": cu_k, "cu_seqlens_q": None if same else cu_q}
        chosen = select_key_intervals(
            scores, **rule._asdict(), key_mask=mask, query_length=total_q, is_causal=is_causal, **offsets
        )  # fmt: skip
        places = {
            name: []
            for name in ("query_positions", "query_documents", "key_positions", "key_documents")
        }
        for b in range(2):
            # Within a document, positions of query and key count from its end.
            for name, cu, total in (("query", cu_q[b], total_q), ("key", cu_k[b], total_k)):
                index = torch.arange(total)
                document = torch.searchsorted(cu[1:].contiguous(), index, right=True)
                end = torch.cat([cu[1:], cu[-1:]])[document]
                places[f"{name}_positions"].append(index - end)
                # Queries after the last document see no key, and keys after it are visible to no query.
                nobody = -1 if name == "key" else documents
                places[f"{name}_documents"].append(
                    torch.where(document < documents, document, nobody)
                )
        expected = definition(
            scores, rule, mask, is_causal=is_causal, last_position=torch.full((documents + 1,), -1),
            **{name: torch.stack(value).long() for name, value in places.items()},
        )  # fmt: skip
        assert torch.equal(chosen.to_mask(), expected), rule
        if same:
            assert_bound_holds(chosen)


def document_of(position, offsets):
    return torch.searchsorted(offsets[1:].contiguous(), position, right=True)


@pytest.mark.parametrize("seed", range(20))
def test_rule_at_positions_equals_definition(seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(20):
        length, queries = 1 + below(generator, 16), 1 + below(generator, 12)
        begin = below(generator, 20)
        end = begin + queries + length
        positions = torch.stack(
            [torch.randperm(end, generator=generator)[:length] for _ in range(2)]
        )
        scores = random_scores(generator, 2, 2, length)
        mask = torch.rand(scores.shape, generator=generator) < 0.8
        rule = random_rule(generator, length, 2, True)
        documents = below(generator, 2) == 0
        cu = torch.tensor([0, 4, 4, 9, end]).clamp(max=end).int()
        chosen = select_key_intervals(
            scores, **rule._asdict(), key_mask=mask, query_length=queries, key_positions=positions,
            query_position=begin, cu_seqlens_k=cu if documents else None,
        )  # fmt: skip
        query_positions = begin + torch.arange(queries)

        offsets = cu if documents else torch.tensor([0, end])
        last = torch.tensor([begin + queries - 1] * 5)
        if documents:
            last = torch.minimum(last, torch.cat([cu[1:], cu[-1:]]) - 1)
        expected = definition(
            scores, rule, mask, is_causal=True, query_positions=query_positions,
            query_documents=document_of(query_positions, offsets), key_positions=positions,
            key_documents=torch.stack([document_of(p, offsets) for p in positions]), last_position=last.long(),
        )  # fmt: skip
        assert torch.equal(chosen.to_mask(), expected), rule
        assert_bound_holds(chosen)


RULES = {
    "window and recent": {"keep_window_size": 7, "recent_window": 5},
    "recent compete": {"keep_window_size": 7, "recent_window": 5, "recent_competes": True},
    "sinks": {"keep_window_size": 3, "sink_tokens": 4},
    "threshold": {"score_threshold": 0.5, "recent_window": 4, "sink_tokens": 2},
    "windows of heads": {"keep_window_size": [3, 9], "recent_window": 2},
    "recent and sinks alone": {"keep_window_size": 0, "recent_window": 6, "sink_tokens": 2},
}


# Keys are selected before the backend runs, so interpreted Triton tests only one rule.
@pytest.mark.parametrize(
    "name, backend",
    [
        (name, b)
        for name in RULES
        for b in CPU_BACKENDS
        if b != "triton" or name == "windows of heads"
    ],
)
def test_attention_under_a_rule_equals_dense_attention(name, backend):
    torch.manual_seed(1)
    rule = RULES[name]
    q, k, v = (torch.randn(2, 40, heads, 16) for heads in (4, 2, 2))
    bias = torch.randn(2, 2, 40)
    padding = torch.ones(2, 40, dtype=torch.bool)
    padding[0, :5] = False
    chosen = select_key_intervals(bias, **rule, key_mask=padding)
    expected, _ = dense_in_double(q, k, v, bias, chosen.to_mask().repeat_interleave(2, 1))
    options = {"attn_bias": bias, "is_causal": True, "backend": backend, **rule}
    actual = flash_dmattn_func(q, k, v, attn_mask=padding, **options)
    assert torch.allclose(actual.double(), expected, atol=2e-6)
    by_intervals = flash_dmattn_func(q, k, v, key_intervals=from_padding(padding), **options)
    assert torch.equal(by_intervals, actual)
    without_bias = {**options, "attn_bias": None, "selection_scores": bias}
    apart = flash_dmattn_func(q, k, v, attn_mask=padding, **without_bias)
    again = flash_dmattn_func(q, k, v, key_intervals=chosen, backend=backend)
    assert torch.equal(apart, again)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_varlen_under_a_rule_equals_single_sequences(rule):
    torch.manual_seed(2)
    lengths = [13, 1, 0, 26]
    total = sum(lengths)
    q, k, v = (torch.randn(total, heads, 16) for heads in (4, 2, 2))
    scores = torch.randn(total, 2)
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    packed = flash_dmattn_varlen_func(
        q, k, v, offsets, offsets, is_causal=True, selection_scores=scores, **rule
    )
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        single = flash_dmattn_func(
            *(t[None, begin:end] for t in (q, k, v)), is_causal=True,
            selection_scores=scores[None, begin:end].transpose(1, 2), **rule,
        )  # fmt: skip
        assert torch.allclose(packed[begin:end], single[0], atol=1e-6)


def test_constructors_take_documents_masks_and_positions():
    cu = torch.tensor([0, 4, 10]).int()
    mask = torch.rand(2, 10) < 0.7
    documents = packed_documents(cu).to_mask() & mask[:, None, None]
    places = {"cu_seqlens_k": cu, "key_mask": mask}
    window = sliding_window(10, 3).to_mask()
    assert torch.equal(sliding_window(10, 3, **places).to_mask(), documents & window)
    assert torch.equal(packed_documents(cu, key_mask=mask).to_mask(), documents)
    whole = packed_documents(cu, is_causal=False).to_mask() & mask[:, None, None]
    assert torch.equal(from_padding(mask, cu_seqlens_k=cu).to_mask(), whole)
    prefix = torch.arange(10) - torch.tensor([0] * 4 + [4] * 6) < 2
    assert torch.equal(prefix_lm(10, 2, **places).to_mask(), documents | (whole & prefix))
    order = torch.randperm(10)
    shuffled = {"key_positions": order, "key_mask": mask[:, order], "query_position": 0}
    for make in (
        lambda **places: sliding_window(10, 3, **places),
        lambda **places: prefix_lm(10, 2, **places),
        lambda **places: packed_documents(cu, **places),
    ):
        expected = make(key_mask=mask).to_mask()
        assert torch.equal(make(**shuffled).to_mask(), expected[..., order])


def test_counts_beyond_int32_show_every_key():
    scores = torch.randn(1, 1, 9)
    everything = sliding_window(9, 9).to_mask()
    for count in (2**31 - 1, 2**40, 2**63):
        assert torch.equal(sliding_window(9, count).to_mask(), everything)
        for places in ({}, {"query_position": 0}):
            chosen = select_key_intervals(
                scores, 0, recent_window=count, sink_tokens=count, **places
            )
            assert torch.equal(chosen.to_mask(), everything)
        assert torch.equal(select_key_intervals(scores, count).to_mask(), everything)


def test_window_of_no_keys_needs_no_scores():
    q = torch.randn(1, 9, 2, 8)
    assert (flash_dmattn_func(q, q, q, keep_window_size=0, is_causal=True) == 0).all()


def test_masked_keys_are_no_sinks():
    q = torch.randn(1, 9, 2, 8)
    bias = torch.zeros(1, 2, 9)
    bias[..., :2] = -torch.inf
    mask = torch.arange(9)[None] >= 2
    options = {"is_causal": True, "keep_window_size": 0, "sink_tokens": 1}
    by_mask = flash_dmattn_func(q, q, q, attn_mask=mask, **options)
    assert torch.allclose(flash_dmattn_func(q, q, q, attn_bias=bias, **options), by_mask)


@pytest.mark.parametrize("window", [3, 20])
def test_varlen_chooses_by_scores_as_single_sequences_do(window):
    """Keys with a NaN score, and keys that the bias masks, are not selected."""
    torch.manual_seed(3)
    q, k, v = (torch.randn(14, heads, 16) for heads in (4, 2, 2))
    scores, bias = torch.randn(14, 2), torch.randn(14, 2)
    scores[torch.rand(14, 2) < 0.3] = torch.nan
    bias[torch.rand(14, 2) < 0.3] = -torch.inf
    offsets = torch.tensor([0, 14]).int()
    options = {"is_causal": True, "keep_window_size": window}
    packed = flash_dmattn_varlen_func(
        q, k, v, offsets, offsets, attn_bias=bias, selection_scores=scores, **options
    )
    single = flash_dmattn_func(
        q[None],
        k[None],
        v[None],
        attn_bias=bias.t()[None],
        selection_scores=scores.t()[None],
        **options,
    )
    assert torch.allclose(packed, single[0], atol=1e-6)
