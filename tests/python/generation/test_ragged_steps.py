"""Compares ragged steps, in which each sequence has any number of new tokens, with each sequence alone."""

import random

import numpy as np
import pytest
import torch

import ragged_steps
from flash_dmattn import KVSlots, RaggedBatch, extend_ragged
from flash_dmattn.generation import ragged, ragged_batch
from gpu import where_there_is_a_gpu
from pool_rows import RULES, Place

BACKENDS = [Place("cpu"), Place("reference", value_dim=5)]


def places(*on_cpu, **on_gpu):
    """Parametrizes a test by these places and by both 16-bit dtypes on a GPU."""
    dtypes = (torch.bfloat16, torch.float16)
    on_gpu = where_there_is_a_gpu(*((Place("cuda", "cuda", dtype, **on_gpu),) for dtype in dtypes))
    return pytest.mark.parametrize("place", [*on_cpu, *on_gpu], ids=str)


@places(*BACKENDS)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_ragged_steps_equal_single_sequences(place, rule):
    ragged_steps.check_sequences_alone(place, rule, random.Random(1))


@places(Place("cpu", value_dim=6))
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("scores_are_bias", [True, False])
def test_scores_as_bias_or_selection_equal_single_sequences(place, rule, scores_are_bias):
    options = {"scores_are_bias": scores_are_bias, "softcap": 3.0}
    ragged_steps.check_sequences_alone(place, rule, random.Random(2), **options)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_split_chunks_equal_single_sequences(rule, monkeypatch):
    monkeypatch.setitem(ragged._PART_SIZES, "cpu", ragged.PartSize(0, 6))
    ragged_steps.check_sequences_alone(Place("cpu"), rule, random.Random(3))


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("lengths", [(1, 1), (17, 1), (23, 9), (40, 4)], ids=str)
def test_sequence_has_same_bits_in_any_batch(rule, lengths):
    torch.manual_seed(4)
    place = Place("cpu")
    *states, scores = ragged_steps.tokens_of(place, sum(lengths))
    results = []
    for others in ((), (1, 1, 20), (31, 1, 9)):  # prompts before and after it
        pool, _ = place.pool(rule)
        outs = []
        for start, length in ((0, lengths[0]), lengths):
            tokens = slice(start, start + length)
            parts = [ragged_steps.tokens_of(place, count) for count in others]
            parts.insert(1, (*(t[tokens] for t in states), scores[:, tokens]))
            offsets = [0, *torch.tensor([len(part[0]) for part in parts]).cumsum(0).tolist()]
            begins = [True] * len(parts)
            number = min(1, len(others))
            begins[number] = start == 0
            batch = RaggedBatch(offsets, place.rows(2, 5, 0, 6)[: len(parts)], begins)
            *joined, last = zip(*parts, strict=True)
            out = extend_ragged(pool, batch, *map(torch.cat, joined), torch.cat(last, 1))
            outs.append(out[offsets[number] : offsets[number + 1]])
        results.append(torch.cat(outs))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("part", [ragged.PartSize(1, 128), ragged.PartSize(0, 6)], ids=str)
@places(*BACKENDS, value_dim=8)
def test_padded_sequences_equal_single_sequences(place, part, rule, monkeypatch):
    monkeypatch.setitem(ragged_batch._LENGTHS_TO_PAD, place.device, 2)
    monkeypatch.setitem(ragged_batch._CHUNK_PADDING, place.device, 3)
    monkeypatch.setitem(ragged._PART_SIZES, place.device, part)
    ragged_steps.check_sequences_alone(place, rule, random.Random(4))


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("part", [ragged.PartSize(4, 4096), ragged.PartSize(0, 6)], ids=str)
@places(*BACKENDS, value_dim=8)
def test_padded_chunks_keep_the_keys_of_single_chunks(place, part, rule, monkeypatch):
    monkeypatch.setitem(ragged._PART_SIZES, place.device, part)
    ragged_steps.check_kept_keys_of_padded_chunks(place, rule)


