"""attn_implementation="flash_dmattn" is exact attention, or refused, in families that differ in how they use attention.

`make families` compares every class of transformers.
"""

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.24")

import flash_dmattn.integrations.transformers  # noqa: E402, F401
from eager_comparison import compare  # noqa: E402
from tiny_models import model_classes, tiny_config, tiny_model  # noqa: E402

CLASSES = {model_class.name: model_class for model_class in model_classes()}
EQUAL = {  # {class: why it is tested}
    "BartForConditionalGeneration": "an encoder, and a decoder with cross attention",
    "BertForMaskedLM": "an encoder",
    "BertLMHeadModel": "a decoder of the class of an encoder",
    "DeepseekV3ForCausalLM": "values of another head dimension",
    "Gemma2ForCausalLM": "softcap and sliding windows",
    "Gemma3ForConditionalGeneration": "tokens that see each other, and windows",
    "GptOssForCausalLM": "attention sinks, and windows in every other layer",
    "GraniteSWAForCausalLM": "attention sinks after attention",
    "JambaForCausalLM": "layers without attention",
    "Llama4ForCausalLM": "chunks",
    "ModernBertForMaskedLM": "sliding windows in an encoder",
    "MoonshineModel": "a decoder whose layers pass is_causal=False with every mask",
    "T5ForConditionalGeneration": "a bias of positions",
}
REFUSED = {
    "BigBirdForCausalLM": "attention of its own",
    "DeepseekV32ForCausalLM": "keys of an indexer",
    "DinatForImageClassification": "attention of another package, without which there is no model",
    "HrmTextForCausalLM": "a config that takes no name with flash in it",
}


@pytest.mark.parametrize("name", EQUAL)
def test_family_equals_eager(name):
    verdict = compare(CLASSES[name], "flash_dmattn")
    assert verdict.kind == "equal", verdict


@pytest.mark.parametrize("name", REFUSED)
def test_family_is_refused_when_built(name):
    verdict = compare(CLASSES[name], "flash_dmattn")
    assert verdict.kind == "refused", verdict


NAMED_BY = {
    "from_config": lambda c: tiny_model(c, tiny_config(c), {"text_config": "flash_dmattn"}),
    "set_attn_implementation": lambda c: eager(c, lambda m: m.set_attn_implementation({"text_config": "flash_dmattn"})),
    "the text model": lambda c: eager(c, lambda m: m.model.set_attn_implementation("flash_dmattn")),
    "the config": lambda c: eager(c, lambda m: setattr(m.config.text_config, "_attn_implementation", "flash_dmattn")),
}  # fmt: skip


def eager(model_class, change):
    model = tiny_model(model_class, tiny_config(model_class), "eager")
    change(model)
    return model


@pytest.mark.parametrize("way", NAMED_BY)
def test_name_for_only_the_text_model_of_a_refused_model_raises(way):
    """The text model belongs to a family that is accepted, so only the outer model can refuse the name."""
    name = "Gemma4AssistantForCausalLM"
    reason = f"^attn_implementation: got .* for {name}, which computes with the values"
    with pytest.raises(ValueError, match=reason):
        NAMED_BY[way](CLASSES[name])(inputs_embeds=torch.zeros(1, 1, 8))


def test_name_for_only_the_decoder_of_a_refused_family_raises():
    config = tiny_config(CLASSES["T5Gemma2ForConditionalGeneration"])
    with pytest.raises(ValueError, match="^attn_implementation: got .* for T5Gemma2Decoder, which"):
        transformers.T5Gemma2ForConditionalGeneration._from_config(
            config, attn_implementation={"encoder": "eager", "decoder": "flash_dmattn"}
        )
