"""A compiled Doge is one graph with the loss and gradients of uncompiled code."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from transformers import masking_utils

from doge_generation import left_padding
from flash_dmattn import KeyIntervals, sliding_window
from flash_dmattn.integrations.transformers import enable_flash_dmattn, key_interval_mask
from flash_dmattn.keys.among_intervals import select_among_intervals
from flash_dmattn.keys.rule import SelectionRule
from python_process import run_forked
from scored_models import VOCABULARY, make_base
from transformers_version import IS_TRANSFORMERS_4

pytestmark = pytest.mark.transformers
# transformers 4 treats lengths as constants when it builds the causal mask, and has no arguments for packed sequences.
since_transformers_5 = pytest.mark.skipif(
    IS_TRANSFORMERS_4, reason="transformers 4 makes its masks for one length"
)

B, S, KEEP = 2, 20, 5
# aot_eager alone runs softplus_backward with strides that differ from those of its trace.
BACKEND = "aot_eager_decomp_partition"


def make_model(**options):
    return enable_flash_dmattn(make_base("Doge", **options)).train()


def training_of(model):
    def loss(ids, inputs):
        return model(input_ids=ids, labels=ids, use_cache=False, **inputs).loss

    return loss


def loss_and_gradients(function, model, ids, inputs):
    loss = function(ids, inputs)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [loss, *torch.autograd.grad(loss, parameters, allow_unused=True)]


def inputs_of_length(name, length):
    """Returns the inputs of a case for two rows of the given length."""
    if name == "padding":
        return {"attention_mask": left_padding(B, length, 4)}
    if name == "packed":
        positions = torch.cat([torch.arange(7), torch.arange(length - 7)])
        return {"position_ids": positions.expand(B, -1).contiguous()}
    return {}


# Operators for selection within documents and for queries that see no key. Their names are still these.
RANKS, BLIND = "argsort", "scatter_add_"


@pytest.mark.parametrize(
    ("name", "operators"),
    [("padding", {BLIND}), pytest.param("packed", {RANKS}, marks=since_transformers_5)],
)
def test_compiled_training_equals_eager_and_has_only_operators_of_its_mask(name, operators):
    torch._dynamo.reset()
    # Several layers share what is computed from a mask. The other case tests what a single layer computes.
    model = make_model(num_hidden_layers=2 if name == "padding" else 1)
    ids, inputs = torch.randint(0, VOCABULARY, (B, S)), inputs_of_length(name, S)
    loss, counter = training_of(model), CompileCounterWithBackend(BACKEND)
    compiled = torch.compile(loss, backend=counter, fullgraph=True)
    actual, expected = (loss_and_gradients(f, model, ids, inputs) for f in (compiled, loss))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)
    (graph,) = counter.graphs
    if not IS_TRANSFORMERS_4:
        called = {str(node.target) for node in graph.graph.nodes}
        assert {RANKS, BLIND} & called == operators


# test_exported_program_equals_eager_and_needs_only_the_library has lengths without a mask.
@since_transformers_5
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("padding", {"keep_window_size": 64}),  # more than there are keys
        ("packed", {}),
        ("sliding_window", {"sliding_window": 8}),
    ],
)
def test_lengths_share_one_graph(name, options):
    torch._dynamo.reset()
    counter, model = CompileCounter(), make_model(num_hidden_layers=1, **options)
    loss = training_of(model)
    compiled = torch.compile(loss, backend=counter, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for length in (11, 16, 40):
            ids, inputs = torch.randint(0, VOCABULARY, (B, length)), inputs_of_length(name, length)
            torch.testing.assert_close(compiled(ids, inputs), loss(ids, inputs))
    assert counter.frame_count == 1


@since_transformers_5
def test_exported_program_equals_eager_and_needs_only_the_library(tmp_path):
    """A process without this package's Python loads the operators' library and the program."""
    model = make_model(num_hidden_layers=1).eval()

    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids):
            return self.model(input_ids=ids, use_cache=False).logits

    length = torch.export.Dim("length", min=KEEP + 1, max=64)
    example, ids = (torch.randint(0, VOCABULARY, (B, n)) for n in (S, 40))
    with torch.no_grad():
        exported = torch.export.export(Logits(), (example,), dynamic_shapes=({1: length},))
        expected = model(ids, use_cache=False).logits
    torch.testing.assert_close(exported.module()(ids), expected)
    called = " ".join(str(node.target) for node in exported.graph.nodes)
    assert not any(operator.rstrip("_") in called for operator in (RANKS, BLIND))
    torch.export.save(exported, tmp_path / "program")
    torch.save(ids, tmp_path / "ids")
    library = next(p for p in torch.ops.loaded_libraries if p.endswith("_C.so"))
    run_forked(
        "import sys, torch\n"
        f"torch.ops.load_library({library!r})\n"
        f"program = torch.export.load('{tmp_path}/program').module()\n"
        f"torch.save(program(torch.load('{tmp_path}/ids')), '{tmp_path}/logits')\n"
        "assert 'flash_dmattn' not in sys.modules\n"
    )
    torch.testing.assert_close(torch.load(tmp_path / "logits"), expected)


@since_transformers_5
def test_documents_become_intervals_without_reading_a_mask():
    positions = torch.cat([torch.arange(13), torch.arange(7)]).expand(B, -1)
    documents = masking_utils.find_packed_sequence_indices(positions)
    causal = masking_utils.causal_mask_function
    if hasattr(masking_utils, "remap_positions_for_packed_sequence"):  # since 5.22
        causal = masking_utils.remap_positions_for_packed_sequence(causal, positions)
    packed = masking_utils.packed_sequence_mask_function(documents)
    function = masking_utils.and_masks(causal, packed)
    intervals = key_interval_mask(B, S, S, mask_function=function)
    shape = {"batch_size": B, "q_length": S, "kv_length": S}
    dense = masking_utils.sdpa_mask(**shape, mask_function=function, allow_is_causal_skip=False)
    assert intervals.dtype == torch.int32
    torch.testing.assert_close(KeyIntervals(intervals, S).to_mask(), dense)


def test_selection_without_intervals_equals_eager_or_raises():
    """If it is known without the values that intervals cannot describe the selection, it takes another form. Otherwise the call
    raises when it runs."""
    torch._dynamo.reset()
    window, scores = sliding_window(S, 9), torch.randn(1, 1, S)
    assert select_among_intervals(scores, window, SelectionRule(KEEP)) is None
    compiled = torch.compile(select_among_intervals, backend="eager", fullgraph=True)
    assert compiled(scores, window, SelectionRule(KEEP)) is None
    with pytest.raises(RuntimeError, match="compiled selection"):
        compiled(scores, KeyIntervals(window.intervals, S), SelectionRule(KEEP))


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("shape", [(B, S), (B, 1, S)])
def test_padding_of_floating_point_is_refused(shape, fullgraph):
    """An additive mask would hide the tokens and show the padding, and compiled code cannot tell it from ones and zeros."""
    torch._dynamo.reset()
    model, ids = make_model(), torch.randint(0, VOCABULARY, (B, S))
    compiled = torch.compile(model, backend="eager", fullgraph=fullgraph)
    mask = torch.zeros(shape)
    mask[0, ..., :4] = torch.finfo(torch.float32).min
    error = torch._dynamo.exc.Unsupported if fullgraph else ValueError
    with pytest.raises(error, match="attention_mask: got torch.float32 .* expected bool or int"):
        compiled(ids, attention_mask=mask, use_cache=False)
