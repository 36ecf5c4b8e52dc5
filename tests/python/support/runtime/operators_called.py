"""A context that records operators and lists those that read values."""

from torch.utils._python_dispatch import TorchDispatchMode

_READS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero")


class OperatorsCalled(TorchDispatchMode):
    """`all` lists the called operators in order."""

    def __init__(self):
        super().__init__()
        self.all = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.all.append(operator)
        return operator(*args, **(kwargs or {}))

    def reads(self) -> list:
        """Returns the operators whose results the host reads, so that it would wait for a GPU."""
        return [operator for operator in self.all if operator.overloadpacket.__name__ in _READS]
