"""Every form of arguments for packed sequences either gives the results of single documents or raises."""

import pytest
import torch

from dense_attention import HKV, HQ, S, assert_same, attend, dense_attention, make_states
from flash_dmattn import packed_documents
from flash_dmattn.integrations.transformers.attention import attention_forward

OFFSETS = torch.tensor([0, 20, 21, S], dtype=torch.int32)
POSITIONS = torch.cat([torch.arange(n) for n in (20, 1, 16)])[None]
LONGEST = {"max_length_q": 20, "max_length_k": 20}
OFFSET_ARGUMENTS = {"cu_seq_lens_q": OFFSETS, "cu_seq_lens_k": OFFSETS}
ONES = torch.ones(1, S, dtype=torch.bool)


def expected_of(states):
    documents = packed_documents(OFFSETS).to_mask()
    return dense_attention(*states, documents.expand(states[0].shape[0], 1, S, S), None)


@pytest.mark.parametrize("mask", [None, ONES, ONES.long()[:, None], ONES.long()[:, None, None]])
@pytest.mark.parametrize(
    "packed",
    [
        OFFSET_ARGUMENTS,
        OFFSET_ARGUMENTS | {"max_length_q": 20},
        OFFSET_ARGUMENTS | LONGEST,
        {"position_ids": POSITIONS},
        {"position_ids": POSITIONS[0]},
    ],
)
def test_packed_documents_equal_dense_attention_under_their_mask(packed, mask):
    states = make_states(batch=1)
    assert_same(states, attend(*states, mask, None, **packed), expected_of(states))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_offsets_hide_keys_of_a_dense_mask_of_a_model(dtype):
    states, visible = make_states(batch=1), torch.rand(1, HQ, S, S) < 0.7
    visible |= torch.eye(S, dtype=torch.bool)
    mask = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)
    mask = mask if dtype.is_floating_point else visible.to(dtype)
    out, _ = attention_forward(
        torch.nn.Identity(), *(t.transpose(1, 2) for t in states), mask, **OFFSET_ARGUMENTS
    )
    same_document = packed_documents(OFFSETS, is_causal=False).to_mask()
    assert_same(states, out, dense_attention(*states, visible & same_document, None))


@pytest.mark.parametrize("mask", [None, ONES.expand(2, -1)])
@pytest.mark.parametrize("rows", [1, 2])
def test_positions_that_begin_again_separate_documents_of_every_row(rows, mask):
    states = make_states()
    out = attend(*states, mask, None, position_ids=POSITIONS.expand(rows, -1))
    assert_same(states, out, expected_of(states))


def test_rows_with_different_documents_equal_single_calls():
    states, bias = make_states(), torch.randn(1, HKV, S, requires_grad=True)
    positions = torch.cat([POSITIONS, torch.arange(S)[None]])
    out = attend(*states, None, bias, position_ids=positions, keep_window_size=5)
    rows = [[t[i : i + 1] for t in states] for i in range(2)]
    expected = [
        attend(*rows[0], None, bias, position_ids=POSITIONS, keep_window_size=5),
        attend(*rows[1], None, bias, keep_window_size=5),
    ]
    assert_same((*states, bias), out, torch.cat(expected))


def test_positions_that_begin_where_padding_ends_are_no_documents():
    """Generation with padding counts positions as 1, 1, 1, 0, 1, 2 ..."""
    padding = ONES.clone()
    padding[0, :3] = False
    positions = (padding.long().cumsum(1) - 1).masked_fill(~padding, 1)
    states = make_states(batch=1)
    out = attend(*states, padding, None, position_ids=positions)
    assert torch.equal(out, attend(*states, padding, None))


def test_compiled_call_with_positions_equals_dense_attention():
    torch._dynamo.reset()
    states = [t.detach() for t in make_states()]
    positions = POSITIONS.expand(2, -1)
    padding = torch.ones(2, S, dtype=torch.bool)
    padding[0, 30:] = False
    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    out = compiled(*states, None, None, position_ids=positions)
    torch.testing.assert_close(out, expected_of(states), atol=2e-5, rtol=2e-5)
    out = compiled(*states, None, None, position_ids=positions, sliding_window=6)
    distance = torch.arange(S)[:, None] - torch.arange(S)
    documents = packed_documents(OFFSETS).to_mask() & (distance < 6)
    expected = dense_attention(*states, documents.expand(2, 1, S, S), None)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)
    documents = packed_documents(OFFSETS).to_mask() & padding[:, None, None]
    out = compiled(*states, padding, None, position_ids=positions)
    expected = dense_attention(*states, documents, None)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)
