"""How long a call takes on the CPU or the GPU, and its peak memory."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from .memory import peak_bytes

# A GPU's clock follows its load with a delay. Without a warm-up, a case would run at the clock of the case before it.
_SECONDS_OF_WARM_UP = 0.5
_SECONDS_OF_REPLAYS = 0.1  # warm-up replays of a graph before the timed ones
# The GPU sleeps for about a millisecond, so that Python can launch ahead of it.
_CYCLES_AHEAD = 2_000_000


@dataclass(frozen=True)
class Step:
    """A forward function, its inputs that require a gradient, and the gradient of its output."""

    forward: Callable[[], Tensor]
    leaves: list[Tensor]
    dout: Tensor
    mask_bytes: int = 0  # of the N x N mask and bias that the side needs

    def backward(self, out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, self.leaves, self.dout)


@dataclass(frozen=True)
class Rounds:
    """Repeats a measurement. The time is the median of `count` rounds, or with `is_least` the least.

    warm_up: the rounds before them, and warm_up_seconds the least time that these take.
    """

    count: int
    is_least: bool = False
    warm_up: int = 1
    warm_up_seconds: float = 0.0

    def time_all(self, one_round: Callable[[], dict[Hashable, float]]) -> dict[Hashable, float]:
        """Returns the time of each name that a round measures, in its unit."""
        begin, done = time.perf_counter(), 0
        while done < self.warm_up or time.perf_counter() - begin < self.warm_up_seconds:
            one_round()
            done += 1
        rounds = [one_round() for _ in range(self.count)]
        summary = min if self.is_least else statistics.median
        return {name: summary([times[name] for times in rounds]) for name in rounds[0]}

    def time_one(self, measure: Callable[[], float]) -> float:
        return self.time_all(lambda: {"": measure()})[""]


def timed(call: Callable, device: str, *arguments: object) -> tuple[float, object]:
    """Calls once. Returns the milliseconds it took, and its result."""
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


def elapsed_ms(call: Callable[[], object], device: str) -> float:
    """Returns the milliseconds from the call until the device has finished, launches included."""

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    wait()
    start = time.perf_counter()
    call()
    wait()
    return (time.perf_counter() - start) * 1e3


def capture_graph(calls: list[Callable[[], object]], rounds: int = 1) -> Callable[[], None]:
    """Captures the calls, repeated `rounds` times, in a CUDA graph and returns its replay.
    Each call runs once before the capture."""
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
    """Captures at least `at_least` calls in a CUDA graph. Returns the milliseconds per call, the median of `repeats` replays."""
    rounds = math.ceil(at_least / len(calls))
    replay = capture_graph(calls, rounds)
    measure = Rounds(repeats, warm_up_seconds=_SECONDS_OF_REPLAYS)
    return measure.time_one(lambda: timed(replay, "cuda")[0]) / (rounds * len(calls))


def count_kernels(call: Callable[[], object]) -> tuple[int, float]:
    """Returns how many kernels and copies a call launches on a GPU, and their total milliseconds."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    on_gpu = torch.autograd.DeviceType.CUDA
    events = [event for event in profile.key_averages() if event.device_type == on_gpu]
    ms = sum(event.self_device_time_total for event in events) / 1e3
    return sum(event.count for event in events), ms


def times_of_steps(steps: dict[str, Step], device: str, repeats: int) -> dict[str, dict]:
    """Returns {side: {"forward": milliseconds, "backward": milliseconds}}.

    Each round shuffles the sides, so that neither clock drift nor the preceding side favours one. A round times all forwards,
    then all backwards, because a call starts at the clock that the preceding one left: on an H200, 1.65 to 1.68 GHz after long
    forwards and 1.70 to 1.82 GHz after backwards.
    """
    draw = random.Random(0)

    def in_any_order() -> list[str]:
        return draw.sample(list(steps), len(steps))

    def one_round() -> dict[tuple[str, str], float]:
        forwards = {name: timed(steps[name].forward, device) for name in in_any_order()}
        times = {}
        for name in in_any_order():
            times[name, "forward"], out = forwards.pop(name)
            times[name, "backward"], _ = timed(steps[name].backward, device, out)
            del out
        return times

    rounds = Rounds(repeats, warm_up_seconds=0.0 if device == "cpu" else _SECONDS_OF_WARM_UP)
    times = rounds.time_all(one_round)
    return {name: {way: times[name, way] for way in ("forward", "backward")} for name in steps}


def peak_mb(step: Step, device: str) -> float:
    """Returns the peak of a step in millions of bytes: outputs, gradients, intermediate tensors and the N x N mask, without
    query, key, value and a bias per key."""

    def run():
        out = step.forward()
        return out, *step.backward(out)

    return (peak_bytes(run, device)[0] + step.mask_bytes) / 1e6
