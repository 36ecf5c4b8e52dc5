"""Tests every shape and layout that the CUDA backend accepts: head dims, broadcasts, empty tensors, rows at any address."""

from itertools import product

import pytest
import torch

from flash_dmattn import flash_dmattn_func, flash_dmattn_varlen_func, select_key_intervals
from flash_dmattn.check.oracle import Problem
from problem_calls import assert_matches_oracle, forward_and_backward
from rules_by_definition import causal_elements, select

BATCH, HEADS_Q, HEADS_KV = 2, 4, 2


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, dtype=dtype, device="cuda")


def problem_of(
    head_dim, seqlen_q=70, seqlen_k=131, dtype=torch.bfloat16, value_dim=None, **options
):
    dims = (head_dim, value_dim or head_dim)
    q, dout = (normal(BATCH, seqlen_q, HEADS_Q, d, dtype=dtype) for d in dims)
    k, v = (normal(BATCH, seqlen_k, HEADS_KV, d, dtype=dtype) for d in dims)
    return Problem(q, k, v, dout, causal=True, **options)


# ---- Head dimensions: every multiple of 8, and some that the binding pads ------------------------------

HEAD_DIMS = [*range(8, 257, 8), 1, 3, 33, 65, 100, 127, 129, 250]


# With a value of fewer columns; 192 has kernels of its own up to 128.
VALUE_DIMS = [
    (192, 128), (192, 120), (192, 136), (192, 64), (192, 1), (136, 128), (256, 128), (256, 8), (128, 64), (120, 56), (96, 64),
    (96, 9), (64, 33), (33, 32),
]  # fmt: skip


@pytest.mark.parametrize("route", ["one for each key", "selection", "elements"])
@pytest.mark.parametrize(("head_dim", "value_dim"), [*((d, d) for d in HEAD_DIMS), *VALUE_DIMS])
def test_every_head_dim_matches_oracle(head_dim, value_dim, route):
    dtype = torch.float16 if head_dim % 16 == 0 else torch.bfloat16
    seqlen_k = 132 if route == "elements" else 131  # multiples of 4 have a separate kernel
    problem = problem_of(head_dim, seqlen_k=seqlen_k, dtype=dtype, value_dim=value_dim)
    options = {}
    if route == "elements":
        problem.mask = torch.rand(BATCH, 1, 70, seqlen_k, device="cuda") < 0.7
        problem.bias = normal(BATCH, HEADS_KV, 70, seqlen_k, dtype=dtype)
    else:
        problem.bias = normal(BATCH, HEADS_KV, 1, seqlen_k, dtype=dtype)
    if route == "selection":
        options["keep_window_size"] = 20
        allowed = causal_elements(70, seqlen_k).cuda().expand(BATCH, HEADS_KV, -1, -1)
        problem.shown = select(problem.bias[:, :, 0].float(), 20, allowed)
    assert_matches_oracle(forward_and_backward(problem, **options), problem)


@pytest.mark.parametrize("gap", [0, 8, 3])
@pytest.mark.parametrize("selects", [False, True])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(192, 128), (128, 64)])
def test_key_and_value_of_one_projection_match_oracle(head_dim, value_dim, selects, gap):
    """A gap of 3 elements between the heads leaves rows at odd addresses."""
    problem = problem_of(head_dim, value_dim=value_dim)
    fused = normal(BATCH, 131, HEADS_KV, head_dim + value_dim + gap)
    problem.k, problem.v = fused[..., :head_dim], fused[..., head_dim : head_dim + value_dim]
    options = {}
    if selects:
        problem.bias = normal(BATCH, HEADS_KV, 1, 131)
        allowed = causal_elements(70, 131).cuda().expand(BATCH, HEADS_KV, -1, -1)
        problem.shown = select(problem.bias[:, :, 0].float(), 20, allowed)
        options["keep_window_size"] = 20
    assert_matches_oracle(forward_and_backward(problem, **options), problem)


# ---- Broadcasts: every shape of a mask and of a bias, with and without a list of keys ------------------

SHAPES = list(product("b1", "hv1", "q1", "k1"))


def sizes(shape, seqlen_q, seqlen_k):
    named = {"b": BATCH, "h": HEADS_Q, "v": HEADS_KV, "q": seqlen_q, "k": seqlen_k, "1": 1}
    return [named[letter] for letter in shape]


