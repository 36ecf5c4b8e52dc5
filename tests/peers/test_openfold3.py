"""Runs OpenFold3's own test of its triangle attention, with our function in the place of its formula (`make test-peers`).

The snapshot's numbers are below 2e-4 and its tolerance is 1e-4, so each result is also compared with the formula.
"""

from pathlib import Path

import numpy
import pytest
import torch
from openfold3.core.model.primitives import attention
from openfold3.tests import test_triangular_attention as theirs

from flash_dmattn import triangle_attention

SNAPSHOTS = Path(theirs.__file__).parent / "test_data/snapshots/test_triangular_attention/nvidia"
test_shape = theirs.test_shape


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    made, formula = [], attention._attention

    def attend(query, key, value, biases, use_high_precision=False):
        mask_bias, triangle_bias = biases  # [B, N, 1, 1, K], 0 where visible; [B, 1, H, Q, K]
        made.append(query.shape)
        out = triangle_attention(query, key, value, triangle_bias, mask_bias == 0, scale=1.0)
        torch.testing.assert_close(out, formula(query, key, value, biases), atol=1e-7, rtol=1e-5)
        return out

    monkeypatch.setattr(attention, "_attention", attend)
    yield
    assert made


@pytest.fixture
def device():
    return "cpu"


@pytest.fixture
def seeded_rng():
    with torch.random.fork_rng():
        torch.manual_seed(123)
        yield


@pytest.fixture
def ndarrays_regression(request):
    """Compares with the snapshot of the test, as pytest-regressions does."""

    class Snapshot:
        @staticmethod
        def check(arrays, default_tolerance):
            starting = request.node.callspec.params["starting"]
            with numpy.load(SNAPSHOTS / f"test_shape_cpu_{starting}_.npz") as stored:
                numpy.testing.assert_allclose(
                    arrays["output"], stored["output"], **default_tolerance
                )

    return Snapshot
