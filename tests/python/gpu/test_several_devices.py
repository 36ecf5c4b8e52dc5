"""With several GPUs in one process, work runs on the device of the tensors, not on the current device."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from flash_dmattn import KeyIntervals, flash_dmattn_func, select_key_intervals
from gpu import capture
from gpu_calls import FUNCTIONS, assert_close, gradients, gradients_behind_other_work, leaves

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has fewer than 2 GPUs"),
]


def on(device, tensors):
    return [t.detach().to(f"cuda:{device}").requires_grad_() for t in tensors]


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_result_does_not_depend_on_current_device(name, current):
    inputs = leaves()
    expected = gradients(FUNCTIONS[name], inputs)
    with torch.cuda.device(current):
        for device in (0, 1):
            actual = gradients(FUNCTIONS[name], on(device, inputs))
            assert {t.device for t in actual} == {torch.device("cuda", device)}
            assert torch.cuda.current_device() == current
            assert_close([t.to("cuda:0") for t in actual], expected)


def test_work_follows_the_streams_of_its_device():
    inputs = leaves(seqlen=2000)
    expected = gradients(FUNCTIONS["per_query"], inputs)
    inputs = on(1, inputs)
    torch.cuda.synchronize(1)
    actual = gradients_behind_other_work(inputs, torch.cuda.Stream(device=1))
    assert_close([t.to("cuda:0") for t in actual], expected)


def test_threads_on_devices_give_same_bits():
    inputs = leaves(seqlen=700)
    expected = gradients(FUNCTIONS["per_query"], inputs)
    copies = [on(device, inputs) for device in (0, 1)]

    def work(device):
        for _ in range(20):
            result = gradients(FUNCTIONS["per_query"], copies[device])
        return [t.to("cuda:0") for t in result]

    with ThreadPoolExecutor(2) as pool:
        for actual in pool.map(work, (0, 1)):
            assert_close(actual, expected)


def test_graph_on_another_device_equals_eager():
    inputs = on(1, leaves())
    dout = torch.randn(inputs[0].shape, dtype=torch.bfloat16, device="cuda:1")

    def step():
        return torch.autograd.grad(FUNCTIONS["per_query"](*inputs), inputs, dout)

    with torch.cuda.device(1):
        graph, captured = capture(step)
        graph.replay()
        assert_close(captured, step())


def test_selection_on_another_device_matches_cpu():
    scores = torch.randn(2, 3, 1000, device="cuda:1")
    for selection in ("per_query", "global"):
        actual = select_key_intervals(scores, 90, selection=selection)
        expected = select_key_intervals(scores.cpu(), 90, selection=selection)
        assert torch.equal(actual.intervals.cpu(), expected.intervals)
        unknown = KeyIntervals(actual.intervals, 1000).measured()
        assert unknown.bound == KeyIntervals(expected.intervals, 1000).measured().bound


def test_tensors_of_two_devices_are_named():
    q, k, v, bias = (t.detach() for t in leaves())
    with pytest.raises(TypeError, match="key: got .* on cuda:1"):
        flash_dmattn_func(q, k.to("cuda:1"), v)
    with pytest.raises(TypeError, match="attn_bias: got a tensor on cuda:1"):
        flash_dmattn_func(q, k, v, attn_bias=bias.to("cuda:1"))
