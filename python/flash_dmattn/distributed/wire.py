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

from .._core.checks import may_read, resolve_flag

# Calls of a group that are compared where the caller does not say otherwise: the first steps of a model.
CHECKED_CALLS = 100
COMPARED = 32  # the most numbers of a call that ranks compare; their message has a fixed size
# Its name from torch 2.13 on, and before.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
WITHOUT_STORE = ("fake", "mpi")  # backends
_ALIGNMENT = 16  # bytes: of each part of a message, so that it can be viewed in its dtype


def code_of(*values: object) -> int:
    """A number that is the same in every process for equal values, by what they print. (hash is not, for strings, nor does it tell
    -1 from -2.)"""
    return zlib.crc32(repr(values).encode())


Result = TypeVar("Result")


class Traffic(NamedTuple):
    """Everything that a rank has exchanged with the others of its group: bytes that it sent and received, and collectives."""

    sent: int
    received: int
    collectives: int


class Wire:
    """The collectives of one group as a rank sees them."""

    def __init__(self, group: ProcessGroup):
        self._group = ref(group)  # the key of _wires, which a value must not keep
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        ranks = dist.get_process_group_ranks(group)
        self.node_size = ranks_per_node(ranks, ranks_of_host(ranks))
        self.traffic = Traffic(0, 0, 0)
        self.calls = 0

    @property
    def group(self) -> ProcessGroup:
        return self._group()

    def swap(self, message: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Sends sent[r] bytes of a message to each rank r, and returns received[r] bytes of each, in the order of ranks.

        message: uint8 [sum(sent)]. The numbers are known on the host, which waits for no device.
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
        """[R, ...] of the parts of all ranks."""
        parts = part.new_empty((self.size, *part.shape))
        _all_gather(parts.view(-1), part.reshape(-1), group=self.group)
        return parts

    def agreed_result(
        self,
        check: bool | None,
        make_result: Callable[[], Result],
        compared_numbers: Callable[[Result], dict[str, int]],
    ) -> Result:
        """Returns what `make_result` returns. Raises on all ranks where one raises an error, or has another number than the others.

        Uses one collective of a fixed size, so that ranks with different arguments, or in different functions, still match. The host
        waits for its result.
        check: None: in the first calls of a group, of which all ranks have made as many.
        """
        result, error, compares = None, None, None
        try:
            compares = None if check is None else resolve_flag(check, "check")
            result = make_result()
        except Exception as raised:  # whatever it is, other ranks have to hear of it
            error = raised
        if may_read():  # compiled code that reads a count is compiled again for each
            self.calls += 1
            is_first = self.calls <= CHECKED_CALLS
            if self.size > 1 and (is_first if compares is None else compares):
                self._compare(error, lambda: compared_numbers(result))
        if error is not None:
            raise error
        return result

    def raise_on_all_ranks(self, error: Exception) -> None:
        """Raises the error, and another one on the ranks that compare at the same time."""

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
                f"group: got arguments that raise an error on ranks {ranks}, expected none; the messages of these ranks name them"
            )
        if len(set(functions)) > 1:
            raise ValueError(
                f"group: got ranks in different functions, expected the same call on all; this one compares {', '.join(own_numbers)}"
            )
        _check_equal(dict(zip(own_numbers, numbers_of_ranks, strict=False)))

    def _device(self) -> str:
        """The device on which ranks compare: the CPU, if the group has collectives for it (NCCL has none). Tensors do not decide it, as
        those of some ranks may be on another device."""
        config = dist.get_backend_config(self.group)  # as "cpu:gloo,cuda:nccl"
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
    """How many ranks torchrun started on each host, where these ranks have the same number, else 1. Waits for all of them.

    A rank's LOCAL_WORLD_SIZE is that of its own host, but all ranks have to choose the same exchange. They meet in the store
    because a collective would need a device, which tensors alone tell, and could not run while a CUDA graph is captured.

    ranks: of a group, in the default group.
    """
    local_world_size = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if dist.get_backend() not in WITHOUT_STORE:
        store, key = dist.distributed_c10d._get_default_store(), "flash_dmattn.local_world_size/"
        store.set(f"{key}{dist.get_rank()}", local_world_size)
        if {store.get(f"{key}{rank}") for rank in ranks} != {local_world_size.encode()}:
            return 1
    return max(int(local_world_size), 1)


def ranks_per_node(ranks: Sequence[int], host_size: int) -> int:
    """How many of a group share a host each time, where all hosts have as many consecutive ones; else 1.

    ranks: of the group, in the default group. host_size: the ranks of each host in the default group.
    """
    nodes = [len(list(same)) for _, same in groupby(rank // host_size for rank in ranks)]
    return nodes[0] if len(set(nodes)) == 1 else 1


_wires: WeakKeyDictionary[ProcessGroup, Wire] = WeakKeyDictionary()


def wire_of(group) -> Wire:
    """The Wire of a process group or of a device mesh of one dimension."""
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
    """Lets the ranks of a group meet now, where compiled code is the first to use it. Tracing may replace the group by a fake one,
    which its name resolves."""
    _known_wire(dist.distributed_c10d._resolve_process_group(name))


def exchanged_bytes(group) -> Traffic:
    """Everything that this rank has exchanged in calls of context parallelism so far: bytes sent and received, and collectives.

    group: ProcessGroup or DeviceMesh of one dimension; the first use of a group waits for all of its ranks.
    """
    return wire_of(group).traffic


def pack(*parts: Tensor) -> Tensor:
    """uint8 [R, bytes] of parts [R, ...]."""
    columns = []
    for part in parts:
        flat = part.flatten(1).contiguous().view(torch.uint8)
        columns.append(flat)
        padding = -flat.shape[1] % _ALIGNMENT
        if padding:
            columns.append(flat.new_zeros((flat.shape[0], padding)))
    return torch.cat(columns, 1)


def packed_bytes(*likes: Tensor) -> int:
    """The bytes that a message has for one rank; likes: parts of it, without the first dimension."""
    return sum(-(-like.nbytes // _ALIGNMENT) * _ALIGNMENT for like in likes)


def unpack(message: Tensor, ranks: int, *likes: Tensor) -> list[Tensor]:
    """Parts [ranks, ...] of a message; likes: one of each part, without the first dimension."""
    message = message.view(ranks, -1)
    parts, begin = [], 0
    for like in likes:
        part = message[:, begin : begin + like.nbytes]
        # A row of the message is a multiple of the alignment, so that the part may be viewed where it is.
        parts.append(part.view(like.dtype).view(ranks, *like.shape))
        begin += packed_bytes(like)
    return parts