def with_list(problem):
    """Selects keys by scores that differ from the bias. Returns the additional arguments of the call."""
    seqlen_q, seqlen_k = problem.q.shape[1], problem.k.shape[1]
    intervals = select_key_intervals(normal(BATCH, HEADS_KV, seqlen_k), 50, query_length=seqlen_q)
    problem.shown = intervals.to_mask()
    return {"key_intervals": intervals}


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids="".join)
def test_mask_shapes_match_oracle(shape, listed):
    problem = problem_of(40, 67, 133, torch.float16 if listed else torch.bfloat16)
    problem.mask = torch.rand(sizes(shape, 67, 133), device="cuda") < 0.6
    options = with_list(problem) if listed else {}
    assert_matches_oracle(forward_and_backward(problem, **options), problem)


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("bias_dtype", ["same", "f32"])
@pytest.mark.parametrize("shape", SHAPES, ids="".join)
def test_bias_shapes_match_oracle(shape, bias_dtype, listed):
    dtype = torch.bfloat16 if listed else torch.float16
    for seqlen_k in (133, 136):  # rows of odd length, and of a multiple of 8
        problem = problem_of(40, 67, seqlen_k, dtype)
        wide = torch.float32 if bias_dtype == "f32" else dtype
        problem.bias = normal(*sizes(shape, 67, seqlen_k), dtype=wide)
        options = with_list(problem) if listed else {}
        result = forward_and_backward(problem, **options)
        assert result.dbias.shape == problem.bias.shape and result.dbias.dtype == wide
        if "k" not in shape:
            # A term that all keys of a row share changes nothing: 0, except for the rounding of the rows' outputs.
            rows = BATCH * HEADS_Q * 67 / problem.bias.numel()
            assert result.dbias.abs().max() <= 2 * torch.finfo(dtype).eps * rows**0.5
            result.dbias = None
        assert_matches_oracle(result, problem)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_lone_visible_elements_match_oracle(head_dim):
    """Mask tiles with a single visible element, each time in another row, lie between empty tiles.
    Any byte other than 0 is True."""
    rows, keys = torch.arange(232, device="cuda"), torch.arange(4096, device="cuda")
    row_tile, key_tile = (rows // 64)[:, None], keys // 64
    in_row = (rows % 64)[:, None] == (key_tile + 17 * row_tile) % torch.where(row_tile < 3, 64, 40)
    lone = in_row & (keys % 64 == (5 * key_tile + row_tile) % 64) & (key_tile % 5 != row_tile)
    problem = problem_of(head_dim, 232, 4096)
    problem.causal = False
    problem.bias = normal(BATCH, HEADS_KV, 232, 4096)
    some_byte = torch.tensor([1, 2, 128, 255], dtype=torch.uint8, device="cuda")[keys % 4]
    problem.mask = torch.where(lone, some_byte, 0)[None, None].view(torch.bool)
    result = forward_and_backward(problem)
    problem.mask = lone[None, None]
    assert_matches_oracle(result, problem)


# ---- Empty tensors: dimensions without elements ----------------------------------------------------------

EMPTY = {
    "batch": (0, 5, 7, 4, 2),
    "queries": (2, 0, 7, 4, 2),
    "keys": (2, 5, 0, 4, 2),
    "queries and keys": (2, 0, 0, 4, 2),
    "heads": (2, 5, 7, 0, 0),
}


@pytest.mark.parametrize("options", ["plain", "selection", "global", "elements"])
@pytest.mark.parametrize("name", EMPTY)
def test_empty_problem_gives_empty_result(name, options):
    batch, seqlen_q, seqlen_k, heads_q, heads_kv = EMPTY[name]
    q = normal(batch, seqlen_q, heads_q, 64).requires_grad_()
    k, v = (normal(batch, seqlen_k, heads_kv, 64).requires_grad_() for _ in range(2))
    bias = normal(batch, heads_kv, seqlen_k).requires_grad_()
    mask, keep = None, {}
    if options == "elements":
        bias = normal(batch, heads_q, seqlen_q, seqlen_k).requires_grad_()
        mask = torch.ones(batch, 1, seqlen_q, seqlen_k, dtype=torch.bool, device="cuda")
    elif options != "plain":
        selection = "global" if options == "global" else "per_query"
        keep = {"keep_window_size": 3, "selection": selection}
    out, lse = flash_dmattn_func(q, k, v, mask, bias, is_causal=True, return_lse=True, **keep)
    assert out.shape == q.shape and (out == 0).all()
    assert lse.shape == (batch, heads_q, seqlen_q) and (lse == -torch.inf).all()
    out.backward(torch.ones_like(out))
    for tensor in (q, k, v, bias):
        assert tensor.grad.shape == tensor.shape and (tensor.grad == 0).all()
    torch.cuda.synchronize()


def test_empty_packed_problem_gives_empty_result():
    q, k, v = (normal(0, 4, 64).requires_grad_() for _ in range(3))
    offsets = torch.zeros(3, dtype=torch.int32, device="cuda")
    out = flash_dmattn_varlen_func(q, k, v, offsets, offsets, 0, 0, is_causal=True)
    out.backward(torch.ones_like(out))
    assert out.shape == q.shape and q.grad.shape == q.shape


# ---- Layouts ---------------------------------------------------------------------------------------------


def surrounded(tensor, odd):
    """Copies the values into memory full of NaN. odd: whether rows begin at addresses that are no multiples of 16 bytes."""
    space = 9 if odd else 16
    memory = torch.full(
        [n + space for n in tensor.shape], torch.nan, dtype=tensor.dtype, device="cuda"
    )
    begin = 3 if odd else 8
    view = memory[tuple(slice(begin, begin + n) for n in tensor.shape)]
    return view.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)


