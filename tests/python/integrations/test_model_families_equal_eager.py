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
# {class: why it is tested}. Layers of encoders, of decoders and of cross attention differ in `is_causal`, if they have it.
EQUAL = {
    "AlignTextModel": "an encoder whose layers say nothing of causality",
    "BartForCausalLM": "a decoder alone",
    "BartForConditionalGeneration": "an encoder and a decoder",
    "BeitForImageClassification": "a bias of relative positions as the mask",
    "BertForMaskedLM": "an encoder",
    "BertLMHeadModel": "a decoder of the class of an encoder",
    "BridgeTowerModel": "a mask of one query for all",
    "DeepseekV3ForCausalLM": "values of another head dimension",
    "DogeForCausalLM": "keys chosen by scores",
    "GPT2LMHeadModel": "a decoder",
    "Gemma2ForCausalLM": "softcap and sliding windows",
    "Gemma3ForConditionalGeneration": "tokens of an image that see each other",
    "Gemma4ForCausalLM": "head dimensions that differ between layers",
    "Idefics3ForConditionalGeneration": "images",
    "InklingForCausalLM": "a bias of positions in a decoder",
    "JambaForCausalLM": "layers without attention",
    "LayoutLMForMaskedLM": "an additive mask of its own",
    "Llama4ForCausalLM": "chunks",
    "LlamaForCausalLM": "grouped-query heads",
    "MistralForCausalLM": "sliding windows",
    "MoonshineModel": "a decoder whose layers pass is_causal=False with every mask",
    "GptOssForCausalLM": "attention sinks, and windows in every other layer",
    "GraniteSWAForCausalLM": "attention sinks after attention",
    "MllamaForCausalLM": "cross attention to images in a decoder",
    "ModernBertForMaskedLM": "sliding windows in an encoder",
    "PI0ForConditionalGeneration": "blocks of tokens that see each other",
    "PaliGemmaForConditionalGeneration": "a prefix that sees all of itself",
    "PegasusXForConditionalGeneration": "a decoder whose layers are not marked as causal",
    "Qwen2VLForConditionalGeneration": "images in a decoder",
    "Qwen2_5_VisionTransformerPretrainedModel": "images packed in a row",
    "SwinForImageClassification": "windows of images, with a bias",
    "T5ForConditionalGeneration": "a bias of positions",
    "ViTForImageClassification": "an image encoder",
}
REFUSED = {
    "BigBirdPegasusForCausalLM": "the decoder of the family below",
    "BigBirdForCausalLM": "attention of its own",
    "BigBirdPegasusForConditionalGeneration": "attention of its own in the encoder",
    "Data2VecVisionForImageClassification": "a table of classes by name",
    "DeepseekV32ForCausalLM": "keys of an indexer",
    "DinatForImageClassification": "attention of another package, without which there is no model",
    "DeepseekV4ForCausalLM": "attention sinks of a sparse attention",
    "Gemma4AssistantForCausalLM": "a mask whose last dimension is turned around",
    "Gemma4AudioModel": "numbers of the mask",
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
@pytest.mark.parametrize(
    "name", ["Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM"]
)
def test_name_for_only_the_text_model_of_a_refused_model_raises(name, way):
    """The text model belongs to a family that is accepted, so only the outer model can refuse the name."""
    reason = f"^attn_implementation: got .* for {name}, which computes with the values"
    with pytest.raises(ValueError, match=reason):
        NAMED_BY[way](CLASSES[name])(inputs_embeds=torch.zeros(1, 1, 8))


def test_name_for_only_the_decoder_of_a_refused_family_raises():
    config = tiny_config(CLASSES["T5Gemma2ForConditionalGeneration"])
    with pytest.raises(ValueError, match="^attn_implementation: got .* for T5Gemma2Decoder, which"):
        transformers.T5Gemma2ForConditionalGeneration._from_config(
            config, attn_implementation={"encoder": "eager", "decoder": "flash_dmattn"}
        )
