"""Runs the ranks of a group as threads of one process, for more ranks than the machine has processors."""

import threading

import torch

from flash_dmattn.distributed._exchange.collectives import Collectives, Traffic


class _Meeting:
    def __init__(self, size):
        self.values = [None] * size
        self.barrier = threading.Barrier(size, timeout=120)

    def of_all(self, rank, value):
        self.values[rank] = value
        self.barrier.wait()
        values_of_ranks = list(self.values)
        self.barrier.wait()
        return values_of_ranks


class ThreadWire(Collectives):
    def __init__(self, meeting, rank):
        self.meeting, self.rank, self.size = meeting, rank, len(meeting.values)
        self.traffic, self.compared_calls = Traffic(0, 0, 0), set()

    def _device(self):
        return "cpu"

    def _all_to_all(self, message, sent, received):
        parts = self._of_all(message.split(sent))
        mine = [theirs[self.rank] for theirs in parts]
        assert [len(part) for part in mine] == received
        received_message = torch.cat(mine)
        self._of_all(None)
        return received_message

    def all_gather(self, part):
        parts = self._of_all(part)
        assert len({(other.dtype, other.shape) for other in parts}) == 1, "a collective would fail"
        stacked_parts = torch.stack(parts)
        self._of_all(None)
        return stacked_parts

    def _of_all(self, value):
        """Returns the values of all ranks, after their streams have made them and have read the values before."""
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return self.meeting.of_all(self.rank, value)


def run_in_threads(size, function):
    """Calls function(collectives) on each rank. Returns the list of results, or raises the first error."""
    meeting, results = _Meeting(size), [None] * size

    def work(rank):
        try:
            results[rank] = function(ThreadWire(meeting, rank))
        except BaseException as error:
            results[rank] = error
            meeting.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [result for result in results if isinstance(result, BaseException)]
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return results
