"""Measures the largest tensor that operators make, to prove that none has size N x N."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    """Within the context, `elements` is the number of elements of the largest result so far.

    Views count by the memory they show, so a broadcast (stride 0) is as small as its source.
    """

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                shown = 1
                for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
                    shown *= size if stride else 1
                self.elements = max(self.elements, shown)
        return result
