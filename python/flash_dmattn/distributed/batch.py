"""A batch whose sequence is cut into one piece for each rank: cutting, gathering, the mean loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .._core.checks import (
    NUMBERS,
    check_count,
    check_integer,
    check_shape,
    check_tensor,
    refuse_all_transforms,
)
from ..keys.positions import check_offsets
from ._exchange.arguments import checked_offsets, checked_positions, offsets_of_positions
from ._exchange.collectives import Collectives, Group, collectives_of

IGNORED = -100  # losses ignore tokens with this label


@dataclass(frozen=True)
class Piece:
    """One rank's piece of a batch whose rows have N tokens. The batch is padded to R n tokens, and each piece has n.

    input_ids, position_ids: int [B, n].
    shift_labels: int [B, n]; each token has the label of the token after it, or -100 if there is none.
    key_mask: bool [B, n]; None: the batch has no padding that a token could see.
    cu_seqlens: the offsets of the documents in the whole sequence; None: each row is one document.
    length: N.
    """

    input_ids: Tensor
    position_ids: Tensor
    shift_labels: Tensor | None
    key_mask: Tensor | None
    cu_seqlens: Tensor | None
    length: int

    def attention_options(self) -> dict[str, Any]:
        """Returns the arguments of context_parallel_dmattn that depend on the batch."""
        return {"key_mask": self.key_mask, "cu_seqlens": self.cu_seqlens}


class ContextParallel:
    """The ranks that share the sequences of a batch. Each rank gets the whole batch and keeps its piece.

        cp = ContextParallel(mesh["cp"])
        piece = cp.shard(input_ids, labels)
        logits = model(piece.input_ids, piece.position_ids, **piece.attention_options())
        losses = F.cross_entropy(logits.flatten(0, 1), piece.shift_labels.flatten(), reduction="sum")
        cp.mean(losses, (piece.shift_labels != -100).sum()).backward()

    group: a ProcessGroup, or a DeviceMesh of one dimension.
    """

    def __init__(self, group: Group):
        self.collectives = collectives_of(group)

    def __deepcopy__(self, memo: dict) -> ContextParallel:
        """Returns this object itself, because a copy of a model is on the same ranks."""
        return self

    @property
    def rank(self) -> int:
        """Returns this rank's number in the group."""
        return self.collectives.rank

    @property
    def size(self) -> int:
        """Returns the number of ranks."""
        return self.collectives.size

    def shard(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | Sequence[int] | None = None,
        multiple: int = 1,
        pad_token_id: int = 0,
    ) -> Piece:
        """Returns this rank's piece of a batch. Every rank has to pass the same batch.

        Pieces are consecutive, in the order of ranks, and equally long. Padding comes after the sequence.

        input_ids: int [B, N].
        labels: int [B, N], one for each token, not shifted. This function shifts them before it cuts the sequence,
            because the label of a piece's last token is the first token of the next piece.
        position_ids: int [B or 1, N]; a document begins where positions begin again. By default they count the tokens
            of each document.
        attention_mask: bool or integers [B, N], 0 for padding; a row with padding is one document.
        cu_seqlens: int [documents + 1], a tensor or a list: the offsets of packed documents, B = 1. The first token of
            a document is not a label of the token before it.
        multiple: the length of a piece is a multiple of this number.

        In the group's first call, all ranks raise ValueError if their batches differ.
        """
        tensors = {
            "input_ids": input_ids,
            "labels": labels,
            "position_ids": position_ids,
            "attention_mask": attention_mask,
        }

        def check_arguments() -> tuple[Tensor | None, Tensor | None, Tensor | None]:
            _check_batch(tensors, multiple, pad_token_id)
            offsets = None
            if cu_seqlens is not None:
                offsets = checked_offsets(cu_seqlens, input_ids.shape[1])
            mask = attention_mask
            if mask is not None and bool(mask.all()):
                mask = None
            return mask, offsets, _offsets_of_batch(input_ids, position_ids, mask, offsets)

        def compared_arguments(checked: tuple[Tensor | None, ...]) -> dict[str, object]:
            _, offsets, _ = checked
            if offsets is not None:  # may be on a GPU; the values below are read from it, too
                check_offsets(offsets.cpu(), "cu_seqlens", input_ids.shape[1])
            compared = tensors | {"cu_seqlens": offsets}
            sums = {name: _sum_of_values(name, t) for name, t in compared.items()}
            return sums | {"multiple": int(multiple), "pad_token_id": int(pad_token_id)}

        checked = self.collectives.agreed_result("shard", check_arguments, compared_arguments)
        attention_mask, _, offsets = checked
        batch, length = input_ids.shape
        tokens = self.size * multiple
        padded = -(-length // tokens) * tokens
        index = torch.arange(padded, device=input_ids.device)[None]
        begins = torch.zeros_like(index)
        if offsets is not None:
            document = torch.searchsorted(
                offsets, index.expand(offsets.shape[0], -1).contiguous(), right=True
            )
            begins = offsets.gather(1, (document - 1).clamp(min=0))
        if position_ids is None:
            position_ids = index - begins
        else:
            position_ids = position_ids.reshape(-1, length)
            steps = torch.arange(1, padded - length + 1, device=index.device)
            position_ids = torch.cat([position_ids, position_ids[:, -1:] + steps], 1)
        shifted = None
        if labels is not None:
            shifted = F.pad(labels, (0, padded - length + 1), value=IGNORED)
            if offsets is not None:
                first = F.pad(index == begins, (0, 1), value=False).expand(batch, -1)
                shifted = shifted.masked_fill(first, IGNORED)
            shifted = self._cut_piece(shifted[:, 1:], padded)
        mask = None
        if attention_mask is not None:
            mask = self._cut_piece(F.pad(attention_mask.bool(), (0, padded - length)), padded)
        return Piece(
            self._cut_piece(F.pad(input_ids, (0, padded - length), value=pad_token_id), padded),
            self._cut_piece(position_ids.expand(batch, -1), padded),
            shifted,
            mask,
            offsets,
            length,
        )

    def _cut_piece(self, whole: Tensor, padded: int) -> Tensor:
        n = padded // self.size
        return whole[:, self.rank * n : (self.rank + 1) * n].contiguous()

    def gather(self, local: Tensor, length: int | None = None) -> Tensor:
        """Returns on every rank the whole [B, N, ...] of the pieces [B, n, ...] of all ranks. The result has no gradient.

        length: N (`Piece.length`), if the pieces are padded.
        """

        def check_arguments() -> None:
            _check_local(local)
            if length is not None:
                check_count(length, "length")

        self.collectives.agreed_result("gather", check_arguments, lambda _: _form_of(local))
        parts = self.collectives.all_gather(local.detach().contiguous())
        whole = parts.transpose(0, 1).flatten(1, 2)
        if length is not None and length > whole.shape[1]:
            raise ValueError(
                f"length: got {length}, expected at most {whole.shape[1]}, the tokens of all pieces"
            )
        return whole if length is None else whole[:, :length]

    def mean(self, total: Tensor, count: Tensor | int) -> Tensor:
        """Returns the sum of `total` over all ranks divided by the sum of `count`. Each rank's total gets a gradient.

        DDP and FSDP average gradients over the R ranks, so this function multiplies the gradient by R: the average is
        then the gradient of the mean. A rank without labels has to call it as well, with a total of 0. If the counts
        add up to 0, the result is the sum of the totals.
        """

        def checked_count() -> Tensor:
            check_tensor(total, "total")
            refuse_all_transforms(total=total, count=count)
            if not total.is_floating_point():
                raise TypeError(f"total: got {total.dtype}, expected a floating point dtype")
            if not isinstance(count, NUMBERS):
                raise TypeError(f"count: got {count!r}, expected a number or a torch.Tensor")
            if not isinstance(count, Tensor) and not count >= 0:
                raise ValueError(f"count: got {count!r}, expected 0 or more")
            counts = torch.as_tensor(count, device=total.device).to(torch.float64)
            if counts.shape != total.shape:
                raise ValueError(
                    f"count: got shape {tuple(counts.shape)}, expected that of total, {tuple(total.shape)}"
                )
            return counts

        count = self.collectives.agreed_result("mean", checked_count, lambda _: _form_of(total))
        return _Mean.apply(total, count, self.collectives)

    def roll(self, local: Tensor, shifts: int) -> Tensor:
        """Returns this rank's piece of torch.roll(whole, shifts, dims=1), which has a gradient.

        Pieces [B, n, ...] are equally long and have at least |shifts| tokens.
        """

        def check_arguments() -> None:
            _check_local(local)
            check_integer(shifts, "shifts")
            if abs(shifts) > local.shape[1]:
                raise ValueError(
                    f"shifts: got {shifts}, expected at most the {local.shape[1]} tokens of a piece"
                )

        def compared_arguments(_) -> dict[str, object]:
            learns = torch.is_grad_enabled() and local.requires_grad
            return _form_of(local) | {"shifts": int(shifts), "requires_grad": learns}

        self.collectives.agreed_result("roll", check_arguments, compared_arguments)
        return local if shifts == 0 else _Roll.apply(local, shifts, self.collectives)


def _check_batch(tensors: Mapping[str, Tensor | None], multiple: int, pad_token_id: int) -> None:
    for name, tensor in tensors.items():
        if tensor is not None or name == "input_ids":
            check_tensor(tensor, name)
    shape = tensors["input_ids"].shape
    if len(shape) != 2:
        raise ValueError(f"input_ids: got shape {tuple(shape)}, expected [B, N]")
    if tensors["position_ids"] is not None:
        checked_positions(tensors["position_ids"], *shape)
    check_count(multiple, "multiple")
    if not multiple:
        raise ValueError("multiple: got 0, expected 1 or more")
    check_count(pad_token_id, "pad_token_id")
    for name in ("labels", "attention_mask"):
        if tensors[name] is not None:
            check_shape(tensors[name], name, shape)
    for name in ("input_ids", "labels"):
        tensor = tensors[name]
        if tensor is not None and tensor.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name}: got {tensor.dtype}, expected torch.int32 or torch.int64")
    mask = tensors["attention_mask"]
    if mask is not None and (mask.is_floating_point() or mask.is_complex()):
        raise TypeError(
            f"attention_mask: got {mask.dtype}, expected torch.bool or integers, 0 for padding; an additive mask is none"
        )


