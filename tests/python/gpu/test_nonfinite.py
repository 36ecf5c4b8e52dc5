"""Non-finite numbers saturate and propagate correctly on every route of the GPU."""

from pathlib import Path

import pytest
import torch

from flash_dmattn import flash_dmattn_func
from flash_dmattn.kernels import kernel_names
from gpu import assert_passes_in_the_older_family
from nonfinite_routes import LENGTH, ROUTES, Setting

DTYPES = [torch.bfloat16, torch.float16]
routes = pytest.mark.parametrize("route", ROUTES)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "f16"])


@routes
@dtypes
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_nonfinite_output_gradients_count_as_zero(route, dtype, value):
    setting = Setting(route, dtype)
    hit = torch.rand(setting.dout.shape, device="cuda") < 0.01
    bad, cleaned = (setting.dout.masked_fill(hit, x) for x in (value, 0))
    actual = setting.gradients(bad, deterministic=True)
    expected = setting.gradients(cleaned, deterministic=True)
    for got, wanted in zip(actual, expected, strict=True):
        assert wanted.isfinite().all() and torch.equal(got, wanted)


def test_older_family_gives_same_nonfinite_results():
    families = {name.split()[0] for name in kernel_names("cuda")}
    if families == {"sm80"}:
        return  # this process
    file = Path(__file__).parents[1] / "api" / "test_nonfinite_inputs.py"
    assert_passes_in_the_older_family(str(file), "test_saturated_nonfinite and cuda")


BAD_INPUTS = [(n, v) for n in ("q", "k", "v") for v in (torch.inf, -torch.inf, torch.nan)]
BAD_INPUTS.append(("bias", torch.inf))  # -inf and NaN mask


@routes
@dtypes
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_visible_value_of_zero_probability_propagates(route, dtype, value):
    setting = Setting(route, dtype)
    winner, key, column = 10, 70, 3
    q, k, v, bias = setting.leaves
    with torch.no_grad():
        bias[..., key] = 5  # chosen on every route
        probe = torch.zeros_like(v)
        probe[:, key] = 1
        out = flash_dmattn_func(q, k, probe, setting.mask, bias, **setting.options)
        sees = out[0, ..., 0] != 0
        bias[..., winner] = 300  # every later row that sees it gives it all of its weight
        v[:, key, :, column] = value
    out, _, _, dv, _ = setting.gradients(nonfinite="propagate")
    assert torch.equal(~out[0, ..., column].isfinite(), sees)
    others = [c for c in range(out.shape[3]) if c != column]
    assert out[..., others].isfinite().all() and dv.isfinite().all()


either_order = pytest.mark.parametrize("deterministic", [False, True])


