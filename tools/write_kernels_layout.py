"""Writes the layout of Hugging Face's `kernels` library: a build that `get_local_kernel` loads, and the sources for its builder.

    python tools/write_kernels_layout.py FOLDER --namespace _flash_dmattn_1a2b3c [--build FOLDER] [--cuda cu130]

    FOLDER/build/<variant>/      the Python package, its library, metadata.json: one for every torch from 2.10 on
    FOLDER/build.toml            for kernel-builder, which has not been run on it; the CPU's kernels only
    FOLDER/{bindings,include,src,torch-ext}

The namespace is that of the operators in torch.ops, and the name of the Python module: two of them can be in one process.
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
NAME = "flash-dmattn"
VERSION = re.search(
    r"VERSION (\d+)", (ROOT / "CMakeLists.txt").read_text().partition("project(")[2]
)[1]
# torch's stable ABI of 2.10, which the operators are compiled against (bindings/torch/CMakeLists.txt).
ABI = "torch-stable-abi210"


# The first line of build.toml.
MARK = "# Written by tools/write_kernels_layout.py. kernel-builder has not been run on it."


def build(folder: Path, namespace: str, cuda: str | None, definitions: list[str]) -> Path:
    """Builds the operators' library with that namespace, and returns its path."""
    options = {
        "FLASH_DMATTN_TORCH": "ON",
        "FLASH_DMATTN_NAMESPACE": namespace,
        "FLASH_DMATTN_CUDA": "ON" if cuda else "OFF",
        "Python_EXECUTABLE": sys.executable,
    }
    definitions = [*definitions, *(f"{name}={value}" for name, value in options.items())]
    settings = [f"-D{definition}" for definition in definitions]
    subprocess.run(["cmake", "--preset", "cpu", "-B", folder, *settings], cwd=ROOT, check=True)
    subprocess.run(["cmake", "--build", folder, "--target", "flash_dmattn_torch"], check=True)
    return folder / "bindings" / "torch" / f"{namespace}.abi3.so"


def write_variant(folder: Path, library: Path, namespace: str, cuda: str | None) -> None:
    variant = folder / "build" / f"{ABI}-{cuda or 'cpu'}-{platform.machine()}-linux"
    shutil.rmtree(variant, ignore_errors=True)
    copy_package(variant)
    shutil.copy(ROOT / "tests" / "cases" / "attention.csv", variant / "check")
    subprocess.run(["strip", "-o", variant / library.name, library], check=True)
    metadata = {
        "name": NAME,
        "id": namespace,
        "version": int(VERSION),
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cuda" if cuda else "cpu"},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


def copy_package(to: Path) -> None:
    """Copies the Python package. It has no module _ops, which kernel-builder writes."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "python" / "flash_dmattn", to, ignore=ignored)


def write_sources(folder: Path, commands: list[dict]) -> None:
    """Writes the sources, and a build.toml that lists the compiled sources with their flags."""
    for part in ("bindings", "include", "src"):
        shutil.rmtree(folder / part, ignore_errors=True)
        shutil.copytree(ROOT / part, folder / part)
    package = folder / "torch-ext" / NAME.replace("-", "_")
    shutil.rmtree(package, ignore_errors=True)
    copy_package(package)

    groups: dict[str, list[str]] = {}
    flags: dict[str, list[str]] = {}
    for command in commands:
        source = Path(command["file"]).relative_to(ROOT)
        group = "cpu"
        if source.parts[0] == "bindings":
            group = "torch"
        elif source.parts[:3] == ("src", "cpu", "isa"):
            group = f"cpu_{source.stem}"
        groups.setdefault(group, []).append(str(source))
        wanted = re.findall(
            r" (-m\w\S*|-O3|-fno-math-errno|-fno-trapping-math)", command["command"]
        )
        flags.setdefault(group, list(dict.fromkeys(["-std=c++20", *wanted])))
    headers = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "include").rglob("*.h"))
    headers += sorted(str(path.relative_to(ROOT)) for path in (ROOT / "src").rglob("*.h"))

    torch = [
        *groups.pop("torch"),
        *map(str, sorted(p.relative_to(ROOT) for p in ROOT.glob("bindings/torch/*.h"))),
    ]
    lines = [
        MARK,
        "[general]", f'name = "{NAME}"', f"version = {VERSION}", 'license = "apache-2.0"', 'backends = ["cpu"]', "",
        "[torch]", 'include = [".", "include", "src"]', f"src = {json.dumps(torch)}", "",
    ]  # fmt: skip
    for group, sources in groups.items():
        lines += [
            f"[kernel.{group}]", 'backend = "cpu"', 'depends = ["torch"]', 'include = ["include", "src"]',
            f"cxx-flags = {json.dumps(flags[group])}", f"src = {json.dumps([*sources, *headers])}", "",
        ]  # fmt: skip
    (folder / "build.toml").write_text("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="the folder of the layout")
    parser.add_argument(
        "--namespace",
        required=True,
        help="the name of the operators in torch.ops, and of the module",
    )
    parser.add_argument(
        "--build",
        type=Path,
        default=ROOT / "build" / "kernels",
        help="CMake's build folder (default: %(default)s)",
    )
    parser.add_argument(
        "--cuda", metavar="cu130", help="the version of CUDA for CUDA kernels (default: none)"
    )
    parser.add_argument(
        "-D", dest="define", action="append", default=[], help="a definition for cmake, NAME=VALUE"
    )
    options = parser.parse_args()
    if not re.fullmatch(r"_\w+", options.namespace):
        parser.error(f"--namespace: got {options.namespace}, expected an underscore and a name")
    folder = options.folder.resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)  # fails before the build, rather than after it
    except OSError as error:
        parser.error(f"folder: {error}")
    settings = folder / "build.toml"
    if any(folder.iterdir()) and not (settings.is_file() and settings.read_text().startswith(MARK)):
        # Its sources would be replaced.
        parser.error(f"folder: got {folder}, expected an empty folder or an earlier layout")
    settings.write_text(f"{MARK}\n")  # a run that fails leaves a folder that the next one takes
    library = build(options.build.resolve(), options.namespace, options.cuda, options.define)
    write_variant(folder, library, options.namespace, options.cuda)
    commands = json.loads((options.build / "compile_commands.json").read_text())
    built = (str(ROOT / "src"), str(ROOT / "bindings"))
    write_sources(folder, [c for c in commands if c["file"].startswith(built)])
    print(folder)


if __name__ == "__main__":
    main()