def _check_local(local: Tensor) -> None:
    check_tensor(local, "local")
    refuse_all_transforms(local=local)
    if local.dim() < 2:
        raise ValueError(f"local: got shape {tuple(local.shape)}, expected [B, n, ...]")


def _form_of(tensor: Tensor) -> dict[str, object]:
    return {"shape": tuple(tensor.shape), "dtype": tensor.dtype}


def _offsets_of_batch(
    input_ids: Tensor,
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Tensor | None:
    """Returns the offsets of the documents, int64 [B or 1, documents + 1], or None if each row is one document."""
    if cu_seqlens is not None:
        return cu_seqlens.to(device=input_ids.device, dtype=torch.int64).reshape(1, -1)
    if position_ids is None or attention_mask is not None:
        return None
    batch, length = input_ids.shape
    return offsets_of_documents(position_ids, batch, length, read=True)


def _sum_of_values(name: str, tensor: Tensor | None) -> tuple | None:
    """Returns a tensor's shape and a sum that depends on the order of its values. The host waits for the device."""
    if tensor is None:
        return None
    values = (tensor.bool() if name == "attention_mask" else tensor).flatten().long()
    factors = torch.arange(1, values.numel() + 1, device=values.device)
    return tuple(tensor.shape), int((values * factors).sum())


def offsets_of_documents(
    position_ids: Tensor, batch: int, length: int, *, read: bool = False
) -> Tensor | None:
    """Returns the offsets of the documents of a whole batch, int64 [B or 1, documents + 1], or None if each row is one.

    The host waits for the device. The arguments are as in `offsets_of_positions`.
    """
    offsets = offsets_of_positions(position_ids, batch, length, read=read)
    documents = int((offsets < length).sum(1).max())
    return None if documents == 1 else offsets[:, : documents + 1].contiguous()


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, total: Tensor, count: Tensor, collectives: Collectives) -> Tensor:
        both = torch.stack([total.detach().double(), count])
        dist.all_reduce(both, group=collectives.group)
        count = both[1].where(both[1] != 0, 1)  # weights may add up to less than 1
        ctx.factor = collectives.size / count
        return (both[0] / count).to(total.dtype)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return (gradient * ctx.factor).to(gradient.dtype), None, None


class _Roll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, local: Tensor, shifts: int, collectives: Collectives) -> Tensor:
        ctx.shifts, ctx.collectives = shifts, collectives
        return _roll_tokens(local, shifts, collectives)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        # With create_graph, this roll needs a gradient too: it returns to the ranks that sent the tokens.
        roll = _Roll.apply if torch.is_grad_enabled() else _roll_tokens
        return roll(gradient, -ctx.shifts, ctx.collectives), None, None


def _roll_tokens(local: Tensor, shifts: int, collectives: Collectives) -> Tensor:
    count = abs(shifts)
    edge = local[:, -count:] if shifts > 0 else local[:, :count]
    edges = collectives.all_gather(edge.contiguous())
    if shifts > 0:
        return torch.cat([edges[collectives.rank - 1], local[:, :-count]], 1)
    return torch.cat([local[:, count:], edges[(collectives.rank + 1) % collectives.size]], 1)