@routes
@dtypes
@either_order
@pytest.mark.parametrize("name, value", [*BAD_INPUTS, ("dout", torch.inf), ("dout", torch.nan)])
def test_nonfinite_inputs_reach_rows_and_gradients_of_visible_keys_when_propagated(
    route, dtype, name, value, deterministic
):
    setting = Setting(route, dtype)
    row, key, column = 120, 70, 3
    q, k, v, bias = setting.leaves
    options = {"deterministic": deterministic}
    with torch.no_grad():
        bias[..., key] = 5  # chosen on every route, as one of +inf is
        # The rows that the value makes undefined, [query, head].
        rows = torch.zeros(LENGTH, 4, dtype=torch.bool, device="cuda")
        if name in ("q", "dout"):
            rows[row, 0] = True
        else:
            probe = torch.zeros_like(v)
            probe[:, key] = 1
            out = flash_dmattn_func(q, k, probe, setting.mask, bias, **setting.options)
            rows = out[0, ..., 0] != 0
            rows[:, 2:] &= name == "bias"  # else only the first key head has the value
    assert rows.any() and not rows.all()
    # The keys that these rows see, [key, key head], have a weight in one of them.
    seen = rows[None, ..., None].to(dtype).expand_as(setting.dout)
    expected, _, _, weights, _ = setting.gradients(seen, **options)
    keys = weights[0, ..., 0] != 0
    assert keys.any()

    with torch.no_grad():
        if name == "bias":
            bias[..., key] = value
        else:
            tensor = {"q": q, "k": k, "v": v, "dout": setting.dout}[name]
            tensor[0, key if name in ("k", "v") else row, 0, column] = value
    out, dq, dk, dv, dbias = setting.gradients(nonfinite="propagate", **options)
    undefined = rows[None, ..., None].expand_as(out).clone()
    if name == "v":
        undefined[..., :column], undefined[..., column + 1 :] = False, False
    elif name == "dout":
        undefined[:] = False
    assert torch.equal(~out.isfinite(), undefined)
    assert name == "v" or out[undefined].isnan().all()
    # Bits differ: rows that do not see the value, but whose tile has it, are recomputed in double.
    actual, wanted = (t.masked_fill(undefined, 0) for t in (out, expected))
    torch.testing.assert_close(actual, wanted, rtol=4e-2, atol=4e-2)
    nonfinite = [~gradient[0].isfinite() for gradient in (dq, dk, dv, dbias)]
    if dbias.ndim == 4:
        nonfinite[3] = nonfinite[3].any(-2)
    dq_flags, dk_flags, dv_flags, dbias_flags = nonfinite
    assert torch.equal(dq_flags, rows[..., None].expand_as(dq_flags))
    assert torch.equal(dk_flags, keys[..., None].expand_as(dk_flags))
    assert torch.equal(dbias_flags, keys.T)
    reached = keys[..., None].expand_as(dv_flags).clone()
    if name == "v":
        reached[:] = False  # dv is P^T dout
    elif name == "dout":
        reached[..., :column] = False
        reached[..., column + 1 :] = False
    assert torch.equal(dv_flags, reached)


@dtypes
@either_order
@pytest.mark.parametrize("nonfinite", ["saturate", "propagate"])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@routes
def test_hidden_keys_of_any_value_change_nothing(route, dtype, value, nonfinite, deterministic):
    """The hidden keys act as uninitialised padding."""
    setting = Setting(route, dtype)
    mask = torch.ones(1, LENGTH, dtype=torch.bool, device="cuda")
    mask[:, 60:90] = False
    if setting.mask is not None:
        mask = mask[:, None, None] & setting.mask
    options = {"nonfinite": nonfinite, "deterministic": deterministic}
    expected = setting.gradients(mask=mask, **options)
    with torch.no_grad():
        for tensor in setting.leaves[1:3]:
            tensor[:, 60:90] = value
    actual = setting.gradients(mask=mask, **options)
    for got, wanted in zip(actual, expected, strict=True):
        assert wanted.isfinite().all() and got.isfinite().all()
        # Bits differ, because rows of such tiles are recomputed in double.
        torch.testing.assert_close(got, wanted, rtol=4e-2, atol=4e-2)


@dtypes
@either_order
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@routes
def test_nonfinite_later_keys_leave_earlier_rows_unchanged(route, dtype, value, deterministic):
    setting = Setting(route, dtype)
    first = 150  # in the middle of a tile
    expected = setting.gradients(deterministic=deterministic)
    with torch.no_grad():
        for tensor in setting.leaves[1:3]:
            tensor[:, first:, 0] = value
    actual = setting.gradients(deterministic=deterministic)
    for got, wanted in zip(actual[:2], expected[:2], strict=True):
        torch.testing.assert_close(got[:, :first], wanted[:, :first], rtol=4e-2, atol=4e-2)
        assert got[:, :, 2:].isfinite().all()  # the other key head


@dtypes
@pytest.mark.parametrize("nonfinite", ["saturate", "propagate"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("scored", [False, True])
def test_tiles_without_visible_keys_ignore_hidden_values(dtype, nonfinite, head_dim, scored):
    """There are more queries than keys. The first two hundred queries come before every key, and all keys are NaN."""
    q = torch.randn(1, 300, 4, head_dim, device="cuda").to(dtype)
    k, v = (torch.full((1, 100, 2, head_dim), torch.nan, device="cuda").to(dtype) for _ in range(2))
    bias = torch.zeros(1, 2, 100, device="cuda") if scored else None
    out, lse = flash_dmattn_func(
        q, k, v, None, bias, is_causal=True, nonfinite=nonfinite, return_lse=True
    )
    assert (out[:, :200] == 0).all()
    assert (lse[..., :200] == -torch.inf).all()
