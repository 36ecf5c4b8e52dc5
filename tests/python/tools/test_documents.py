"""The Python blocks of the README and of the site's pages run, and the reference has every public name."""

import re
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


PRETRAINED = "SmallDoge/Doge-320M"


def save_doge(folder):
    """A small one that has learned nothing, with a tokenizer of bytes."""
    transformers = pytest.importorskip("transformers")
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
def test_blocks_run_in_their_order(page, tmp_path):
    torch.manual_seed(0)
    torch._dynamo.reset()  # what other tests compiled counts against its limit
    blocks = BLOCK.findall(page.read_text())
    if not blocks:
        pytest.skip("the page has no Python")
    code = "\n".join(blocks)
    if "transformers" in code:
        pytest.importorskip(
            "transformers.models.doge", reason="transformers with Doge is not installed"
        )
    if PRETRAINED in code:
        save_doge(tmp_path)
        code = code.replace(f'"{PRETRAINED}"', repr(str(tmp_path)))
    exec(compile(code, str(page), "exec"), {"__name__": page.stem})


def test_reference_has_every_public_name():
    reference = "".join(page.read_text() for page in DOCS.glob("reference/*.md"))
    assert [name for name in flash_dmattn.__all__ if not re.search(rf"\b{name}\b", reference)] == []
