"""Steps in which every sequence brings any number of tokens, against each sequence alone."""

import random

import pytest
import torch

import ragged_steps
from flash_dmattn import KVSlots, RaggedBatch, extend_ragged, ragged
from pool_rows import RULES, Place

BACKENDS = [Place("cpu"), Place("reference")]


@pytest.mark.parametrize("place", BACKENDS, ids=lambda place: place.backend)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_steps_of_many_sequences_equal_each_alone(place, rule):
    ragged_steps.check_sequences_alone(place, rule, random.Random(1))


@pytest.mark.parametrize("scores_are_bias", [True, False])
def test_scores_may_choose_and_add_nothing(scores_are_bias):
    ragged_steps.check_sequences_alone(
        Place("cpu"), RULES[1], random.Random(2), scores_are_bias=scores_are_bias, softcap=3.0
    )


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_chunks_in_several_parts_equal_each_alone(rule, monkeypatch):
    monkeypatch.setitem(ragged._TOKENS_OF_A_PART, "cpu", (0, 6))
    ragged_steps.check_sequences_alone(Place("cpu"), rule, random.Random(3))


def test_rows_of_no_sequence_stay_as_they_are():
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


@pytest.mark.parametrize(
    "offsets, rows, begins, message",
    [
        ([0, 3], [1, 2], None, r"rows: got torch.int32 of shape \(2,\)"),
        ([0, 3, 2], [1, 2], None, r"offsets\[1\]: got 3 before 2"),
        ([-1, 3], [1], None, r"offsets\[0\]: got -1"),
        ([0, 3], [1], [True, False], "begins: got 2 of them, expected 1"),
    ],
)
def test_bad_batches_raise(offsets, rows, begins, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        RaggedBatch(offsets, torch.tensor(rows, dtype=torch.int32), begins)


def test_fewer_tokens_than_the_batch_has_raise():
    pool = KVSlots(3, 2, 4, 8)
    states = ragged_steps.tokens_of(Place(), 4)
    batch = RaggedBatch([0, 5], torch.tensor([1], dtype=torch.int32))
    with pytest.raises(ValueError, match="^query: got 4 tokens, expected 5 or more"):
        extend_ragged(pool, batch, *states)


def test_prompts_of_similar_lengths_run_together():
    rows = torch.tensor([5, 3, 4, 1, 0], dtype=torch.int32)
    batch = RaggedBatch([0, 17, 17, 40, 44, 75], rows, [True] * 5)
    together, alone = batch._groups
    assert (together.rows.tolist(), together.tokens.shape) == ([5, 4, 0], (3, 31))
    assert together.lengths.tolist() == [17, 23, 31]
    assert (alone.rows.tolist(), alone.tokens) == ([1], slice(40, 44))


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
def test_rows_of_a_batch_are_those_when_it_was_made(offsets):
    rows = torch.tensor([5, 3], dtype=torch.int32)
    batch = RaggedBatch(offsets, rows, [offsets[1] > 1] * 2)
    rows.fill_(7)
    assert [row for group in batch._groups for row in group.rows.tolist()] == [5, 3]


def test_rows_of_a_decoding_batch_are_read_at_each_call():
    rows = torch.tensor([5, 3], dtype=torch.int32)
    batch = RaggedBatch.of_rows(rows)
    rows.fill_(7)
    (group,) = batch._groups
    assert group.rows.tolist() == [7, 7]


def test_neighbours_of_one_length_are_views():
    rows = torch.tensor([5, 3, 4, 1], dtype=torch.int32)
    batch = RaggedBatch([2, 3, 4, 24, 44], rows)
    groups = [(group.rows.tolist(), group.tokens) for group in batch._groups]
    assert groups == [([5, 3], slice(2, 4)), ([4, 1], slice(4, 44))]
