"""Milliseconds of a call, on the processor or on the GPU, and the peak of its memory."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flash_dmattn.check.memory import peak_bytes

# A GPU's clock follows its load with a delay: without a warm-up a case would be timed at the clock of the case before it.
_SECONDS_OF_WARM_UP = 0.5
_SECONDS_OF_REPLAYS = 0.1  # of a graph, before the replays that count
_CYCLES_AHEAD = 2_000_000  # about a millisecond, in which Python runs ahead of the GPU


@dataclass(frozen=True)
class Step:
    """A forward, the inputs that it is differentiated by, and the gradient of its output."""

    forward: Callable[[], Tensor]
    leaves: list[Tensor]  # empty where a side has no backward
    dout: Tensor
    mask_bytes: int = 0  # of a mask that was made for this side alone

    def backward(self, out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, self.leaves, self.dout) if self.leaves else ()


@dataclass(frozen=True)
class Cost:
    forward_ms: float
    backward_ms: float | None  # None: the side has no backward
    peak_bytes: int  # of forward and backward together, beyond query, key, value and bias


def timed(call: Callable, device: str, *arguments: object) -> tuple[float, object]:
    """Milliseconds of one call, and its result."""
    if device == "cpu":
        start = time.perf_counter()
        result = call(*arguments)
        return (time.perf_counter() - start) * 1e3, result
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_CYCLES_AHEAD)
    begin.record()
    result = call(*arguments)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end), result


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def elapsed_ms(call: Callable[[], object], device: str) -> float:
    """Milliseconds until the call has ended on the device, launches included."""
    wait(device)
    start = time.perf_counter()
    call()
    wait(device)
    return (time.perf_counter() - start) * 1e3


def capture_graph(calls: list[Callable[[], object]], rounds: int = 1) -> Callable[[], None]:
    """The replay of a CUDA graph of these calls, `rounds` times. Each call runs before the capture, which raises if it
    cannot run."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # NCCL's thread queries events at any time, which a capture in the default mode refuses.
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        for call in calls * rounds:
            call()
    return graph.replay


def graph_ms(calls: list[Callable[[], object]], at_least: int, repeats: int) -> float:
    """Milliseconds of one of these calls in a CUDA graph of `at_least` calls or more: the median of its replays."""
    rounds = math.ceil(at_least / len(calls))
    replay = capture_graph(calls, rounds)
    start = time.perf_counter()
    while time.perf_counter() - start < _SECONDS_OF_REPLAYS:
        elapsed_ms(replay, "cuda")
    times = [timed(replay, "cuda")[0] for _ in range(repeats)]
    return statistics.median(times) / (rounds * len(calls))


def count_kernels(call: Callable[[], object]) -> tuple[int, float]:
    """How many kernels and copies a call launches, and the sum of their milliseconds."""
    kernels = kernel_times(call).values()
    return sum(count for count, _ in kernels), sum(ms for _, ms in kernels)


def kernel_times(call: Callable[[], object]) -> dict[str, tuple[int, float]]:
    """The kernels and copies that a call launches, by name: how many, and the sum of their milliseconds."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    on_gpu = torch.autograd.DeviceType.CUDA
    events = [event for event in profile.key_averages() if event.device_type == on_gpu]
    return {event.key: (event.count, event.self_device_time_total / 1e3) for event in events}


def costs(steps: dict[str, Step], device: str, repeats: int) -> dict[str, Cost]:
    """Median costs of each side over `repeats` rounds after warm-up. Each round has a random order of sides, so that
    neither a drifting clock nor the preceding side favours one. A round times all forwards, then all
    backwards, because a call starts at the clock that the preceding one has left. On an H200 that is 1.65 to 1.68 GHz
    after long forwards and 1.70 to 1.82 GHz after backwards: a side without a backward would slow the next forward."""
    draw = random.Random(0)

    def in_any_order() -> list[str]:
        return draw.sample(list(steps), len(steps))

    def one_round() -> dict[str, tuple[float, float]]:
        forwards = {name: timed(steps[name].forward, device) for name in in_any_order()}
        times = {}
        for name in in_any_order():
            forward, out = forwards.pop(name)
            backward, _ = timed(steps[name].backward, device, out)
            del out
            times[name] = (forward, backward)
        return times

    begin = time.perf_counter()
    one_round()
    while device != "cpu" and time.perf_counter() - begin < _SECONDS_OF_WARM_UP:
        one_round()
    rounds = [one_round() for _ in range(repeats)]
    costs_by_side = {}
    for name, step in steps.items():
        forward, backward = map(
            statistics.median, zip(*(times[name] for times in rounds), strict=True)
        )
        costs_by_side[name] = Cost(
            forward, backward if step.leaves else None, peak_of(step, device)
        )
    return costs_by_side


def peak_of(step: Step, device: str) -> int:
    """Bytes of outputs, gradients, intermediate tensors, and the mask."""

    def run():
        out = step.forward()
        return out, *step.backward(out)

    return peak_bytes(run, device)[0] + step.mask_bytes
