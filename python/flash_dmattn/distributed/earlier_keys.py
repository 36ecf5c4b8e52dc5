"""Keys of earlier ranks in front of the keys of this one, and the gradients of both."""

from __future__ import annotations

import torch
from torch import Tensor

from .._core.autograd import NO_SECOND_DERIVATIVE
from .arguments import CheckedArguments
from .exchange import bias_of, no_key, position_of, score_of
from .operators import collect, give_back
from .pieces import Boundary, keys_seen_before


class PrependEarlierKeys(torch.autograd.Function):
    """(key, value, bias, scores) of a call -> key, value [B, W + n, Hkv, D], bias and scores [B, Hkv, W + n], positions int32
    [B, Hkv, W], W = boundary.places. The gradients of the W rows in front return to their owners; scores have none, and bias has one
    where it is learned. (Marked as not differentiable they could not be compiled for all lengths by torch 2.11.)"""

    @staticmethod
    def forward(ctx, key, value, bias, scores, arguments: CheckedArguments):
        W = arguments.boundary.places
        key, value = (_add_places(t, W, arguments.headroom) for t in (key, value))
        columns = [_pad_front(scores, W, torch.nan)]
        if bias is not None and not arguments.bias_is_score:
            columns.append(_pad_front(bias, W, 0.0))
        places, *winners = _winners(key, value, columns, scores, arguments)
        rows, notes, route = collect(arguments.exchange, *(t.flatten(0, 1) for t in winners))
        heads = scores.shape[:2]
        rows, notes = rows.unflatten(0, heads), notes.unflatten(0, heads)
        # On the first rank these are empty. A compiler would remove an exchange whose results nobody reads, and others would wait.
        earlier_rows = rows.transpose(1, 2).split([key.shape[3], value.shape[3]], -1)
        for extended, part in zip((key, value), earlier_rows, strict=True):
            extended[:, :W] = part
        columns[0][..., :W] = score_of(notes)
        for column in columns[1:]:
            column[..., :W] = bias_of(notes)[..., 0]
        positions = position_of(notes)
        # The arguments themselves are not kept, because they would keep the keys that have been copied.
        ctx.boundary, ctx.exchange, ctx.headroom = (
            arguments.boundary,
            arguments.exchange,
            arguments.headroom,
        )
        ctx.save_for_backward(places, route)
        ctx.bias_learns = ctx.needs_input_grad[2]
        scores, bias = columns[0], None if len(columns) == 1 else columns[1]
        if arguments.bias_is_score:
            scores, bias = None, columns[0]
        return key, value, bias, scores, positions

    @staticmethod
    def backward(ctx, *gradients):
        if torch.is_grad_enabled():  # create_graph
            return _FirstDerivative.apply(ctx, *gradients)
        return PrependEarlierKeys._return_gradients(ctx, *gradients)

    @staticmethod
    def _return_gradients(ctx, dkey, dvalue, dbias, *_):
        places, route = ctx.saved_tensors
        W = ctx.boundary.places
        # They come from attention alone, so that they may change in place.
        dkey, dvalue = (t.contiguous() for t in (dkey, dvalue))
        front = torch.cat([dkey[:, :W], dvalue[:, :W]], -1).transpose(1, 2)
        earlier_gradients = [front.flatten(0, 1)]
        if ctx.bias_learns:
            dbias = dbias.contiguous()
            earlier_gradients.append(dbias[..., :W].flatten(0, 1)[..., None])
        sums = give_back(ctx.exchange, route, *earlier_gradients)
        if sums is not None:
            sums = [total.unflatten(0, places.shape[:2]) for total in sums]
            for gradient, total in zip(
                (dkey, dvalue), sums[0].split([dkey.shape[3], dvalue.shape[3]], -1), strict=True
            ):
                _add_rows(gradient, places, total, ctx.boundary)
            if ctx.bias_learns:
                dbias.scatter_(-1, places, dbias.gather(-1, places) + sums[1][..., 0])
        if ctx.headroom:
            for gradient in (dkey, dvalue):
                gradient[:, :W] = 0
        else:
            dkey, dvalue = dkey[:, W:], dvalue[:, W:]
        return dkey, dvalue, dbias[..., W:] if ctx.bias_learns else None, None, None


