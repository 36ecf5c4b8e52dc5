"""Every part of examples/learned_scores runs, at a size too small to learn anything, and the loss has the parts that it names."""

import json

import pytest
import torch

for needed in ("accelerate", "matplotlib", "tqdm", "transformers"):
    pytest.importorskip(needed)
pytest.importorskip("transformers", minversion="5")

from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments  # noqa: E402

from flash_dmattn.integrations.transformers import add_learned_scores  # noqa: E402
from learned_scores import distil, pictures, recall, text, training  # noqa: E402
from small_corpus import small_corpus  # noqa: E402

TINY = [
    "--length", "96", "--width", "32", "--layers", "2", "--batch", "2", "--pretraining-steps", "10", "--steps", "8",
    "--tests", "2", "--parts", "4", "--keep", "8", "--recent", "4", "--device", "cpu",
]  # fmt: skip


@pytest.fixture(autouse=True)
def quick_corpus(monkeypatch):
    monkeypatch.setattr(distil, "standard_library", small_corpus)


def test_distillation_writes_scores_and_curves_and_resumes(tmp_path, capsys):
    recipes = ["learned", "hard_from_the_first"]
    results = distil.main([*TINY, "--recipes", *recipes, "--output", str(tmp_path)])
    assert (tmp_path / "scores" / "learned_scores.safetensors").exists()
    assert json.loads((tmp_path / "results.json").read_text())["quality"]["learned"]["24"]
    logs = [
        [row["hard"] for row in results["log"] if row["recipe"] == name and "hard" in row]
        for name in recipes
    ]
    assert logs[0][0] == 0.0 and logs[0][-2] == 1.0 and all(logs[1])
    printed = capsys.readouterr().out
    assert "generated 192 tokens with a cache of 14 keys a head" in printed
    assert "learned       24 keys: loss" in printed
    results_of_seed = tmp_path / "seed0"
    results_of_seed.mkdir()
    (tmp_path / "results.json").rename(results_of_seed / "results.json")
    pictures.main([str(tmp_path)])
    drawn = (tmp_path / "budgets.svg").read_text()
    assert drawn.count("learned scores") == 1 and (tmp_path / "recipes.svg").exists()
    drawn = (tmp_path / "training.svg").read_text()
    assert "mean gate of old keys" in drawn and "hard from the first step" in drawn
    options = ["--steps", "10", "--recipes", "learned", "without_budget", "--resume"]
    again = distil.main([*TINY, *options, "--output", str(tmp_path)])
    assert [row["step"] for row in again["log"] if "own_loss" in row][:8] == list(range(1, 9))
    assert again["quality"]["without_budget"]  # this recipe had not begun before


def test_scorers_recipes_and_training_of_the_whole_model_are_measured(tmp_path):
    few = [*TINY, "--steps", "4", "--pretraining-steps", "1", "--output", str(tmp_path)]
    results = distil.main([*few, "--scorer", "mlp", "--recipes", "soft_to_the_last"])
    assert list(results["quality"])[-1] == "soft_to_the_last"
    results = distil.main([*few, "--scorer", "value", "--train", "all", "--gradient-checkpointing"])
    assert list(results["quality"])[-1] == "learned"
    assert all(row["own_loss"] > 1 for row in results["log"] if "own_loss" in row)


def test_recall_without_the_last_length_is_drawn(tmp_path):
    for name, length in (("recall", 128), ("recall_longer", 256)):
        row = {
            "kind": "scores", "budget": 32, "seed": 0, "same_words": False, "recall": {str(length): 0.9},
        }  # fmt: skip
        settings = {"lengths": [128]}
        content = json.dumps({"settings": settings, "rows": [row]})
        (tmp_path / f"{name}.json").write_text(content)
    pictures.main([str(tmp_path)])
    assert (tmp_path / "lengths.svg").exists()


def test_evaluation_leaves_gates_as_they_are(tmp_path):
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )  # fmt: skip
    model = add_learned_scores(LlamaForCausalLM(config), 4, recent_window=2)
    ids = torch.randint(0, 32, (1, 16))
    trainer = training.ScoreTrainer(
        model=model,
        args=TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]),
        eval_dataset=[{"input_ids": ids[0], "labels": ids[0]}],
        schedule=training.Schedule(),
    )
    assert trainer.evaluate()["eval_loss"] >= 0
    assert torch.equal(model(ids).logits, model(ids).logits)


def byte_pair_tokenizer(folder, words):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([words], trainer)
    fast_tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast_tokenizer.save_pretrained(folder)
    return fast_tokenizer


