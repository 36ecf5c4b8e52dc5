"""Tests that the sides of the benchmarks compute the same attention, and that its useful work is counted right."""

import dataclasses

import pytest
import torch

from flash_dmattn.check.oracle import causal_elements
from harness import record, sides
from harness.case import (
    BIASED,
    BIASED_TOP,
    DELAYED,
    DELAYED_TOP,
    DENSE,
    DENSE_MASKS,
    DOCUMENTS,
    EVICTED,
    FORGETTING,
    GLOBAL,
    KINDS,
    PER_QUERY,
    Case,
    useful_tflops,
)
from harness.cases import attention
from harness.clock import Rounds, Step, costs, peak_of
from harness.sides import build, draw


def test_packed_documents_show_as_much_as_dense_sequences():
    packed = Case(DOCUMENTS, 96, 16, 32, heads_q=2, heads_kv=1)
    batch = Case(DENSE, 32, 16, heads_q=2, heads_kv=1, batch=3)
    assert packed.visible_elements == batch.visible_elements
    rows = attention.measure(packed, "float32", "cpu", ["cpu", "sdpa"], 1)
    assert [row["side"] for row in rows] == ["cpu", "sdpa"]
    visible = draw(packed, torch.float32, "cpu").intervals.to_mask()
    assert int(visible.sum()) * packed.heads_q == packed.visible_elements


def test_side_without_a_backward_has_a_row_without_one():
    step = Step(lambda: torch.zeros(1), [], torch.zeros(1))
    (cost,) = costs({"fa3": step}, "cpu", Rounds(1)).values()
    assert cost.backward_ms is None
    row = record.row(Case(DENSE, 32, 16), "fa3", "float32", cost.forward_ms)
    assert record.format_row(row).count(" / –") == 2


@pytest.mark.parametrize("window", [None, 5, 40, 100])
def test_useful_work_counts_visible_elements(window):
    case = Case(PER_QUERY, 64, 16, window, heads_q=4, heads_kv=2, batch=3)
    visible = causal_elements(64, 64).sum(-1).clamp(max=window or 64).sum().item()
    assert case.visible_elements == 3 * 4 * visible
    assert case.useful_flops("forward") == 4 * 16 * case.visible_elements
    row = record.row(case, "cpu", "float32", forward=1e-9 * case.visible_elements)
    assert useful_tflops(row)[0] == pytest.approx(64)


@pytest.mark.parametrize(
    ("kind", "window"),
    [(kind, None if kind == DENSE else 16) for kind in KINDS] + [(EVICTED, None)],
)
def test_sides_give_same_result(monkeypatch, kind, window):
    """All timed sides compute the same attention, except that torch's side uses the bias only to select keys."""
    monkeypatch.setattr(sides, "RECENT", 24)
    inputs = draw(Case(kind, 96, 16, window, heads_q=4, heads_kv=2, batch=2), torch.float32, "cpu")
    if kind in (PER_QUERY, GLOBAL):
        inputs = dataclasses.replace(inputs, bias=1e-6 * inputs.bias)
    ours, torchs = build("cpu", inputs), build("sdpa", inputs)
    out, expected = ours.forward(), torchs.forward()
    seen = expected.isfinite().all(-1)  # torch has NaN for a query that sees nothing
    assert seen.float().mean() > 0.9
    torch.testing.assert_close(out.transpose(1, 2)[seen], expected[seen], rtol=1e-4, atol=1e-5)
    if seen.all():
        for a, b in zip(ours.backward(out)[:3], torchs.backward(expected)[:3], strict=True):
            torch.testing.assert_close(a.transpose(1, 2), b, rtol=1e-4, atol=1e-4)


WITHOUT_WINDOW = (DENSE, BIASED, DELAYED, FORGETTING, EVICTED)
WITH_WINDOW = set(KINDS) - {DENSE, BIASED, DELAYED}


@pytest.mark.parametrize(
    "kind, window",
    [*((kind, None) for kind in WITHOUT_WINDOW), *((kind, 64) for kind in sorted(WITH_WINDOW))],
)
def test_visible_elements_are_as_many_as_useful_work_counts(kind, window):
    case = Case(kind, 2048, 16, window, heads_q=4, heads_kv=4)
    inputs = draw(case, torch.float32, "cpu")
    visible = causal_elements(2048, 2048).expand(1, 4, 2048, 2048)
    if inputs.mask is not None:
        visible = visible & inputs.mask
    elif kind == FORGETTING and window:
        sums = inputs.log_fgate.cumsum(1).mT
        visible = visible & (sums[..., None] - sums[..., None, :] >= sides.PRUNE)
    elif (chosen := sides._chosen(inputs)) is not None:
        visible = visible & chosen.to_mask()
    # Random scores decide how many of these kinds are visible. The 64 keys of a row lie 4 % nearer to its start or its end.
    random_kinds = {
        GLOBAL: 0.12,
        DENSE_MASKS: 0.02,
        BIASED_TOP: 0.02,
        DELAYED_TOP: 0.02,
        EVICTED: 0.02,
    }
    tolerance = random_kinds.get(kind, 0)
    assert int(visible.sum()) == pytest.approx(case.visible_elements, rel=tolerance)


def test_peak_counts_the_mask_that_a_rival_needs():
    inputs = draw(Case(PER_QUERY, 256, 16, 16, heads_q=2, heads_kv=2), torch.float32, "cpu")
    step = build("sdpa", inputs)
    assert step.mask_bytes == 2 * 256 * 256
    assert peak_of(step, "cpu") > step.mask_bytes
