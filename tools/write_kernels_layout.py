"""Builds the layout that `kernels.get_local_kernel` of Hugging Face's `kernels` library loads.

    python tools/write_kernels_layout.py FOLDER --namespace _flash_dmattn_1a2b3c [--build FOLDER] [--cuda cu130]

FOLDER/build/<variant>/ has the Python package, its library and metadata.json: one for every torch from 2.10 on. The
namespace is that of the operators in torch.ops, and the name of the Python module, so that one process can load several.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROJECT = (ROOT / "CMakeLists.txt").read_text().partition("project(")[2]
VERSION = re.search(r"VERSION (\d+)", PROJECT)[1]
# torch's stable ABI of 2.10, which the operators are compiled against (bindings/torch/CMakeLists.txt).
ABI = "torch-stable-abi210"


def build_library(folder: Path, namespace: str, cuda: str | None, definitions: list[str]) -> Path:
    """Builds the operators' library with that namespace, and returns its path."""
    definitions = [
        *definitions,
        "FLASH_DMATTN_TORCH=ON",
        f"FLASH_DMATTN_NAMESPACE={namespace}",
        f"FLASH_DMATTN_CUDA={'ON' if cuda else 'OFF'}",
        f"Python_EXECUTABLE={sys.executable}",
    ]
    settings = [f"-D{definition}" for definition in definitions]
    subprocess.run(["cmake", "--preset", "cpu", "-B", folder, *settings], cwd=ROOT, check=True)
    subprocess.run(["cmake", "--build", folder, "--target", "flash_dmattn_torch"], check=True)
    return folder / "bindings" / "torch" / f"{namespace}.abi3.so"


def write_variant(folder: Path, library: Path, namespace: str, cuda: str | None) -> None:
    variant = folder / "build" / f"{ABI}-{cuda or 'cpu'}-{platform.machine()}-linux"
    shutil.rmtree(variant, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "python" / "flash_dmattn", variant, ignore=ignored)
    shutil.copy(ROOT / "tests" / "cases" / "attention.csv", variant / "check")
    subprocess.run(["strip", "-o", variant / library.name, library], check=True)
    metadata = {
        "name": "flash-dmattn",
        "id": namespace,
        "version": int(VERSION),
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cuda" if cuda else "cpu"},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("folder", type=Path, help="the folder of the layout")
    add("--namespace", required=True, help="of the operators in torch.ops, and the module's name")
    add("--build", type=Path, default=ROOT / "build" / "kernels", help="CMake's build folder")
    add("--cuda", metavar="cu130", help="the version of CUDA for CUDA kernels (default: none)")
    add("-D", dest="define", action="append", default=[], help="a definition for cmake, NAME=VALUE")
    options = parser.parse_args()
    if not re.fullmatch(r"_\w+", options.namespace):
        parser.error(f"--namespace: got {options.namespace}, expected an underscore and a name")
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    library = build_library(
        options.build.resolve(), options.namespace, options.cuda, options.define
    )
    write_variant(folder, library, options.namespace, options.cuda)
    print(folder)


if __name__ == "__main__":
    main()
