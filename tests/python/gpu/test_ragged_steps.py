"""Compares ragged steps on the GPU, in which each sequence has any number of new tokens, with attention over whole
sequences on the CPU."""

import random

import pytest
import torch

import ragged_steps
from flash_dmattn.generation import ragged, ragged_batch
from pool_rows import RULES, Place


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_ragged_steps_equal_single_sequences(dtype, rule):
    place = Place("cuda", "cuda", dtype)
    ragged_steps.check_sequences_alone(place, rule, random.Random(1))


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_padded_prompts_equal_single_sequences(rule, monkeypatch):
    monkeypatch.setitem(ragged_batch._LENGTHS_TO_PAD, "cuda", 2)
    place = Place("cuda", "cuda", torch.bfloat16, value_dim=8)
    ragged_steps.check_sequences_alone(place, rule, random.Random(4))


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("part", [ragged.PartSize(4, 4096), ragged.PartSize(0, 6)], ids=str)
def test_padded_chunks_keep_the_keys_of_single_chunks(part, rule, monkeypatch):
    monkeypatch.setitem(ragged._PART_SIZES, "cuda", part)
    place = Place("cuda", "cuda", torch.bfloat16, value_dim=8)
    ragged_steps.check_kept_keys_of_padded_chunks(place, rule)


def test_scores_that_only_select_equal_single_sequences():
    place = Place("cuda", "cuda", torch.float16)
    ragged_steps.check_sequences_alone(
        place, RULES[1], random.Random(2), scores_are_bias=False, softcap=3.0
    )
