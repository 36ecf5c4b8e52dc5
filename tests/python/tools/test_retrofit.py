"""Runs examples/retrofit on a random model, with texts too short and steps too few to learn anything."""

import json
import random

import pytest

for needed in ("matplotlib", "tqdm", "transformers"):
    pytest.importorskip(needed)

from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402

import retrofit.__main__ as retrofit  # noqa: E402
from retrofit.tasks import NAMES, Tasks, recall  # noqa: E402

LENGTH = 768


@pytest.fixture
def tokenizer():
    """A tokenizer whose tokens are bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    of_bytes = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    of_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    of_bytes.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=of_bytes)


def test_program_runs_to_the_end(tmp_path, tokenizer, capsys, monkeypatch):
    monkeypatch.setattr(retrofit.logging, "set_verbosity_error", lambda: None)  # of the process
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=LENGTH, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    folder = tmp_path / "base"
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(16):
        (texts / f"{i}.txt").write_text(f"Of {i} things that were said, one was forgotten. " * 40)
    retrofit.main(
        ["--base", str(folder), "--texts", str(texts), "--device", "cpu", "--length", str(LENGTH), "512", "--samples", "2", "--steps", "2", "--keep", "4", "8",
         "--tasks", "four keys", "--base-rate", "1e-3", "--seeds", "0", "1", "--output", str(tmp_path / "output")]
    )  # fmt: skip
    record = json.loads((tmp_path / "output" / "record.json").read_text())
    keys = {(row["length"], row["method"], row["kept"]): row["keys a head"] for row in record["rows"]}  # fmt: skip
    for length in (LENGTH, 512):
        assert keys[length, "all", "1/1"] == keys[length, "all, with the trained base", "1/1"] > length / 2  # fmt: skip
    assert len(keys) == 24 and all(kept <= n / int(of[2:]) for (n, _, of), kept in keys.items())
    table = (tmp_path / "output" / "table.md").read_text()
    assert "four keys" in table and table in capsys.readouterr().out
    assert (tmp_path / "output" / f"budgets-{LENGTH}-8-0.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", NAMES)
def test_sample_holds_its_answers_and_has_its_length(name, tokenizer):
    filler = tokenizer("No word of this text is a number. " * 100).input_ids
    samples = [Tasks(tokenizer, filler, 1500).make_sample(name, i) for i in (0, 0, 1)]
    assert samples[0] == samples[1] != samples[2]
    for sample in samples:
        text = tokenizer.decode(sample.text)
        assert recall(text, sum(sample.answers, [])) == 1
        sizes = {
            len(sample.text) + len(question) + sample.new_tokens for question in sample.questions
        }
        assert sizes == {1500}
    assert recall("1234567 and 7", ["1234567", "89"]) == 0.5


def test_training_text_repeats_its_facts_at_the_end(tokenizer):
    tasks = Tasks(tokenizer, tokenizer("Nothing to count. " * 100).input_ids, 1500)
    ids = tasks.make_training_text(random.Random(0))
    assert len(ids) == 1500
