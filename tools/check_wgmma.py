"""Compiles a CUDA source and fails if a wgmma kernel was serialized or spills.

    check_wgmma.py CUOBJDUMP COMPILER ARGUMENTS... -o OBJECT ...

A compiler launcher (CMake: CUDA_COMPILER_LAUNCHER). It runs the command and then fails if
- ptxas reports that it has ignored setmaxnreg (C7508) or serialized wgmma (C7509 to C7520), or
- an innermost loop with matrix products (HGMMA) reads or writes local memory: registers that did not suffice, or
- the enclosing loops, or the rest of such a kernel (mostly producers), have more such instructions than ALLOWED.
Without cuobjdump (CMake's ...-NOTFOUND) the loops are not checked, and CMake has warned.
"""

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

REPORT = re.compile(r"\(?C75(?:0[89]|1\d|20)\)?")
INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);")
LOCAL = re.compile(r"\b(?:LDL|STL)\b")
KERNEL = re.compile(r"(Forward|Backward)KernelI.*?Li(\d+)ELi(\d+)E")
# BackwardVariant::large_lse: such a kernel serves rare calls.
LARGE_LSE = re.compile(r"BackwardVariant.*ELb[01]ELb1ELb1EE")
BRANCH = re.compile(r"^(@!?U?P\d+ |@!?U?PT )?BRA(?:\.\S+)? .*?0x([0-9a-f]+)")


Body = list[tuple[int, str]]  # (address, instruction)


class LocalAccesses(NamedTuple):
    """Instructions of a kernel that touch local memory."""

    innermost: int  # in innermost loops with HGMMA
    outer: int  # in loops around those: once in a work tile or a round
    rest: int  # elsewhere: producers, with 24 to 40 registers, prologue and epilogue


# Limits by direction, and the head dimensions of q and v. The comments have CUDA 13.0's counts; the margin is for
# other compilers.
ALLOWED = {
    ("Forward", 64, 64): LocalAccesses(0, 16, 128),  # 0, 12, 86
    ("Forward", 96, 96): LocalAccesses(0, 0, 144),  # 0, 0, 130
    ("Forward", 128, 128): LocalAccesses(0, 0, 144),  # 0, 0, 130
    ("Forward", 192, 192): LocalAccesses(0, 0, 240),  # 0, 0, 227
    ("Forward", 192, 128): LocalAccesses(0, 16, 240),  # 0, 12, 227: over lists
    ("Forward", 256, 256): LocalAccesses(0, 96, 240),  # 0, 86, 227
    ("Backward", 64, 64): LocalAccesses(0, 0, 320),  # 0, 0, 233
    ("Backward", 96, 96): LocalAccesses(0, 0, 320),  # 0, 0, 235
    # 0, 3, 233: a part's number, where slots have delayed biases.
    ("Backward", 128, 128): LocalAccesses(0, 4, 320),
    ("Backward", 192, 192): LocalAccesses(0, 0, 320),  # 0, 0, 171
    ("Backward", 192, 128): LocalAccesses(0, 0, 320),
    ("Backward", 256, 256): LocalAccesses(0, 8, 320),  # 0, 6, 181
}

ALLOWED_WITH_LARGE_LSE = LocalAccesses(40, 16, 320)

PLACES = {
    "innermost": "innermost loops with HGMMA",
    "outer": "loops around those with HGMMA",
    "rest": "producers and elsewhere",
}


def functions(listing: str) -> Iterator[tuple[str, Body]]:
    """Yields (name, [(address, instruction)]) of a cuobjdump listing."""
    name, body = None, []
    for line in listing.splitlines():
        if "Function : " in line:
            if body:
                yield name, body
            name, body = line.split("Function : ")[1].strip(), []
        elif match := INSTRUCTION.match(line):
            body.append((int(match[1], 16), match[2]))
    if body:
        yield name, body


def successors(body: Body) -> list[list[int]]:
    """Returns the indices of the instructions that may follow each instruction."""
    index = {address: i for i, (address, _) in enumerate(body)}
    result = []
    for i, (_, text) in enumerate(body):
        nexts = [i + 1] if i + 1 < len(body) else []
        if branch := BRANCH.match(text):
            target = index.get(int(branch[2], 16))
            nexts = ([] if branch[1] is None else nexts) + ([] if target is None else [target])
        elif text.startswith("EXIT"):
            nexts = []
        result.append(nexts)
    return result


