#!/usr/bin/env python3
"""Runs the tests that need an NVIDIA GPU, and writes their results into docs/tested.md.

Everything runs with the Python that runs this program: the operators are compiled against its torch.
"""

import argparse
import datetime
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "cuda"
SUITES = {
    "cuda": "C++ tests of the CUDA backend",
    "sanitizer": "small C++ tests under memcheck, racecheck, synccheck and initcheck",
    "python": "Python tests of the CUDA backend",
}
# Files with tests on a GPU. Others may import what a machine with a GPU need not have.
TESTS = [
    path
    for path in sorted((ROOT / "tests" / "python").rglob("test_*.py"))
    if path.parent.name == "gpu" or re.search(r"from gpu import|mark\.gpu", path.read_text())
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"{', '.join(SUITES)}; all")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "tested.md")
    parser.add_argument(
        "--jobs",
        type=int,
        help="tests of a suite at the same time (default: the suites, which run at the same time, share the cores); those in "
        "Python need pytest-xdist for it",
    )
    options = parser.parse_args()
    suites = options.suites or list(SUITES)
    if unknown := set(suites).difference(SUITES):  # choices= refuses an empty list
        parser.error(f"SUITE: got {', '.join(unknown)}, expected some of {', '.join(SUITES)}")
    jobs = str(options.jobs or max(1, (os.cpu_count() or 1) // len(suites)))
    import torch

    if not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} finds no GPU")
    card = torch.cuda.get_device_name()
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}"
    build("".join(map(str, torch.cuda.get_device_capability())))
    has_failed = False
    with ThreadPoolExecutor() as pool:
        running = {pool.submit(run, suite, jobs): suite for suite in suites}
        for finished in as_completed(running):
            passed, failed, skipped = finished.result()
            row = (
                card,
                SUITES[running[finished]],
                passed,
                failed,
                skipped,
                commit(),
                datetime.date.today(),
                versions,
            )
            write_row(options.page, [str(cell) for cell in row])
            has_failed |= failed > 0 or passed == 0
    return int(has_failed)


def build(architecture: str) -> None:
    """Builds the operators and the C++ tests with all kernels: those for older GPUs run on this one, too."""
    environment = os.environ | {"CUDACXX": shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"}
    for launcher in ("CMAKE_CXX_COMPILER_LAUNCHER", "CMAKE_CUDA_COMPILER_LAUNCHER"):
        if not shutil.which(environment.get(launcher) or "-"):
            environment.pop(launcher, None)
    configure = [
        "cmake", "--preset", "cuda", "-D", "FLASH_DMATTN_TORCH=ON", "-D", "FLASH_DMATTN_TESTS=ON",
        "-D", f"FLASH_DMATTN_CUDA_ARCHITECTURES={architecture}-real",
        "-D", "FLASH_DMATTN_CUDA_ALL_KERNELS=ON", "-D", f"Python_EXECUTABLE={sys.executable}",
        "-D", f"GTest_ROOT={ROOT}/build/googletest/usr",
        "-D", f"FLASH_DMATTN_CUDA_EXTRA_FAMILIES={ROOT}/tests/cuda/families/empty",
    ]  # fmt: skip
    targets = [
        "cmake",
        "--build",
        "--preset",
        "cuda",
        "--target",
        "flash_dmattn_torch",
        "cuda_tests",
    ]
    for command in (configure, targets):
        subprocess.run(command, cwd=ROOT, env=environment, check=True)


def run(suite: str, jobs: str) -> tuple[int, int, int]:
    return run_python(jobs) if suite == "python" else run_ctest(suite, jobs)


def run_ctest(label: str, jobs: str) -> tuple[int, int, int]:
    """Returns the numbers of GoogleTest's tests that passed, failed and were skipped."""
    report = BUILD / f"{label}.xml"
    report.unlink(missing_ok=True)
    command = [
        "ctest", "--test-dir", BUILD, "--label-regex", f"^{label}$", "--parallel", jobs, "--output-on-failure",
        "--output-junit", report, "--test-output-size-passed", "100000",
    ]  # fmt: skip
    subprocess.run(command)
    passed = failed = skipped = 0
    for entry in ElementTree.parse(report).iter("testcase"):
        printed = entry.findtext("system-out") or ""
        ran, good, left_out = (
            sum(map(int, re.findall(pattern, printed)))
            for pattern in (
                r"==\] (\d+) tests? from .* ran",
                r"PASSED  \] (\d+)",
                r"SKIPPED \] (\d+)",
            )
        )
        passed, skipped = passed + good, skipped + left_out
        failed += ran - good - left_out
        if entry.get("status") == "fail" and ran == good + left_out:
            failed += 1  # a crash, or a finding of the sanitizer
        elif entry.get("status") not in ("run", "fail"):
            skipped += 1
    return passed, failed, skipped


def run_python(jobs: str) -> tuple[int, int, int]:
    """Returns the numbers of tests that passed, failed and were skipped."""
    report = BUILD / "python.xml"
    report.unlink(missing_ok=True)
    library = BUILD / "bindings" / "torch" / "_C.so"
    threads = max(1, (os.cpu_count() or 1) // int(jobs))  # by default torch takes all cores in each
    environment = os.environ | {
        "PYTHONPATH": str(ROOT / "python"),
        "FLASH_DMATTN_LIBRARY": str(library),
        "OMP_NUM_THREADS": str(threads),
    }
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", *TESTS, "--junitxml", report]
    if importlib.util.find_spec("xdist"):
        command += ["--numprocesses", jobs]
    subprocess.run(command, cwd=ROOT, env=environment)
    suites = list(ElementTree.parse(report).iter("testsuite"))
    tests, failures, errors, skipped = (
        sum(int(suite.get(count)) for suite in suites)
        for count in ("tests", "failures", "errors", "skipped")
    )
    return tests - failures - errors - skipped, failures + errors, skipped


def commit() -> str:
    """Returns FLASH_DMATTN_COMMIT where the tree travels without .git, else git's name of the tree."""
    if named := os.environ.get("FLASH_DMATTN_COMMIT"):
        return named
    command = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=8"]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def write_row(page: Path, row: list[str]) -> None:
    """Replaces the row of the same card and suite in the page's table, which is its end, or adds one."""
    lines = page.read_text().splitlines()
    key = f"| {row[0]} | {row[1]} | "
    rest = [line for line in lines if not line.startswith(key)]
    text = "\n".join([*rest, f"| {' | '.join(row)} |"]) + "\n"
    page.write_text(text)
    print(text.splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main())
