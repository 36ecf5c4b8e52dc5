"""Documents that are packed into one row, as in TRL's SFTTrainer, train like separate documents."""

import importlib.util

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5")

from flash_dmattn.integrations.transformers import enable_flash_dmattn  # noqa: E402
from scored_models import VOCABULARY, make_base, make_scored  # noqa: E402

pytestmark = pytest.mark.transformers


def documents():
    return [torch.randint(3, VOCABULARY, (length,)).tolist() for length in (13, 7, 20)]


def collated(texts):
    """Returns the batch that TRL's padding-free collator makes of the texts."""
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


@pytest.mark.parametrize("family", ["Llama", "Doge"])
def test_loss_and_gradients_equal_separate_documents(family):
    texts, model = documents(), make_base(family).train()
    batch = collated(texts)
    if importlib.util.find_spec("trl"):
        from trl.trainer import sft_trainer as sft

        collate = sft.DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
        ours, batch = batch, collate([{"input_ids": text} for text in texts])
        assert all(torch.equal(batch[name], ours[name]) for name in ours)
    model.set_attn_implementation("flash_dmattn")
    packed = gradients(model, model(**batch, use_cache=False).loss)
    model.set_attn_implementation("eager")
    ids = [torch.tensor([text]) for text in texts]
    losses = [model(t, labels=t, use_cache=False).loss * (t.shape[1] - 1) for t in ids]
    alone = gradients(model, sum(losses) / sum(t.shape[1] - 1 for t in ids))
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "compiled"),
    [("Mistral", False), ("Gemma3", False), ("Gemma3", True), ("GptOss", False)],
)
def test_offsets_alone_separate_documents_in_layers_with_windows(family, compiled):
    """transformers ignores offsets in the masks of windows, and positions in the masks of GPT-OSS."""
    model = make_base(family, sliding_window=5)
    ids = torch.randint(3, VOCABULARY, (2, 20))
    offsets = torch.tensor([0, 13, 20, 40], dtype=torch.int32)
    packed = {f"cu_seq_lens_{side}": offsets for side in "qk"}
    packed |= {f"max_length_{side}": 20 for side in "qk"}
    with torch.no_grad():
        alone = [
            model(t[None], use_cache=False).logits[0] for t in ids.flatten().split([13, 7, 20])
        ]
        model.set_attn_implementation("flash_dmattn")
        call = torch.compile(model, backend="eager") if compiled else model
        logits = call(ids, use_cache=False, **packed).logits
    torch.testing.assert_close(logits.flatten(0, 1), torch.cat(alone), rtol=1e-4, atol=1e-5)


SCORED = {
    "a Doge": lambda: make_base("Doge"),
    "a Doge with windows": lambda: make_base("Doge", sliding_window=5),
    "learned scores": lambda: make_scored(rule="all"),
}


@pytest.mark.parametrize("name", SCORED)
def test_offsets_separate_documents_under_the_padding_of_scored_layers(name):
    model = SCORED[name]()
    if "Doge" in name:
        enable_flash_dmattn(model)
    ids, padding = torch.randint(3, 60, (2, 20)), torch.ones(2, 20, dtype=torch.long)
    padding[1, -4:] = 0
    packed = dict.fromkeys(
        ("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor([0, 13, 20, 40], dtype=torch.int32)
    )
    with torch.no_grad():
        texts = ids.flatten()[:36].split([13, 7, 16])
        alone = [model(t[None], use_cache=False).logits[0] for t in texts]
        logits = model(ids, attention_mask=padding, use_cache=False, **packed).logits
    torch.testing.assert_close(logits.flatten(0, 1)[:36], torch.cat(alone), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "mask", "use_cache"),
    [("a Doge", (2, 20), True), ("learned scores", (2, 1, 1, 20), False)],
)
def test_offsets_that_no_mask_separates_raise(name, mask, use_cache):
    model, ids, mask = SCORED[name](), torch.randint(3, 60, (2, 20)), torch.ones(mask).long()
    if use_cache:
        enable_flash_dmattn(model)
        mask[1, -1] = 0
    offsets = torch.tensor([0, 13, 20, 40], dtype=torch.int32)
    packed = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), offsets)
    with torch.no_grad(), pytest.raises(ValueError, match="offsets of 3 sequences that no mask"):
        model(ids, attention_mask=mask, use_cache=use_cache, **packed)


@pytest.mark.parametrize("rows", [1, 20])
def test_offsets_separate_documents_under_integers_that_mask_by_doges_rule(rows):
    model, ids = enable_flash_dmattn(make_base("Doge")), torch.randint(3, 60, (2, 20))
    offsets = torch.tensor([0, 13, 20, 40], dtype=torch.int32)
    packed = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), offsets) | {"use_cache": False}
    hidden = torch.ones(2, 1, rows, 20, dtype=torch.long).triu(1 if rows > 1 else 20)
    with torch.no_grad():
        expected = model(ids, attention_mask=hidden == 0, **packed).logits
        assert torch.equal(model(ids, attention_mask=-hidden, **packed).logits, expected)


FEEDS = {  # either the longest text fills a row and the two others share one, or all are one batch
    "packing": {"packing": True, "max_length": 21, "per_device_train_batch_size": 2},
    "padding_free": {"padding_free": True, "max_length": None, "per_device_train_batch_size": 3},
}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of TRL's own defaults
@pytest.mark.parametrize(("family", "feed"), [("Llama", "packing"), ("Doge", "padding_free")])
def test_trl_training_equals_separate_documents(family, feed, tmp_path):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, VOCABULARY)}}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "<pad>")),
        pad_token="<pad>",
        eos_token="</s>",
    )
    # A text repeats no token, because in the first layer their scores would tie, and eager attention keeps arbitrary ones.
    texts = [torch.randperm(VOCABULARY - 3)[:n].add(3).tolist() for n in (13, 7, 20)]
    model = make_base(family).train()
    ids = [torch.tensor([text]) for text in texts]
    losses = [model(t, labels=t, use_cache=False).loss * (t.shape[1] - 1) for t in ids]
    alone = gradients(model, sum(losses) / sum(t.shape[1] - 1 for t in ids))
    model.zero_grad()
    model.set_attn_implementation("flash_dmattn")

    step_gradients = []

    class Gradients(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
            step_gradients.append(
                [p.grad.clone() for p in model.parameters() if p.grad is not None]
            )

    # TRL treats every Doge as a mixture of experts like Mixtral, and fails in the auxiliary loss of the router.
    has_option = family == "Doge" and hasattr(trl.SFTConfig, "router_aux_loss_coef")
    doge_options = {"router_aux_loss_coef": 0.0} if has_option else {}
    options = trl.SFTConfig(
        output_dir=str(tmp_path), max_steps=2, use_cpu=True, bf16=False, report_to=[], save_strategy="no",
        disable_tqdm=True, max_grad_norm=0.0, **FEEDS[feed], **doge_options,
    )  # fmt: skip
    rows = datasets.table.InMemoryTable.from_pylist([{"input_ids": t} for t in texts])
    data = datasets.Dataset(rows, fingerprint="documents")
    trainer = trl.SFTTrainer(
        model=model, args=options, train_dataset=data, processing_class=tokenizer,
        callbacks=[Gradients()],
    )  # fmt: skip
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["input_ids"].shape == (1, 40) and (batch["position_ids"] == 0).sum() == 3
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert all(torch.isfinite(torch.tensor(losses))) and len(step_gradients) == 2
    torch.testing.assert_close(step_gradients[0], alone[1:], rtol=1e-4, atol=1e-6)