def test_model_of_a_folder_is_trained_and_measured(tmp_path, capsys):
    words = "for name in names:\n    print(name)  # 12 names, 345 in all\n" * 200
    tokenizer = byte_pair_tokenizer(tmp_path / "base", words)
    config = LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    (tmp_path / "words.txt").write_text(words)
    options = ["--model", str(tmp_path / "base"), "--text", str(tmp_path / "words.txt")]
    results = distil.main([*TINY, "--steps", "4", *options, "--output", str(tmp_path / "out")])
    assert set(results["quality"]) == {"dense", "streaming", "key_norm", "random", "learned"}
    with pytest.raises(SystemExit):
        distil.main([*TINY, *options, "--length", "10000", "--output", str(tmp_path / "out")])
    assert "tokens, expected 30000 or more, 3 texts" in capsys.readouterr().err
    ids = tokenizer(words, return_tensors="pt").input_ids[0]
    texts, digits = text.held_out_tokens(ids, tokenizer, 96, 5)
    for row in texts:
        number = tokenizer.decode(row[-digits:])
        assert number.isdigit() and tokenizer.decode(row).count(f"\n# KEY={number}") == 2


def test_recall_writes_every_run(tmp_path):
    path = tmp_path / "recall.json"
    recall.main(
        ["--lengths", "16", "32", "--steps", "3", "3", "--pairs", "2", "--parts", "4", "--longer", "1", "2", "--words", "8",
         "--tests", "1", "--seeds", "1", "--device", "cpu", "--batch", "2", "2", "--output", str(path)]
    )  # fmt: skip
    rows = json.loads(path.read_text())["rows"]
    kinds = [(row["kind"], row["same_words"]) for row in rows]
    assert all(row["recall"].keys() == {"32", "64"} for row in rows)
    pictures.main([str(tmp_path)])
    assert (tmp_path / "recall.svg").exists() and (tmp_path / "lengths.svg").exists()
    assert kinds == [*((kind, False) for kind in recall.KINDS), ("dense", True), ("scores", True)]


def test_short_texts_show_a_half_and_soft_first_ends_hard():
    options = recall.parse(["--lengths", "16", "32", "--steps", "3", "5", "--batch", "4", "2"])
    assert recall.stages_of(recall.Run("scores", 12), options) == [
        (3, 16, 4, 8, None),
        (5, 32, 2, 12, None),
    ]
    assert recall.stages_of(recall.Run("soft_first", 4), options) == [
        (3, 16, 4, 4, "soft"),
        (2, 32, 2, 4, "soft"),
        (3, 32, 2, 4, "hard"),
    ]


def test_divergence_is_that_of_distributions():
    student, teacher = torch.randn(2, 5, 7), torch.randn(2, 5, 7)
    p, q = teacher.softmax(-1), student.softmax(-1)
    each = (p * (p / q).log()).sum(-1)
    torch.testing.assert_close(training.divergence(student, teacher, None), each.mean())
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1]])
    torch.testing.assert_close(
        training.divergence(student, teacher, mask), each[mask.bool()].mean()
    )


def test_pictures_name_every_recipe_and_kind():
    assert {*training.RECIPES, *recall.KINDS} <= pictures.NAMES.keys()


def test_schedule_narrows_then_hardens():
    schedule = training.Schedule(soft=0.75, narrowing=0.5, share=0.25)
    assert [schedule.target(p) for p in (0, 0.25, 0.5, 1)] == [1.0, 0.5, 0.25, 0.25]
    assert [schedule.phase(p) for p in (0, 0.7, 0.75, 1)] == ["soft", "soft", "hard", "hard"]


@pytest.mark.parametrize("questions", [1, 3])
def test_answers_repeat_the_stated_number(questions):
    random = torch.Generator().manual_seed(0)
    words = torch.full((1000,), ord("x"), dtype=torch.uint8)
    ids, answers = text.pass_key_text(words, 128, questions, random)
    written = bytes(ids.tolist())
    lines = [line for line in written.split(b"\n") if line.startswith(b"# KEY=")]
    numbers = {line[6 : 6 + text.DIGITS] for line in lines}
    assert len(ids) == 128 and len(lines) == 1 + questions and len(numbers) == 1
    assert answers.sum() == questions * text.DIGITS and answers[-text.DIGITS :].all()
    assert bytes(ids[answers].tolist()) == numbers.pop() * questions


def test_stochastic_gates_are_open_with_the_probability_of_their_scores():
    logits = torch.tensor([-2.0, 0.0, 3.0])
    scores = torch.nn.functional.logsigmoid(logits).expand(20_000, 3)
    opened = training.stochastic_gates(scores, 0.1).exp() > 0.5
    torch.testing.assert_close(opened.float().mean(0), logits.sigmoid(), atol=0.02, rtol=0)
    ends = torch.tensor([0.0, -1e-9, -80.0], requires_grad=True)
    training.stochastic_gates(ends, 0.1).sum().backward()
    assert ends.grad.isfinite().all()
