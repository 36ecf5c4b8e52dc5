"""enable_flash_dmattn changes only the model that it gets."""

import copy
import inspect
import sys

import pytest
import torch
import transformers
from transformers import DogeForCausalLM
from transformers.models.doge.modeling_doge import DogeAttention

from flash_dmattn.integrations.transformers import compat, enable_flash_dmattn
from flash_dmattn.integrations.transformers.doge import FlashDogeAttention
from flash_dmattn.integrations.transformers.model_state import DOGE_NAME
from python_process import run_forked
from scored_models import make_base, make_config, make_ids

pytestmark = pytest.mark.transformers

# Prints which members of transformers' modules the import changes, and which generation with our caches changes.
PROGRAM = """
import torch, transformers, transformers.masking_utils, transformers.modeling_utils, transformers.cache_utils
import transformers.generation.utils, transformers.models.doge.modeling_doge
from transformers import DogeConfig, DogeForCausalLM
from transformers_members import changed_members, members

before = members()
import flash_dmattn.integrations.transformers as ours
print(*changed_members(before), sep=",")

before = members()
model = ours.enable_flash_dmattn(DogeForCausalLM(DogeConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, keep_window_size=5, eos_token_id=None)), cache="dynamic_mask")
model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=2, do_sample=False, pad_token_id=0)
print(*changed_members(before), sep=",")
"""


def test_import_patches_only_two_methods_and_generation_none():
    run = run_forked(f"import sys; sys.path[:] = {sys.path}\n{PROGRAM}")
    by_import, by_generation = run.stdout.splitlines()
    assert by_import.split(",") == [
        "transformers.modeling_utils.PreTrainedModel._check_and_adjust_attn_implementation",
        "transformers.modeling_utils.PreTrainedModel.get_correct_attn_implementation",
    ]
    assert by_generation == ""


@pytest.mark.parametrize(
    "name", ["_check_and_adjust_attn_implementation", "get_correct_attn_implementation"]
)
def test_names_raise_where_transformers_lacks_a_method(name):
    run = run_forked(f"""
import sys; sys.path[:] = {sys.path}
import transformers
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers_members import changed_members, members
model = transformers.DogeForCausalLM(transformers.DogeConfig(
    vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2))
delattr(PreTrainedModel, {name!r})
before, config = members(), model.config
import flash_dmattn.integrations.transformers as ours
assert not list(changed_members(before)) and not hasattr(PreTrainedModel, {name!r})
for call in (
    ALL_ATTENTION_FUNCTIONS[ours.NAME], ALL_MASK_ATTENTION_FUNCTIONS[ours.NAME], lambda: ours.enable_flash_dmattn(model),
):
    try:
        call()
    except RuntimeError as error:
        print(error)
assert model.config is config
""")
    words = f"transformers: got version {transformers.__version__} without PreTrainedModel.{name}, "
    assert run.stdout.count(words) == 3


def test_later_transformers_that_makes_caches_elsewhere_warns(monkeypatch):
    monkeypatch.setattr(compat, "_PREPARE", "not_there")
    monkeypatch.setattr(compat, "NEWEST_TESTED", (4, 0))
    with pytest.warns(UserWarning, match="is newer than flash_dmattn's tests"):
        enable_flash_dmattn(make_base("Doge"), cache="dynamic_mask")


def test_model_of_the_same_config_stays_as_it_is():
    config = make_config("Doge")
    first, second = DogeForCausalLM(config), DogeForCausalLM(config)
    enable_flash_dmattn(first)
    third = DogeForCausalLM(config)
    assert config._attn_implementation != DOGE_NAME
    for model in (second, third):
        assert model.config is config
        assert all(type(layer.self_attn) is DogeAttention for layer in model.model.layers)
    assert all(type(layer.self_attn) is FlashDogeAttention for layer in first.model.layers)


def test_name_set_on_one_model_leaves_the_config_of_others():
    config = make_config("Doge")
    first, second = DogeForCausalLM(config), DogeForCausalLM(config)
    first.set_attn_implementation("flash_dmattn")
    assert first.config._attn_implementation == DOGE_NAME
    assert second.config._attn_implementation != DOGE_NAME


def test_layers_keep_parameters_and_hooks():
    model = make_base("Doge")
    names = dict(model.named_parameters())
    seen = []
    handle = model.model.layers[0].self_attn.register_forward_hook(
        lambda layer, inputs, output: seen.append(layer)
    )
    enable_flash_dmattn(model)
    assert all(parameter is names[name] for name, parameter in model.named_parameters())
    model(make_ids())
    assert seen == [model.model.layers[0].self_attn]
    handle.remove()
    model(make_ids())
    assert len(seen) == 1


@pytest.mark.parametrize("copied", ["deepcopy", "saved and loaded", "pickled"])
def test_copies_compute_the_same(copied, tmp_path):
    model, ids = enable_flash_dmattn(make_base("Doge")), make_ids()
    expected = model(ids).logits
    if copied == "deepcopy":
        other = copy.deepcopy(model)
        assert other.config is not model.config
    elif copied == "pickled":
        torch.save(model, tmp_path / "model.pt")
        other = torch.load(tmp_path / "model.pt", weights_only=False)
    else:
        model.save_pretrained(tmp_path)
        other = DogeForCausalLM.from_pretrained(tmp_path)
        assert all(type(layer.self_attn) is DogeAttention for layer in other.model.layers)
        enable_flash_dmattn(other.eval())
    assert torch.equal(other(ids).logits, expected)
    other.set_attn_implementation("eager")
    assert model.config._attn_implementation == DOGE_NAME
    assert torch.equal(model(ids).logits, expected)


def test_shifted_labels_give_the_same_loss():
    model, ids = enable_flash_dmattn(make_base("Doge")), make_ids()
    labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    loss = model(ids, labels=ids, shift_labels=labels, use_cache=False).loss
    torch.testing.assert_close(loss, model(ids, labels=ids, use_cache=False).loss)


def test_cache_is_accepted_under_both_names():
    """`past_key_values` until transformers 5.23, `cache` since."""
    model, ids = enable_flash_dmattn(make_base("Doge")), make_ids()
    expected = model(ids, use_cache=False).logits
    names = set(inspect.signature(DogeForCausalLM.forward).parameters) & {
        "cache",
        "past_key_values",
    }
    for name in names | {"past_key_values"}:
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids[:, :9], **{name: cache})
            rest = model(ids[:, 9:], **{name: cache}).logits
        torch.testing.assert_close(rest, expected[:, 9:], atol=1e-5, rtol=1e-4)
