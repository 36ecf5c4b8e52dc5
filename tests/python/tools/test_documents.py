"""The Python code in the README and the site's pages runs, their C++ code compiles, and the reference has every public name."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import flash_dmattn

DOCS = Path(__file__).parents[3] / "docs"
PAGES = [
    DOCS.parent / "README.md",
    *(DOCS / f"{name}.md" for name in ("index", "generation", "quality")),
]
PAGES += [*sorted(DOCS.glob("tutorial/*.md")), *sorted(DOCS.glob("howto/*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
CPP_BLOCK = re.compile(r"^ *```(?:cpp|c\+\+)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
# Names that the blocks use without defining them.
LEFT_OUT = """
std::int64_t B, Hkv, N, w;
float *scores, *lse;
flash_dmattn::KeyInterval* intervals;
flash_dmattn::Problem problem;
flash_dmattn::Inputs inputs;
std::span<std::byte> memory;
flash_dmattn::Tensor4 out, dout, dq, dk, dv;
"""


NAMED_FILE = re.compile(r"`([\w./]+\.(?:py|cpp|cuh|cu|h|sh|cmake|csv|svg))`")
SOURCES = (
    "benchmarks",
    "bindings",
    "cmake",
    "examples",
    "include",
    "python",
    "src",
    "tests",
    "tools",
)
FOLDERS = ("python/flash_dmattn", "src", ".")  # folders with the files that the call flow names

PRETRAINED = "SmallDoge/Doge-320M"


def save_doge(folder):
    """Saves a small untrained Doge with a tokenizer of bytes."""
    import transformers

    tokenizers = pytest.importorskip("tokenizers")
    characters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    bytes_alone = tokenizers.Tokenizer(
        tokenizers.models.BPE({c: i for i, c in enumerate(characters)}, [])
    )
    bytes_alone.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = tokenizers.decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=bytes_alone).save_pretrained(folder)
    config = transformers.DogeConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, keep_window_size=32, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    transformers.DogeForCausalLM(config).save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_run_in_their_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a page may write files
    torch.manual_seed(0)
    torch._dynamo.reset()  # what other tests compiled counts against its limit
    blocks = BLOCK.findall(page.read_text())
    if not blocks:
        pytest.skip("the page has no Python")
    code = "\n".join(blocks).replace("max_new_tokens=1000", "max_new_tokens=20")
    if "transformers" in code:
        pytest.importorskip(
            "transformers.models.doge", reason="transformers with Doge is not installed"
        )
    if PRETRAINED in code:
        save_doge(tmp_path / "doge")
        code = code.replace(f'"{PRETRAINED}"', repr(str(tmp_path / "doge")))
    exec(compile(code, str(page), "exec"), {"__name__": page.stem})


def test_cpp_blocks_compile():
    compiler = os.environ.get("CXX", "c++").split()
    if not shutil.which(compiler[0]):
        pytest.skip("there is no C++ compiler")
    include = ["-I", str(DOCS.parent / "include")]
    command = [*compiler, "-std=c++20", "-fsyntax-only", *include, "-x", "c++", "-"]
    pages = [DOCS.parent / "README.md", *DOCS.rglob("*.md")]
    blocks = [block for page in pages for block in CPP_BLOCK.findall(page.read_text())]
    assert blocks
    for block in blocks:
        headers = "\n".join(re.findall(r"^#include .*", block, re.MULTILINE))
        statements = re.sub(r"^#include .*", "", block, flags=re.MULTILINE)
        code = f"{headers}\n{LEFT_OUT}\nvoid block() {{\n{statements}\n}}\n"
        compiled = subprocess.run(command, input=code, text=True, capture_output=True)
        assert compiled.returncode == 0, f"{block}\n{compiled.stderr}"


def test_reference_has_every_public_name():
    reference = "".join(page.read_text() for page in DOCS.glob("reference/*.md"))
    assert [name for name in flash_dmattn.__all__ if not re.search(rf"\b{name}\b", reference)] == []


def test_decision_has_at_most_four_short_lines():
    entries = re.split(r"\n(?=- \*\*|\n|#)", (DOCS / "decisions.md").read_text())
    entries = [entry.strip() for entry in entries if entry.startswith("- ")]
    assert len(entries) > 100
    assert [e for e in entries if len(e) > 480 or len(e.splitlines()) > 4] == []


def test_files_that_documents_name_exist():
    sources = [path for folder in SOURCES for path in (DOCS.parent / folder).rglob("*.*")]
    paths = [str(path) for path in [*sources, *DOCS.rglob("*.svg"), *DOCS.parent.glob("*.*")]]
    pages = [DOCS.parent / "README.md", DOCS.parent / "CONTRIBUTING.md", *DOCS.rglob("*.md")]
    named = {name for page in pages for name in NAMED_FILE.findall(page.read_text())}
    assert len(named) > 40
    assert [n for n in sorted(named) if not any(path.endswith(f"/{n}") for path in paths)] == []


def test_functions_of_the_flow_of_a_call_exist():
    flow = (DOCS / "architecture.md").read_text().partition("## How a call flows")[2]
    steps = re.findall(r"^ ?\d+ (\S+\.\w+)(?: (\w+)(?:[.:]+(\w+))?)?", flow, re.MULTILINE)
    assert len(steps) > 30
    for file, *functions in steps:
        places = (DOCS.parent / folder / file for folder in FOLDERS)
        path = next(path for path in places if path.exists())
        missing = [name for name in functions if name not in path.read_text()]
        assert missing == [], file
