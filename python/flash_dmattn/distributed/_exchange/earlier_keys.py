"""Puts keys of earlier ranks in front of this rank's keys, and returns their gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._core.autograd import NO_SECOND_DERIVATIVE
from .arguments import ExchangeArguments
from .kinds import bias_of, no_key, position_of, score_of
from .pieces import Boundary, keys_seen_before
from .traced import collect, give_back


class PrependEarlierKeys(torch.autograd.Function):
    """Puts W = boundary.places keys of earlier ranks in front of the key, value, bias and scores of a call.

    Results:
        key, value: [B, W + n, Hkv, D]. The gradients of the first W rows return to the ranks that own these keys.
        bias: [B, Hkv, W + n]; it has a gradient if the bias is learned.
        scores: [B, Hkv, W + n]; they have no gradient. (If they were marked as not differentiable, torch 2.11 could not
            compile this function for all lengths.)
        positions: int32 [B, Hkv, W], of the W keys.
    """

    @staticmethod
    def forward(ctx, key, value, bias, scores, arguments: ExchangeArguments):
        W = arguments.boundary.places
        key, value = (_add_places(t, W, arguments.headroom) for t in (key, value))
        columns = [_pad_front(scores, W, torch.nan)]
        if bias is not None and not arguments.bias_is_score:
            columns.append(_pad_front(bias, W, 0.0))
        places, *winners = _winners(key, value, columns, scores, arguments)
        rows, metadata, route = collect(arguments.exchange, *(t.flatten(0, 1) for t in winners))
        heads = scores.shape[:2]
        rows, metadata = rows.unflatten(0, heads), metadata.unflatten(0, heads)
        # The first rank gets no keys but reads the results too: a compiler would remove an exchange whose results are
        # not read, and the other ranks would wait.
        earlier_rows = rows.transpose(1, 2).split([key.shape[3], value.shape[3]], -1)
        for extended, part in zip((key, value), earlier_rows, strict=True):
            extended[:, :W] = part
        columns[0][..., :W] = score_of(metadata)
        for column in columns[1:]:
            column[..., :W] = bias_of(metadata)[..., 0]
        positions = position_of(metadata)
        # ctx keeps single fields of `arguments`: the whole would keep the memory of the keys, which have been copied.
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
        # Only attention produces these gradients, so they may be changed in place.
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
    """Computes the gradients of PrependEarlierKeys. A second derivative raises an error."""

    @staticmethod
    def forward(_, prepended, *gradients):
        return PrependEarlierKeys._return_gradients(prepended, *gradients)

    @staticmethod
    def backward(*_):
        raise RuntimeError(NO_SECOND_DERIVATIVE)


def _winners(
    key: Tensor, value: Tensor, columns: list[Tensor], scores: Tensor, arguments: ExchangeArguments
) -> tuple[Tensor, Tensor, Tensor]:
    """Collects the keys of this piece that later ranks may see. Returns (places, rows, metadata).

    places: int64 [B, Hkv, c], ascending indices of these keys among the extended keys. If there are fewer than c keys,
        each missing one has a place of its own among the W rows in front.
    rows: [B, Hkv, c, D + Dv], the key and value at each place.
    metadata: int32 [B, Hkv, c, 2 or 3], the score, the position and, if there is one, the bias at each place.
    """
    batch, heads, n = scores.shape
    c, W = arguments.boundary.winners, arguments.boundary.places
    front_places = torch.arange(c, device=scores.device)
    if arguments.boundary.pieces.is_last():  # no rank sees its keys, so it selects none
        rows = key.new_zeros((batch, heads, c, key.shape[3] + value.shape[3]))
        metadata = no_key(scores.new_empty(1 + len(columns))).expand(batch, heads, c, -1)
        return front_places.expand(batch, heads, c), rows, metadata
    selected_places = _select_places(scores, arguments)
    missing = selected_places < 0
    places = torch.where(missing, front_places, selected_places + W)
    rows = torch.cat([take_rows(key, places), take_rows(value, places)], -1)
    positions = torch.where(missing, -1, selected_places + arguments.boundary.pieces.begin())
    score, *bias = (column.gather(-1, places).view(torch.int32) for column in columns)
    return places, rows, torch.stack([score, positions.int(), *bias], -1)


def _select_places(scores: Tensor, arguments: ExchangeArguments) -> Tensor:
    """Selects the keys of this piece that later ranks may see: ascending indices, padded with -1, int64 [B, Hkv, c]."""
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
    """Returns rows [B, places + n, H, D] whose first `places` rows are zeros.

    With headroom, `rows` already has the places, and they are zeroed in place.
    """
    if headroom:
        extended = rows.detach()
    else:
        batch, n, *rest = rows.shape
        extended = rows.new_empty((batch, places + n, *rest))
        extended[:, places:] = rows
    extended[:, :places] = 0
    return extended


def _pad_front(values: Tensor, places: int, filler: float) -> Tensor:
    """Puts `places` columns of `filler` in front of the values. Returns [B, H, places + n]."""
    return torch.nn.functional.pad(values, (places, 0), value=filler)


def _index(rows: Tensor, places: Tensor) -> Tensor:
    """Expands places [B, H, c] to an index [B, H, c, D] for gather and scatter along the keys of [B, H, L, D]."""
    return places[..., None].expand(-1, -1, -1, rows.shape[3])


def take_rows(rows: Tensor, places: Tensor) -> Tensor:
    """Gathers rows [B, L, H, D] at places [B, H, c]. Returns [B, H, c, D]."""
    rows = rows.transpose(1, 2)
    return rows.gather(2, _index(rows, places))


def _add_rows(rows: Tensor, places: Tensor, more: Tensor, boundary: Boundary) -> None:
    """Adds `more`, float32 [B, H, c, D], to rows [B, L, H, D] at places [B, H, c]. No place occurs twice."""
    rows = rows.transpose(1, 2)
    index = _index(rows, places)
    total = rows.gather(2, index) + more  # float32
    rows.scatter_(2, index, boundary.round_gradient(total, rows.dtype))
