"""Documents packed into one row, as TRL's SFTTrainer feeds them, train as they do alone."""

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5")

import flash_dmattn.integrations.transformers  # noqa: E402, F401

pytestmark = pytest.mark.transformers

VOCABULARY = 64
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
OPTIONS = {"Llama": {}, "Doge": {"keep_window_size": 6}}
families = pytest.mark.parametrize("family", OPTIONS)


def make_model(family):
    config = getattr(transformers, f"{family}Config")(**SIZES, **OPTIONS[family])
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for name, parameter in model.named_parameters():  # else Doge's scores are all equal
        if name.endswith(".A") or "dt_proj" in name:
            torch.nn.init.normal_(parameter)
    return model


def documents():
    return [torch.randint(3, VOCABULARY, (length,)).tolist() for length in (13, 7, 20)]


def collated(texts):
    """What TRL's padding-free collator makes of them."""
    lengths = torch.tensor([len(text) for text in texts])
    ids = torch.tensor([sum(texts, [])])
    positions = torch.cat([torch.arange(n) for n in lengths.tolist()])[None]
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(positions == 0, -100),
        "position_ids": positions,
    }


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@families
@pytest.mark.parametrize("collator", ["positions", "trl"])
def test_loss_and_gradients_are_those_of_the_documents_alone(family, collator):
    texts, model = documents(), make_model(family)
    batch = collated(texts)
    if collator == "trl":
        sft = pytest.importorskip("trl.trainer.sft_trainer")
        collate = sft.DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
        theirs = collate([{"input_ids": text} for text in texts])
        for name in batch:
            assert torch.equal(theirs[name], batch[name])
        batch = theirs
    model.set_attn_implementation("flash_dmattn")
    packed = gradients(model, model(**batch, use_cache=False).loss)
    model.set_attn_implementation("eager")
    ids = [torch.tensor([text]) for text in texts]
    losses = [model(t, labels=t, use_cache=False).loss * (t.shape[1] - 1) for t in ids]
    alone = gradients(model, sum(losses) / sum(t.shape[1] - 1 for t in ids))
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-6)


def test_trl_trains(tmp_path):
    """A Llama: TRL 1.16 takes every Doge for a mixture of experts, whatever its attention."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, VOCABULARY)}}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "<pad>")),
        pad_token="<pad>",
        eos_token="</s>",
    )
    model = make_model("Llama")
    model.set_attn_implementation("flash_dmattn")
    options = trl.SFTConfig(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=2, padding_free=True, max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True}, use_cpu=True, bf16=False, report_to=[],
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    rows = datasets.table.InMemoryTable.from_pylist([{"input_ids": t} for t in documents() * 4])
    data = datasets.Dataset(rows, fingerprint="documents")
    before = [p.detach().clone() for p in model.parameters()]
    trainer = trl.SFTTrainer(
        model=model, args=options, train_dataset=data, processing_class=tokenizer
    )
    result = trainer.train()
    assert torch.isfinite(torch.tensor(result.training_loss))
    assert any(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
