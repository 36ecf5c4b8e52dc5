"""The collectives of a group, how many bytes they move, and whether its ranks agree."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ..._core.checks import may_read, resolve_flag

Group = ProcessGroup | DeviceMesh

# torch 2.13 renamed all_gather_into_tensor to all_gather_single.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_ALIGNMENT = 16  # bytes; each part of a message is aligned, so that it can be viewed in its dtype


def code_of(*values: object) -> int:
    """Hashes the `repr` of values to 64 bits, so that equal values have the same number in every process.

    Python's `hash` of a string differs between processes, and its hashes of -1 and -2 are equal.
    """
    digest = hashlib.blake2b(repr(values).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


Result = TypeVar("Result")


class Traffic(NamedTuple):
    """Counts of one rank's exchanges with the other ranks of its group: bytes sent, bytes received, and collectives."""

    sent: int
    received: int
    collectives: int


class Collectives:
    """The collectives of one group as a rank sees them."""

    def __init__(self, group: ProcessGroup):
        self._group = ref(group)  # weak: a value of _collectives must not keep its key alive
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.traffic = Traffic(0, 0, 0)
        self.compared_calls: set[str] = set()

    @property
    def group(self) -> ProcessGroup:
        return self._group()

    def swap(self, message: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Sends sent[r] bytes of a message to each rank r. Returns received[r] bytes from each rank r, in rank order.

        message: uint8 [sum(sent)]. The host knows the byte counts, so it waits for no device.
        """
        received_message = self._all_to_all(message, list(sent), list(received))
        others = [r for r in range(self.size) if r != self.rank]
        before = self.traffic
        self.traffic = Traffic(
            before.sent + sum(sent[r] for r in others),
            before.received + sum(received[r] for r in others),
            before.collectives + 1,
        )
        return received_message

    def _all_to_all(self, message: Tensor, sent: list[int], received: list[int]) -> Tensor:
        received_message = message.new_empty(sum(received))
        dist.all_to_all_single(received_message, message, received, sent, group=self.group)
        return received_message

    def all_gather(self, part: Tensor) -> Tensor:
        """Returns the parts of all R ranks, [R, ...]."""
        parts = part.new_empty((self.size, *part.shape))
        _all_gather(parts.view(-1), part.reshape(-1), group=self.group)
        return parts

    def agreed_result(
        self,
        call: str,
        make_result: Callable[[], Result],
        compared_arguments: Callable[[Result], dict[str, object]],
        check: bool | None = None,
    ) -> Result:
        """Returns what `make_result` returns. If it raises on any rank, or if the ranks' arguments differ, all raise.

        The ranks compare one hash, with one collective of a fixed size, so that the collectives of ranks in different
        functions still match. The host waits for the result of the collective.
        call: the name of the function. Its first call in a group compares.
        compared_arguments: returns the arguments that have to be the same on all ranks, by name.
        check: whether the ranks compare. None: in the first call, and in all calls under torch.distributed's debug level.
        """
        result, error, compares = None, None, None
        try:
            compares = None if check is None else resolve_flag(check, "check")
            result = make_result()
        except Exception as raised:  # of any type: the other ranks must learn of it
            error = raised
        # Compiled code compares nothing: a set of calls would be a guard, and every call would compile again.
        if may_read() and self.size > 1:
            if compares is None:
                is_first = call not in self.compared_calls
                compares = is_first or dist.get_debug_level() != dist.DebugLevel.OFF
            self.compared_calls.add(call)
            if compares:
                self._compare(call, error, lambda: compared_arguments(result))
        if error is not None:
            raise error
        return result

    def raise_on_all_ranks(self, call: str, error: Exception) -> None:
        """Raises `error` on this rank, and a ValueError on the other ranks if they compare the arguments of `call`."""

        def fail():
            raise error

        self.agreed_result(call, fail, dict)

    def _compare(
        self,
        call: str,
        error: Exception | None,
        compared_arguments: Callable[[], dict[str, object]],
    ) -> None:
        arguments = {}
        try:
            arguments = compared_arguments() if error is None else {}
        except Exception as raised:
            error = raised
        message = [int(error is not None), code_of(call, arguments)]
        message = torch.tensor(message, dtype=torch.int64, device=self._device())
        failed, codes = self.all_gather(message).t().tolist()
        if error is not None:
            raise error
        if any(failed):
            ranks = [r for r in range(self.size) if failed[r]]
            raise ValueError(
                f"group: got invalid arguments on ranks {ranks}, expected none; see the errors of these ranks"
            )
        if len(set(codes)) > 1:
            words = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
            raise ValueError(
                f"group: ranks differ: got {call}({words}) on rank {self.rank}, expected the same on all ranks"
            )

    def _device(self) -> str:
        """Returns the device on which ranks compare: the CPU if the group has collectives for it (NCCL has none).

        The device of the arguments does not decide this, because ranks may have arguments on different devices.
        """
        config = dist.get_backend_config(self.group)  # such as "cpu:gloo,cuda:nccl"
        kinds = [backend.partition(":")[0] for backend in config.split(",")]
        return "cpu" if "cpu" in kinds else kinds[0]


_collectives: WeakKeyDictionary[ProcessGroup, Collectives] = WeakKeyDictionary()


def collectives_of(group: Group | Collectives) -> Collectives:
    """Returns the Collectives of a process group or of a device mesh of one dimension."""
    if isinstance(group, Collectives):
        return group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group: got a DeviceMesh of {group.ndim} dimensions, expected one: mesh['cp'] for a dimension 'cp'"
            )
        group = group.get_group()
    if not isinstance(group, ProcessGroup):
        raise TypeError(
            f"group: got {type(group).__name__}, expected a ProcessGroup or a DeviceMesh that this rank is in"
        )
    if torch.compiler.is_compiling():
        _make_collectives_while_compiling(group.group_name)
    return _collectives_of(group)


def _collectives_of(group: ProcessGroup) -> Collectives:
    collectives = _collectives.get(group)
    if collectives is None:
        collectives = _collectives[group] = Collectives(group)
    return collectives


@torch.compiler.assume_constant_result
def _make_collectives_while_compiling(name: str) -> None:
    """Makes the group's Collectives now, in case compiled code is the first to use the group.

    Tracing may replace the group by a fake one, so the group is looked up by its name.
    """
    _collectives_of(dist.distributed_c10d._resolve_process_group(name))


def exchanged_bytes(group: Group) -> Traffic:
    """Returns the bytes that this rank has sent and received in calls of context parallelism, and its collectives.

    group: a ProcessGroup, or a DeviceMesh of one dimension.
    """
    return collectives_of(group).traffic


def pack(*parts: Tensor) -> Tensor:
    """Packs parts [R, ...] into one message, uint8 [R, bytes]."""
    columns = []
    for part in parts:
        flat = part.flatten(1).contiguous().view(torch.uint8)
        columns.append(flat)
        padding = -flat.shape[1] % _ALIGNMENT
        if padding:
            columns.append(flat.new_zeros((flat.shape[0], padding)))
    return torch.cat(columns, 1)


def packed_bytes(*likes: Tensor) -> int:
    """Returns the bytes of one rank's row of a message. likes: tensors like its parts, without the first dimension."""
    return sum(-(-like.nbytes // _ALIGNMENT) * _ALIGNMENT for like in likes)


def unpack(message: Tensor, ranks: int, *likes: Tensor) -> list[Tensor]:
    """Returns the parts [ranks, ...] of a message. likes: a tensor like each part, without the first dimension."""
    message = message.view(ranks, -1)
    parts, begin = [], 0
    for like in likes:
        part = message[:, begin : begin + like.nbytes]
        # Each row's size is a multiple of the alignment, so that the part can be viewed in its dtype without a copy.
        parts.append(part.view(like.dtype).view(ranks, *like.shape))
        begin += packed_bytes(like)
    return parts