def test_rows_without_sequence_stay_unchanged():
    torch.manual_seed(3)
    place = Place("cpu")
    pool, blocks = place.pool(RULES[0])
    before = blocks.clone()
    states = ragged_steps.tokens_of(place, 9)
    batch = RaggedBatch([0, 4, 5, 8], place.rows(2, 5, 0), [True, False, False])
    out = extend_ragged(pool, batch, *states)
    assert not out[8:].any() and out[:8].any(-1).all()
    changed = [row for row in range(len(blocks)) if not torch.equal(blocks[row], before[row])]
    assert changed == [0, 2, 5]


def test_sequence_without_tokens_may_share_a_row():
    batch = RaggedBatch([0, 3, 3, 4], torch.tensor([1, 1, 0], dtype=torch.int32))
    assert [group.rows.tolist() for group in batch._groups] == [[1], [0]]


def test_batch_from_numpy_numbers_equals_one_from_ints():
    offsets, begins = np.array([0, 3, 4]), np.array([True, False])
    rows = torch.tensor([1, 0], dtype=torch.int32)
    groups = RaggedBatch(offsets, rows, begins)._groups
    expected = RaggedBatch([0, 3, 4], rows, [True, False])._groups
    assert [(g.tokens, g.begins) for g in groups] == [(g.tokens, g.begins) for g in expected]


def test_prompts_of_similar_lengths_run_together(monkeypatch):
    rows = torch.tensor([5, 3, 4, 1, 0], dtype=torch.int32)
    batch = ([0, 17, 17, 40, 44, 75], rows, [True] * 5)
    apart = RaggedBatch(*batch)._groups
    tokens = [slice(0, 17), slice(17, 40), slice(40, 44), slice(44, 75)]
    assert [group.tokens for group in apart] == tokens
    monkeypatch.setitem(ragged_batch._LENGTHS_TO_PAD, "cpu", 3)
    together, alone = RaggedBatch(*batch)._groups
    assert (together.rows.tolist(), together.tokens.shape) == ([5, 4, 0], (3, 31))
    assert together.lengths.tolist() == [17, 23, 31]
    assert (alone.rows.tolist(), alone.tokens) == ([1], slice(40, 44))


def test_later_chunks_run_together_while_padding_at_most_doubles_them(monkeypatch):
    monkeypatch.setitem(ragged_batch._CHUNK_PADDING, "cpu", 2)
    rows = torch.arange(9, dtype=torch.int32)
    offsets = [0, 4, 104, 616, 620, 920, 921, 1121, 1125, 1129]
    batch = RaggedBatch(offsets, rows, [False] * 8 + [True])
    groups = [(group.rows.tolist(), group.length, group.begins) for group in batch._groups]
    assert groups == [
        ([0, 3, 7], 4, False), ([1, 2, 4, 6], 512, False), ([5], 1, False), ([8], 4, True),
    ]  # fmt: skip
    assert batch._groups[1].lengths.tolist() == [100, 512, 300, 200]


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("pending", [0, 3])
def test_padded_rows_beside_pending_tokens_equal_rows_alone(pending, masks):
    lengths, n = torch.tensor([13, 0, 6], dtype=torch.uint8), 13
    q, k, v = (torch.randn(3, pending + n, 2, 8) for _ in range(3))
    scores, shown = torch.randn(3, 2, pending + n), torch.rand(3, n) < 0.8

    def held_positions(slots, row):
        return [slots.positions[row, h, : slots.counts[row, h, 0]].sort()[0] for h in range(2)]

    def extended(rows, count):
        slots = KVSlots(len(q[rows]), 2, 4, 8, recent_window=2, chunk=5)
        if pending:
            slots.append(k[rows, :pending], v[rows, :pending], scores[rows, :, :pending])
        new = slice(pending, pending + count)
        options = {"key_mask": shown[rows, :count]} if masks else {}
        if len(q[rows]) == 3:
            options["lengths"] = lengths
        out = slots.extend(q[rows, new], k[rows, new], v[rows, new], scores[rows, :, new], **options)  # fmt: skip
        return out, slots

    out, slots = extended(slice(3), n)
    for row, count in enumerate(lengths.tolist()):
        alone, own = extended(slice(row, row + 1), count)
        torch.testing.assert_close(out[row, :count], alone[0])
        assert not out[row, count:].any()
        if count or not pending:  # alone, extending by nothing does not commit pending tokens
            assert all(map(torch.equal, held_positions(slots, row), held_positions(own, 0)))
            assert slots.seen[row] == own.seen[0]