def blocks_of(body: Body) -> tuple[list[list[str]], list[list[int]]]:
    """Returns the basic blocks: their instructions, and the blocks that may follow each."""
    nexts = successors(body)
    leaders = {0} | {n for i, ns in enumerate(nexts) for n in ns if n != i + 1 or len(ns) != 1}
    leaders |= {i + 1 for i, ns in enumerate(nexts) if ns != [i + 1] and i + 1 < len(body)}
    starts = sorted(leaders)
    number = {start: b for b, start in enumerate(starts)}
    blocks, edges = [], []
    for start, end in zip(starts, [*starts[1:], len(body)], strict=True):
        blocks.append([text for _, text in body[start:end]])
        edges.append([number[n] for n in nexts[end - 1]])
    return blocks, edges


def natural_loops(edges: list[list[int]]) -> Iterator[set[int]]:
    """Returns the loops of a flow graph as sets of blocks. A loop has a back edge, whose target dominates its source."""
    everything = (1 << len(edges)) - 1
    before = [[] for _ in edges]
    for block, targets in enumerate(edges):
        for target in targets:
            before[target].append(block)
    dominators = [1] + [everything] * (len(edges) - 1)
    changed = True
    while changed:
        changed = False
        for block in range(1, len(edges)):
            common = everything
            for other in before[block]:
                common &= dominators[other]
            common |= 1 << block
            changed = changed or common != dominators[block]
            dominators[block] = common
    for source, targets in enumerate(edges):
        for head in targets:
            if not dominators[source] >> head & 1:
                continue
            loop, left = {head}, [source]
            while left:
                block = left.pop()
                if block not in loop:
                    loop.add(block)
                    left += before[block]
            yield loop


def local_accesses(body: Body) -> LocalAccesses | None:
    """Returns the LocalAccesses of a kernel, or None for one without HGMMA."""
    blocks, edges = blocks_of(body)
    products = {b for b, texts in enumerate(blocks) if any("HGMMA" in text for text in texts)}
    if not products:
        return None
    loops = [loop for loop in natural_loops(edges) if loop & products]
    innermost = [loop for loop in loops if not any(other < loop for other in loops)]
    inside = set().union(*innermost)
    outside = set().union(*loops) - inside

    def count(some: Iterable[int]) -> int:
        return sum(bool(LOCAL.search(text)) for block in some for text in blocks[block])

    return LocalAccesses(
        count(inside), count(outside), count(set(range(len(blocks))) - inside - outside)
    )


def faults_of(listing: str) -> Iterator[str]:
    """Yields a line for each kind of local memory access that exceeds its limit in a kernel of a listing."""
    for name, body in functions(listing):
        if (accesses := local_accesses(body)) is None:
            continue
        kernel = KERNEL.search(name)
        allowed = ALLOWED.get((kernel[1], int(kernel[2]), int(kernel[3]))) if kernel else None
        if LARGE_LSE.search(name):
            allowed = ALLOWED_WITH_LARGE_LSE
        for place, number in accesses._asdict().items():
            most = getattr(allowed or LocalAccesses(0, 0, 0), place)
            if number > most:
                yield f"{name}: {number} accesses to local memory in {PLACES[place]}, allowed are {most}"


def main() -> int:
    if len(sys.argv) < 3:
        print(
            f"check_wgmma.py: got {len(sys.argv) - 1} arguments, expected cuobjdump and a command that compiles",
            file=sys.stderr,
        )
        return 2
    cuobjdump, command = sys.argv[1], sys.argv[2:]
    run = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    sys.stderr.write(run.stderr)
    if run.returncode != 0 or "-c" not in command:
        return run.returncode
    faults = [line for line in run.stderr.splitlines() if REPORT.search(line)]
    if not cuobjdump.endswith("-NOTFOUND"):
        target = command[command.index("-o") + 1]
        listing = subprocess.run(
            [cuobjdump, "-sass", target], capture_output=True, text=True, check=True
        )
        faults += faults_of(listing.stdout)
    for fault in faults:
        print("check_wgmma.py:", fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
