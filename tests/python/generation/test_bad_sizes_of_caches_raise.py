"""A KV cache, or a batch of one, with meaningless sizes or rules raises an error that names the argument."""

import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_dmattn import KVSlots, RaggedBatch


def integers(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def slots(**options):
    sizes = {"batch": 2, "heads_kv": 2, "keep_window_size": 4, "head_dim": 8}
    return lambda: KVSlots(**(sizes | options))


def half_slots_on_gpu(**options):
    return slots(device="cuda", **{"dtype": torch.float16, **options})


def float32_tensors_on_gpu():
    k, scores = torch.zeros(2, 2, 4, 8, device="cuda"), torch.zeros(2, 2, 4, device="cuda")
    sizes = ((2, 2, 4), (2, 2, 2), 2)
    return KVSlots.from_tensors(
        4, k, k, scores, *(torch.zeros(s, dtype=torch.int32, device="cuda") for s in sizes)
    )


def ragged(offsets=(0, 3), rows=(1,), begins=None):
    rows = integers(*rows) if isinstance(rows, tuple) else rows
    return lambda: RaggedBatch(offsets, rows, begins)


@pytest.mark.parametrize(
    "words, make",
    [
        ("keep_window_size: got 0, expected 1 or more", slots(keep_window_size=0)),
        ("keep_window_size: got None, expected a number of keys", slots(keep_window_size=None, score_threshold=0.5)),
        ("keep_window_size: got 3 sizes, expected one, or 2", slots(keep_window_size=(1, 2, 3))),
        ("keep_window_size: got a rule of 2147483647 keys for each head, for which there is no memory",
         slots(keep_window_size=10**12, head_dim=256, batch=64)),
        ("selection: got 'global', expected 'per_query'", slots(selection="global")),
        ("batch: got 1.5", slots(batch=1.5)),
        ("chunk: got -2", slots(chunk=-2)),
        ("value_dim: got 9, expected 1 to 8, the head_dim", slots(value_dim=9)),
        ("dtype: got torch.float64", slots(dtype=torch.float64)),
        ("backend: got 'triton', which has no KV cache", slots(backend="triton")),
        ("dtype: got torch.float32 on cuda:0, expected bfloat16 or float16", half_slots_on_gpu(dtype=torch.float32)),
        ("head_dim: got 12 on cuda:0, expected a multiple of 8", half_slots_on_gpu(head_dim=12)),
        ("value_dim: got 4 on cuda:0, expected a multiple of 8", half_slots_on_gpu(value_dim=4)),
        ("keep_window_size: got 129 sizes on cuda:0, expected at most 128 there",
         half_slots_on_gpu(heads_kv=129, keep_window_size=range(129))),
        ("k: got torch.float32 on cuda:0", float32_tensors_on_gpu),
        ("rows: got torch.int32 of shape (2,), expected torch.int32 of shape (1,)", ragged(rows=(1, 2))),
        ("rows: got torch.int64 of shape (1,)", ragged(rows=torch.tensor([1]))),
        ("rows: got list, expected a torch.Tensor", ragged(rows=[1])),
        ("rows: got torch.int64 of shape (2,)", lambda: RaggedBatch.of_rows(torch.tensor([0, 1]))),
        ("rows[1]: got 1, which rows[0] is, expected no row twice", ragged([0, 3, 6], (1, 1), [True, True])),
        ("rows[2]: got 1, which rows[0] is, expected no row twice", ragged([0, 1, 2, 5], (1, 0, 1))),
        ("rows[1]: got -1, expected 0 or more for a later chunk of 3 tokens", ragged([0, 1, 4], (-1, -1))),
        ("offsets[1]: got 3 before 2", ragged([0, 3, 2], (1, 2))),
        ("offsets[0]: got -1", ragged([-1, 3])),
        ("offsets[1]: got 2.0, expected an integer", ragged([0, 2.0])),
        ("offsets[1]: got 4294967296, expected at most 2147483647", ragged([0, 2**32])),
        ("offsets: got none, expected one more than there are sequences", ragged([], ())),
        ("offsets: got Tensor, expected a sequence of integers on the host", ragged(torch.tensor([0, 3]))),
        ("begins: got 2 flags, expected 1", ragged(begins=[True, False])),
        ("begins[0]: got 'no', expected True or False", ragged(begins=["no"])),
        ("begins: got Tensor, expected a sequence of bools on the host", ragged(begins=torch.ones(1).bool())),
    ],
)  # fmt: skip
def test_bad_size_rule_or_batch_raises_naming_it(words, make):
    mode = FakeTensorMode() if "cuda" in words else torch.no_grad()
    with mode, pytest.raises((ValueError, TypeError, RuntimeError), match=f"^{re.escape(words)}"):
        make()