class _FirstDerivative(torch.autograd.Function):
    """The gradients of PrependEarlierKeys, which have none themselves."""

    @staticmethod
    def forward(_, prepended, *gradients):
        return PrependEarlierKeys._return_gradients(prepended, *gradients)

    @staticmethod
    def backward(*_):
        raise RuntimeError(NO_SECOND_DERIVATIVE)


def _winners(
    key: Tensor, value: Tensor, columns: list[Tensor], scores: Tensor, arguments: CheckedArguments
) -> tuple[Tensor, Tensor, Tensor]:
    """The keys that later ranks may see: their places as rows of the extended keys, int64 [B, Hkv, c], ascending; then as many rows in
    front as keys are missing, each of them once. Their rows [B, Hkv, c, D + Dv] and notes, int32 [B, Hkv, c, 2 or 3]."""
    batch, heads, n = scores.shape
    c, W = arguments.boundary.winners, arguments.boundary.places
    front_places = torch.arange(c, device=scores.device)
    if arguments.boundary.pieces.is_last():  # nobody sees its keys, and it chooses none
        rows = key.new_zeros((batch, heads, c, key.shape[3] + value.shape[3]))
        notes = no_key(scores.new_empty(1 + len(columns))).expand(batch, heads, c, -1)
        return front_places.expand(batch, heads, c), rows, notes
    chosen_places = _choose_places(scores, arguments)
    missing = chosen_places < 0
    places = torch.where(missing, front_places, chosen_places + W)
    rows = torch.cat([take_rows(key, places), take_rows(value, places)], -1)
    positions = torch.where(missing, -1, chosen_places + arguments.boundary.pieces.begin())
    score, *bias = (column.gather(-1, places).view(torch.int32) for column in columns)
    return places, rows, torch.stack([score, positions.int(), *bias], -1)


def _choose_places(scores: Tensor, arguments: CheckedArguments) -> Tensor:
    """int64 [B, Hkv, c], of the keys of this piece, ascending and then -1."""
    boundary, present = arguments.boundary, arguments.present
    pieces, (batch, heads, n) = boundary.pieces, scores.shape
    positions = torch.arange(pieces.begin(), pieces.end(), device=scores.device)
    if boundary.begun is not None:
        goes_on = positions >= boundary.begun[:, pieces.rank + 1, None, None]
        present = goes_on if present is None else present & goes_on
    if present is not None:
        present = present.expand(batch, heads, n).flatten(0, 1)[None]
    return keys_seen_before(
        pieces.end(),
        scores.flatten(0, 1)[None],
        positions[None, None],
        present,
        boundary.rule_of_rows(slice(None), batch),
        boundary.winners,
    )[0].unflatten(0, (batch, heads))


def _add_places(rows: Tensor, places: int, headroom: bool) -> Tensor:
    """rows [B, places + n, H, D], of which the first are zeros."""
    if headroom:
        extended = rows.detach()
    else:
        batch, n, *rest = rows.shape
        extended = rows.new_empty((batch, places + n, *rest))
        extended[:, places:] = rows
    extended[:, :places] = 0
    return extended


def _pad_front(values: Tensor, places: int, filler: float) -> Tensor:
    """[B, H, places + n]."""
    return torch.nn.functional.pad(values, (places, 0), value=filler)


def _index(rows: Tensor, places: Tensor) -> Tensor:
    """The index [B, H, c, D] of places [B, H, c] for gather and scatter along the keys of [B, H, L, D]."""
    return places[..., None].expand(-1, -1, -1, rows.shape[3])


def take_rows(rows: Tensor, places: Tensor) -> Tensor:
    """[B, H, c, D] of rows [B, L, H, D]."""
    rows = rows.transpose(1, 2)
    return rows.gather(2, _index(rows, places))


def _add_rows(rows: Tensor, places: Tensor, more: Tensor, boundary: Boundary) -> None:
    """Adds float32 [B, H, c, D] to rows [B, L, H, D] at places, none of which occurs twice."""
    rows = rows.transpose(1, 2)
    index = _index(rows, places)
    total = rows.gather(2, index) + more  # float32
    rows.scatter_(2, index, boundary.round_gradient(total, rows.dtype))