def with_order(tensor, *order):
    """Copies the values with the dimensions in another order in memory."""
    back = [order.index(d) for d in range(tensor.dim())]
    return tensor.detach().permute(order).contiguous().permute(back).requires_grad_()


LAYOUTS = {
    "rows of 16 bytes apart": lambda t: surrounded(t, odd=False),
    "rows at odd addresses": lambda t: surrounded(t, odd=True),
    "heads first": lambda t: with_order(t, 0, 2, 1, 3),
    "lengths first": lambda t: with_order(t, 1, 2, 0, 3),
    "columns apart": lambda t: t.detach().repeat_interleave(2, -1)[..., ::2].requires_grad_(),
}


@pytest.mark.parametrize("head_dim", [24, 64, 80, 128, 256])
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_changes_no_bit(layout, window, head_dim):
    """At odd addresses biases of keys are added later than elsewhere, and round differently.
    Keys are chosen by intervals there."""
    q, k, v, dout = (
        normal(2, 200, h, head_dim).requires_grad_() for h in (HEADS_Q, HEADS_KV, HEADS_KV, HEADS_Q)
    )
    bias = normal(2, HEADS_KV, 1, 200).requires_grad_()
    options = {"is_causal": True, "deterministic": True}
    has_bias = layout != "rows at odd addresses"
    if has_bias:
        options["keep_window_size"] = window
    else:
        scores = bias[:, :, 0].detach()
        options["key_intervals"] = select_key_intervals(scores, window or 60, query_length=200)
    results = []
    for change in (lambda t: t, LAYOUTS[layout]):
        tensors = [change(t) for t in (q, k, v, *[bias] * has_bias)]
        out = flash_dmattn_func(*tensors[:3], None, *tensors[3:], **options)
        results.append([out, *torch.autograd.grad(out, tensors, change(dout).detach())])
    for plain, changed in zip(*results, strict=True):
        assert plain.isfinite().all() and torch.equal(plain, changed)


@pytest.mark.parametrize("heads", ["v", "h"])
def test_layout_and_bytes_of_a_mask_change_no_bit(heads):
    """True may be any byte other than 0, and rows of a packed mask need not begin at a multiple of 16."""
    length = 336
    problem = problem_of(64, length, length)
    shape = sizes(f"b{heads}qk", length, length)
    mask = torch.rand(shape, device="cuda") < 0.2
    mask[:, :, 128:256, :64] = False  # whole tiles
    mask[:, :, 40] = False  # a query without keys
    apart = torch.zeros(*shape[:3], length + 8, dtype=torch.bool, device="cuda")
    apart[..., :length] = mask
    other_bytes = (mask * torch.randint(1, 256, shape, device="cuda")).byte().view(torch.bool)
    bias = normal(*shape)
    results = [
        flash_dmattn_func(problem.q, problem.k, problem.v, m, bias, is_causal=True, return_lse=True)
        for m in (mask, apart[..., :length], other_bytes)
    ]  # fmt: skip
    for other in results[1:]:
        for plain, changed in zip(results[0], other, strict=True):
            assert torch.equal(plain, changed)


@pytest.mark.parametrize("shape", ["mask", "bias", "both"])
def test_dense_layouts_match_oracle(shape):
    """Rows of dense masks and biases at any address use every width of load, and the slow path."""
    problem = problem_of(64, 130, 264)
    mask = torch.rand(BATCH, HEADS_KV, 130, 264, device="cuda") < 0.6
    bias = normal(BATCH, HEADS_KV, 130, 264)
    problem.mask = None if shape == "bias" else mask
    problem.bias = None if shape == "mask" else bias
    for begin, space in ((0, 0), (8, 8), (4, 4), (2, 2), (1, 1), (0, 3), (1, 7)):

        def moved(tensor, begin=begin, space=space):
            if tensor is None:
                return None
            fill = torch.ones((), dtype=tensor.dtype, device="cuda")
            fill = fill if tensor.dtype == torch.bool else fill * torch.nan
            memory = fill.expand(*tensor.shape[:3], 264 + begin + space).clone()
            memory[..., begin : begin + 264] = tensor
            return memory[..., begin : begin + 264]

        placed = Problem(problem.q, problem.k, problem.v, problem.dout, moved(problem.mask),
                         moved(problem.bias), causal=True)  # fmt: skip
        assert_matches_oracle(forward_and_backward(placed), problem)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_zero_strides_match_oracle(dim):
    """One batch element, one row or one head that is expanded to many."""

    def shared(heads):
        shape = [2, 150, heads, 64]
        shape[dim] = 1
        return normal(*shape).expand(2, 150, heads, 64)

    problem = Problem(*(shared(heads) for heads in (4, 2, 2, 4)), causal=True)
    assert problem.q.stride(dim) == 0
    assert_matches_oracle(forward_and_backward(problem), problem)
