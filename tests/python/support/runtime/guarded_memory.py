"""Puts guards around allocated memory, which show whether anything outside the results was written."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_GUARD = 4096  # elements on either side
_VALUE = 77
_ALLOCATORS = {
    torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided, torch.ops.aten.new_empty,
}  # fmt: skip


class GuardedMemory(TorchDispatchMode):
    """Within the context, uninitialised tensors lie between guards."""

    def __init__(self):
        super().__init__()
        self._memory = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket not in _ALLOCATORS:
            return result
        elements = result.untyped_storage().nbytes() // result.element_size()
        memory = torch.full(
            (elements + 2 * _GUARD,), _VALUE, dtype=result.dtype, device=result.device
        )
        self._memory.append(memory)
        return memory.as_strided(result.shape, result.stride(), _GUARD)

    def assert_untouched(self):
        assert self._memory
        for memory in self._memory:
            for guard in (memory[:_GUARD], memory[-_GUARD:]):
                assert (guard == _VALUE).all(), f"{memory.numel() - 2 * _GUARD} {memory.dtype}"