@pytest.mark.parametrize(
    "begins", [[True, False, False, False], [False, True, False, False]], ids=str
)
def test_groups_in_order_equal_groups_before_padding(begins):
    place = Place("cpu")
    pool, _ = place.pool(RULES[0])
    other = pool.snapshot()
    batch = RaggedBatch([0, 7, 11, 12, 13], place.rows(2, 5, 0, 6), begins)
    assert batch._is_in_order and not RaggedBatch([1, 8], place.rows(2))._is_in_order
    *states, scores = ragged_steps.tokens_of(place, 16)
    expected, expected_lse = extend_ragged(other, batch, *states, scores, return_lse=True)
    out, lse = extend_ragged(
        pool, batch, *(t[:13] for t in states), scores[:, :13], return_lse=True
    )
    assert torch.equal(out, expected[:13]) and torch.equal(lse, expected_lse[:, :13])
    assert not expected[13:].any() and (expected_lse[:, 13:] == -torch.inf).all()


@pytest.mark.parametrize("tokens", [0, 5])
def test_batch_without_rows_gives_zeros(tokens):
    place = Place("cpu")
    pool, blocks = place.pool(RULES[0])
    before = blocks.clone()
    states = ragged_steps.tokens_of(place, tokens)
    for batch in (RaggedBatch.of_rows(place.rows()), RaggedBatch([0], place.rows())):
        out, lse = extend_ragged(pool, batch, *states, return_lse=True)
        assert out.shape == states[0].shape and not out.any()
        assert (lse == -torch.inf).all()
        assert torch.equal(blocks, before)


@pytest.mark.parametrize("offsets", [[0, 1, 2], [0, 1, 3], [0, 17, 40]])
def test_batch_keeps_rows_after_source_tensor_changes(offsets):
    rows = torch.tensor([5, 3], dtype=torch.int32)
    batch = RaggedBatch(offsets, rows, [offsets[1] > 1] * 2)
    rows.fill_(7)
    assert [row for group in batch._groups for row in group.rows.tolist()] == [5, 3]


def test_batch_does_not_depend_on_default_device(monkeypatch):
    monkeypatch.setitem(ragged_batch._LENGTHS_TO_PAD, "cpu", 2)
    rows = torch.tensor([5, 3, 1], dtype=torch.int32)
    with torch.device("meta"):
        batch = RaggedBatch([0, 17, 40, 41], rows, [True] * 3)
    assert batch._groups[0].tokens.device == torch.device("cpu")
    assert batch._groups[0].lengths.tolist() == [17, 23]


def test_decoding_batch_reads_its_rows_at_each_call():
    rows = torch.tensor([5, 3], dtype=torch.int32)
    batch = RaggedBatch.of_rows(rows)
    rows.fill_(7)
    (group,) = batch._groups
    assert group.rows.tolist() == [7, 7]


def test_adjacent_sequences_of_equal_length_are_views():
    rows = torch.tensor([5, 3, 4, 1], dtype=torch.int32)
    batch = RaggedBatch([2, 3, 4, 24, 44], rows)
    groups = [(group.rows.tolist(), group.tokens) for group in batch._groups]
    assert groups == [([5, 3], slice(2, 4)), ([4, 1], slice(4, 44))]


def test_groups_do_not_depend_on_the_device():
    offsets, begins = [0, 3, 7, 8, 9], [True, True, False, False]
    lengths = [
        [len(group.rows) for group in RaggedBatch(offsets, rows, begins)._groups]
        for rows in (torch.arange(4, dtype=torch.int32, device=d) for d in ("cpu", "meta"))
    ]
    assert lengths[0] == lengths[1] == [1, 1, 2]
