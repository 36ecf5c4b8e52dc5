"""A layer's scores learn associative recall with a fifth of the keys, only from the gradient of attention."""

import pytest
import torch

import recall

# With gates, each of eight seeds recalled at least 0.995; with the window, each of three seeds at most 0.034.
SIZES = "--length 48 --pairs 6 --window 9 --layers 1 --steps 160 --rate 7e-3".split()


@pytest.fixture
def one_thread():
    """Runs torch with one thread, because on such small tensors threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_gates_recall_and_window_of_twice_the_size_fails():
    options = recall.parse([*SIZES, "--device", "cpu"])
    assert recall.mean_final_recall(recall.train("gate", options)) >= 0.95
    assert recall.mean_final_recall(recall.train("window", options)) <= 0.1  # chance is 1 of 32


def test_example_runs_to_the_end(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "recall.svg"
    recall.main(
        [*SIZES, "--steps", "3", "--batch", "2", "--device", "cpu", "--output", str(picture)]
    )
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == ["log", "A", "exp(A", "none:"]
    assert "<svg" in picture.read_text()
