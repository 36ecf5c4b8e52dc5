"""Selection, windows, padding and packed documents read no value of a tensor, because the host would have to wait for the GPU.

Only an uncompiled model reads its masks and positions, once for all layers.
"""

import pytest
import torch

from flash_dmattn import (
    flash_dmattn_func,
    from_padding,
    intersect,
    packed_documents,
    prefix_lm,
    select_key_intervals,
    sliding_window,
)
from operators_called import OperatorsCalled

N = 40
PADDING = torch.arange(N)[None] >= torch.tensor([[3], [0]])
OFFSETS = torch.tensor([0, 13, N])
MAKES = {
    "window": lambda scores: sliding_window(N, 7),
    "prefix": lambda scores: prefix_lm(N, torch.tensor([3, 5])),
    "padding": lambda scores: from_padding(PADDING),
    "packed": lambda scores: packed_documents(
        OFFSETS, key_length=N, query_length=N, max_seqlen_k=N - 13
    ),
    "choice": lambda scores: select_key_intervals(scores, 6, key_mask=PADDING),
    "intersection": lambda scores: intersect(
        select_key_intervals(scores, 6), from_padding(PADDING), sliding_window(N, 9)
    ),
}


INPUTS = {  # inputs of a model, by name
    "no_mask": {},
    "padding": {"attention_mask": PADDING.long()},
    "packed": {"position_ids": torch.cat([torch.arange(13), torch.arange(N - 13)]).repeat(2, 1)},
}


def gradients(leaves, **options):
    q, k, v, bias = leaves
    out = flash_dmattn_func(q, k, v, attn_bias=bias, **options)
    return torch.autograd.grad(out.sum(), leaves)


def make_leaves():
    shapes = [(2, N, 4, 8), (2, N, 2, 8), (2, N, 2, 8), (2, 2, N)]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("name", MAKES)
def test_intervals_read_no_values(name):
    leaves = make_leaves()
    with OperatorsCalled() as called:
        gradients(leaves, key_intervals=MAKES[name](leaves[3]))
    assert called.all and not called.reads()


@pytest.mark.parametrize("selection", ["per_query", "global"])
def test_selection_reads_no_values(selection):
    with OperatorsCalled() as called:
        gradients(
            make_leaves(),
            attn_mask=PADDING,
            is_causal=True,
            keep_window_size=6,
            selection=selection,
        )
    assert called.all and not called.reads()


@pytest.mark.transformers
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("family", ["Doge", "Llama"])
def test_captured_model_step_reads_no_values(family, inputs, monkeypatch):
    """Outside a CUDA graph, transformers reads positions and we read masks, to know exactly what they show."""
    pytest.importorskip("transformers", minversion="5")
    from transformers.utils import import_utils

    from scored_models import make_base, make_ids

    model, ids = make_base(family), make_ids(N)
    model.set_attn_implementation("flash_dmattn")

    def step():
        loss = model(ids, labels=ids, use_cache=False, **INPUTS[inputs]).loss
        return loss, *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)

    expected = step()
    for function in ("is_initialized", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, function, lambda: True)
    monkeypatch.setattr(import_utils, "is_cuda_stream_capturing", lambda: True)
    with OperatorsCalled() as called:
        results = step()
    assert called.all and not called.reads()
    torch.testing.assert_close(results, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.transformers
@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("family", ["Doge", "Llama"])
def test_layers_read_masks_and_positions_once(family, name):
    """Only a Doge with packed texts reads more per layer: whether the layer's selected keys are consecutive."""
    pytest.importorskip("transformers", minversion="5")
    from scored_models import make_base, make_ids

    counts = []
    for layers in (1, 4):
        model = make_base(family, num_hidden_layers=layers)
        model.set_attn_implementation("flash_dmattn")
        with OperatorsCalled() as called:
            model(make_ids(N), use_cache=False, **INPUTS[name])
        counts.append(len(called.reads()))
    assert counts[1] - counts[0] == (3 if (family, name) == ("Doge", "packed") else 0)
