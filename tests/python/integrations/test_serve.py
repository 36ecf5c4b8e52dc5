"""Tests `python -m flash_dmattn serve`, transformers' server with a Doge, without opening a socket."""

import sys

import pytest
import torch
from transformers import DogeForCausalLM, LlamaConfig, LlamaForCausalLM

from doge_generation import brute_force_of, make_model
from flash_dmattn.__main__ import main
from flash_dmattn.integrations.transformers.compat import HAS_SLOTS_IN_BATCHES
from small_checkpoint import save_doge
from transformers_members import changed_members, members

pytestmark = [
    pytest.mark.transformers,
    pytest.mark.skipif(not HAS_SLOTS_IN_BATCHES, reason="serving needs transformers 5.24"),
]


def has_server():
    if not HAS_SLOTS_IN_BATCHES:
        return False
    from transformers.utils.import_utils import is_serve_available

    return is_serve_available()


needs_server = pytest.mark.skipif(
    not has_server(),
    reason="the server of transformers is not installed: pip install transformers[serving]",
)


@pytest.fixture
def folder(tmp_path):
    """Returns a folder with a model without ties among scores, and a tokenizer of bytes."""
    save_doge(tmp_path)
    torch.manual_seed(0)
    make_model(vocab_size=256).save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.fixture
def app_of(monkeypatch):
    """Returns a function that gives the application that the server would run."""
    import uvicorn

    apps = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda self: apps.append(self.config.app))

    def serve(*options):
        with pytest.raises(SystemExit) as end:
            main(["serve", *options])
        assert not end.value.code
        return apps[-1]

    return serve


def complete(app, folder, text, tokens=6):
    from fastapi.testclient import TestClient

    with TestClient(app) as client:
        body = {"model": folder, "prompt": text, "max_tokens": tokens, "temperature": 0}
        reply = client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]["text"]


@needs_server
@pytest.mark.parametrize("options", [("--cb-num-blocks", "64"), ("--no-continuous-batching",)])
def test_completion_equals_generate(app_of, folder, options):
    from transformers import AutoTokenizer

    app = app_of(folder, "--device", "cpu", *options)
    text = "what a window keeps, and what it does not " * 3
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = brute_force_of(DogeForCausalLM.from_pretrained(folder))
    inputs = tokenizer(text, return_tensors="pt")
    out = model.generate(
        inputs.input_ids, attention_mask=inputs.attention_mask, max_new_tokens=6, do_sample=False
    )
    expected = tokenizer.decode(out[0, inputs.input_ids.shape[1] :])
    assert complete(app, folder, text) == expected


@needs_server
def test_serving_leaves_transformers_unchanged(app_of, folder):
    import transformers.cli.serve
    import transformers.cli.serving.model_manager
    import transformers.cli.serving.server
    import transformers.generation.continuous_batching  # noqa: F401

    before = members()
    app = app_of(folder, "--device", "cpu", "--cb-num-blocks", "64")
    complete(app, folder, "a window")
    assert changed_members(before) == []


@needs_server
def test_continuous_batching_of_another_model_raises(app_of, tmp_path, capsys):
    save_doge(tmp_path)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["serve", str(tmp_path), "--device", "cpu"])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert "serve: --continuous-batching: got it for a LlamaForCausalLM" in error


@needs_server
def test_missing_model_prints_one_line(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SystemExit) as end:
        main(["serve", str(tmp_path / "none"), "--device", "cpu"])
    error = capsys.readouterr().err
    assert end.value.code == 2 and str(tmp_path / "none") in error.splitlines()[-1]


def test_missing_server_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "flash_dmattn.integrations.serving.transformers_server", None)
    with pytest.raises(SystemExit) as end:
        main(["serve", "anything"])
    assert end.value.code == 2
    assert 'pip install "transformers[serving]==5.24.*"' in capsys.readouterr().err
