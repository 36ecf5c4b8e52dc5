"""The collectives of a group, how many bytes they move, and whether its ranks agree."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ..._core.checks import may_read, resolve_flag

# By default ranks compare their arguments in this many calls of a group, which are the first steps of a model.
CHECKED_CALLS = 100
COMPARED = 32  # Ranks compare at most 32 numbers of a call, because the message has a fixed size.
# torch 2.13 renamed all_gather_into_tensor to all_gather_single.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
WITHOUT_STORE = ("fake", "mpi")  # backends that use no store
_ALIGNMENT = 16  # bytes; each part of a message is aligned, so that it can be viewed in its dtype


def code_of(*values: object) -> int:
    """Hashes the `repr` of values, so that equal values have the same number in every process.

    Python's `hash` of a string differs between processes, and its hashes of -1 and -2 are equal.
    """
    return zlib.crc32(repr(values).encode())


Result = TypeVar("Result")


class Traffic(NamedTuple):
    """Counts of one rank's exchanges with the other ranks of its group: bytes sent, bytes received, and collectives."""

    sent: int
    received: int
    collectives: int


class Wire:
    """The collectives of one group as a rank sees them."""

    def __init__(self, group: ProcessGroup):
        self._group = ref(group)  # weak: a value of _wires must not keep its key alive
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        ranks = dist.get_process_group_ranks(group)
        self.node_size = ranks_per_node(ranks, ranks_of_host(ranks))
        self.traffic = Traffic(0, 0, 0)
        self.calls = 0

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
        check: bool | None,
        make_result: Callable[[], Result],
        compared_numbers: Callable[[Result], dict[str, int]],
    ) -> Result:
        """Returns what `make_result` returns. If it raises on any rank, or if the ranks' numbers differ, all raise.

        The ranks compare with one collective of a fixed size, so that the collectives of ranks with different
        arguments, or in different functions, still match. The host waits for the result of the collective.
        check: whether the ranks compare. None: only in a group's first calls, which every rank counts alike.
        """
        result, error, compares = None, None, None
        try:
            compares = None if check is None else resolve_flag(check, "check")
            result = make_result()
        except Exception as raised:  # of any type: the other ranks must learn of it
            error = raised
        if may_read():  # torch.compile would recompile for each value of self.calls
            self.calls += 1
            is_first = self.calls <= CHECKED_CALLS
            if self.size > 1 and (is_first if compares is None else compares):
                self._compare(error, lambda: compared_numbers(result))
        if error is not None:
            raise error
        return result

    def raise_on_all_ranks(self, error: Exception) -> None:
        """Raises `error` on this rank, and a ValueError on the other ranks that compare at the same time."""

        def fail():
            raise error

        self.agreed_result(None, fail, dict)

    def _compare(
        self, error: Exception | None, compared_numbers: Callable[[], dict[str, int]]
    ) -> None:
        own_numbers = {}
        try:
            own_numbers = compared_numbers() if error is None else {}
            message = _message_of(own_numbers)
        except Exception as raised:
            error = raised
        if error is not None:
            message = [1] + [0] * (COMPARED + 1)
        message = torch.tensor(message, dtype=torch.int64, device=self._device())
        failed, functions, *numbers_of_ranks = self.all_gather(message).t().tolist()
        if error is not None:
            raise error
        if any(failed):
            ranks = [r for r in range(self.size) if failed[r]]
            raise ValueError(
                f"group: got invalid arguments on ranks {ranks}, expected none; see the errors of these ranks"
            )
        if len(set(functions)) > 1:
            raise ValueError(
                f"group: got ranks in different functions, expected the same call on all; this one compares {', '.join(own_numbers)}"
            )
        _check_equal(dict(zip(own_numbers, numbers_of_ranks, strict=False)))

    def _device(self) -> str:
        """Returns the device on which ranks compare: the CPU if the group has collectives for it (NCCL has none).

        The device of the arguments does not decide this, because ranks may have arguments on different devices.
        """
        config = dist.get_backend_config(self.group)  # such as "cpu:gloo,cuda:nccl"
        kinds = [backend.partition(":")[0] for backend in config.split(",")]
        return "cpu" if "cpu" in kinds else kinds[0]


def _message_of(numbers: dict[str, int]) -> list[int]:
    for name, number in numbers.items():
        if not isinstance(number, int) or not -(2**63) <= number < 2**63:
            raise TypeError(f"{name}: got {number!r}, expected an integer of 64 bits")
    message = [0, code_of(*numbers), *numbers.values()]
    return message + [0] * (COMPARED + 2 - len(message))


def _check_equal(numbers_by_name: dict[str, list[int]]) -> None:
    different = {name: values for name, values in numbers_by_name.items() if len(set(values)) > 1}
    if different:
        raise ValueError(
            f"group: got ranks that disagree, expected the same on all: {different} in the order of ranks "
            "(lists by a code)"
        )


def ranks_of_host(ranks: Sequence[int]) -> int:
    """Returns how many ranks torchrun started on each host, or 1 if `ranks` report different numbers. Waits for them.

    LOCAL_WORLD_SIZE counts the ranks of a rank's own host, but all ranks have to choose the same exchange. They compare
    it through the store: a collective would need a device, which only tensors name, and cannot run under CUDA graph
    capture.

    ranks: the ranks of a group, numbered as in the default group.
    """
    local_world_size = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if dist.get_backend() not in WITHOUT_STORE:
        store, key = dist.distributed_c10d._get_default_store(), "flash_dmattn.local_world_size/"
        store.set(f"{key}{dist.get_rank()}", local_world_size)
        if {store.get(f"{key}{rank}") for rank in ranks} != {local_world_size.encode()}:
            return 1
    return max(int(local_world_size), 1)


def ranks_per_node(ranks: Sequence[int], host_size: int) -> int:
    """Returns how many consecutive ranks of a group share each host if this number is the same for all hosts, else 1.

    ranks: the ranks of the group, numbered as in the default group. host_size: the number of ranks on each host.
    """
    nodes = [len(list(same)) for _, same in groupby(rank // host_size for rank in ranks)]
    return nodes[0] if len(set(nodes)) == 1 else 1


_wires: WeakKeyDictionary[ProcessGroup, Wire] = WeakKeyDictionary()


def wire_of(group) -> Wire:
    """Returns the Wire of a process group or of a device mesh of one dimension."""
    if isinstance(group, Wire):
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
        _meet_while_compiling(group.group_name)
    return _known_wire(group)


def _known_wire(group: ProcessGroup) -> Wire:
    wire = _wires.get(group)
    if wire is None:
        wire = _wires[group] = Wire(group)
    return wire


@torch.compiler.assume_constant_result
def _meet_while_compiling(name: str) -> None:
    """Makes the group's Wire now, which lets its ranks meet, in case compiled code is the first to use the group.

    Tracing may replace the group by a fake one, so the group is looked up by its name.
    """
    _known_wire(dist.distributed_c10d._resolve_process_group(name))


def exchanged_bytes(group) -> Traffic:
    """Returns the bytes that this rank has sent and received in calls of context parallelism, and its collectives.

    group: a ProcessGroup, or a DeviceMesh of one dimension. The first use of a group waits for all of its ranks.
    """
    return wire_of(group).traffic


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
