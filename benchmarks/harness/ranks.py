"""Coordinates the processes that torchrun starts for one benchmark: their output, their time budget, and the record of their rows."""

from __future__ import annotations

import argparse
import gc
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # a host may refuse multicast
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist

from . import machine, record
from .options import commit, expect_commit

GPU = torch.cuda.is_available()
# A process ends this many seconds after its budget, because a collective may hang.
GRACE = 12


def add_options(parser: argparse.ArgumentParser, budget: float) -> None:
    parser.add_argument("--json", type=Path, help="the record")
    parser.add_argument("--commit", type=commit, help="of the sources, outside a checkout")
    parser.add_argument("--budget", type=_seconds, default=budget, help="seconds")
    parser.set_defaults(fail=parser.error)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= threading.TIMEOUT_MAX - GRACE:
        raise argparse.ArgumentTypeError(f"got {text}, expected more than 0 seconds")
    return seconds


class Ranks:
    """This process as one rank of several, which use NCCL on GPUs and gloo otherwise. Rank 0 prints and writes the record."""

    def __init__(self, options: argparse.Namespace, note: str):
        """Joins the process group and begins the record.

        options: the parsed options of `add_options`.
        note: the record's note, which says what its times are of.
        """
        if not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= os.environ.keys():
            program = f"torchrun --nproc_per_node 2 {sys.argv[0]}"
            options.fail(f"got no rank of this process, expected that of torchrun: {program}")
        self.began, self.budget, self.path = time.monotonic(), options.budget, options.json
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.record, self.last_line = {}, "none"
        if self.rank == 0:
            self.record = self._begin_record(options, note)
        watch = threading.Timer(options.budget + GRACE, self._end_process)
        watch.daemon = True
        watch.start()
        self.device = torch.device("cpu")
        if GPU:
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(1)
        dist.init_process_group("nccl" if GPU else "gloo", timeout=timedelta(seconds=100))
        self.group = dist.group.WORLD
        self.cpu = dist.new_group(backend="gloo")  # a rank that waits in it leaves the GPU idle

    def _begin_record(self, options: argparse.Namespace, note: str) -> dict:
        """Returns a record without rows. Ends the program before the first measurement if the record cannot be written."""
        launcher = f"torchrun --nproc_per_node {self.size}"
        origin = machine.origin("cuda" if GPU else "cpu", options.commit, launcher)
        if self.size > 1:
            origin["machine"]["name"] += f" x {self.size}"
        begun = origin | {"note": note, "rows": []}
        if self.path is not None:
            expect_commit(begun, options.fail)
            record.validate(begun)
            try:
                record.rows_to_extend(self.path, begun["commit"])
                record.expect_writable(self.path)
            except (OSError, ValueError) as error:
                options.fail(f"--json: {error}")
        return begun

    def _end_process(self) -> None:
        """Ends the process, which may hang in a collective, and prints the last line that it reached."""
        spent = f"spent {self.budget:.0f} s of --budget and {GRACE} s more"
        print(f"rank {self.rank} ends: {spent}, after the line: {self.last_line}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(3)

    def print_line(self, text: str) -> None:
        self.last_line = text
        if self.rank == 0:
            print(f"[{time.monotonic() - self.began:4.0f} s] {text}", flush=True)

    def add_row(self, row: dict) -> None:
        """Prints the row and immediately adds it to the record's file."""
        self.print_line(record.format_row(row))
        if self.rank == 0 and self.path is not None:
            before = record.rows_to_extend(self.path, self.record["commit"])
            record.write(self.path, self.record | {"rows": record.with_row(before, row)})

    def gather_values(self, value) -> list:
        """Returns the values of all ranks."""
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.cpu)
        return values

    def has_time_for(self, seconds: float) -> bool:
        """Returns whether every rank has more than `seconds` of its budget left."""
        left = self.budget - (time.monotonic() - self.began)
        return min(self.gather_values(left)) > seconds

    def wait_for_all(self) -> None:
        if GPU:
            torch.cuda.synchronize()
        dist.barrier(group=self.cpu)

    def clear_memory(self) -> None:
        gc.collect()
        if GPU:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak_mb(self) -> float | None:
        """Returns the peak memory since `clear_memory` in millions of bytes, None without a GPU."""
        return torch.cuda.max_memory_allocated() / 1e6 if GPU else None

    def finish(self) -> None:
        self.wait_for_all()
        sys.stdout.flush()
        os._exit(0)  # gloo's threads outlive their group
