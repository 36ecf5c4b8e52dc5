"""Tiny random models of every family of transformers, and inputs for them.

A default config is shrunk by the names of its attributes, which most families share; `FAMILIES` has the differences of single families.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import re
from collections.abc import Container, Mapping
from typing import NamedTuple

import torch
import transformers
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

TOKENS, PADDED, TARGETS = (
    17,
    5,
    9,
)  # of a row, of them padding where there is any, and for a decoder
_VOCABULARY, _FIRST_WORD, _FIRST_SPECIAL = 128, 10, 100
_LARGEST = 30_000_000  # parameters


class ModelClass(NamedTuple):
    """One class of one family, and the tasks for which transformers has it."""

    family: str
    name: str
    tasks: tuple[str, ...]

    @property
    def is_decoder(self) -> bool:
        return "CAUSAL_LM" in self.tasks


class CannotBeBuilt(Exception):
    """There is no tiny model of a class, for a reason that has nothing to do with attention."""


TASKS = (
    "CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_CLASSIFICATION", "MASKED_IMAGE_MODELING",
    "IMAGE_TEXT_TO_TEXT",
)  # fmt: skip
IMAGES_ALONE = ("IMAGE_CLASSIFICATION", "MASKED_IMAGE_MODELING")


# Text and vision models of composite families, for which transformers has no task, by the type of their config.
PARTS = {
    "aimv2_text_model": "Aimv2TextModel", "align_text_model": "AlignTextModel", "align_vision_model": "AlignVisionModel",
    "altclip_text_model": "AltCLIPTextModel", "altclip_vision_model": "AltCLIPVisionModel",
    "blip_2_vision_model": "Blip2VisionModel", "blip_text_model": "BlipTextLMHeadModel",
    "blip_vision_model": "BlipVisionModel", "chinese_clip_text_model": "ChineseCLIPTextModel",
    "clap_text_model": "ClapTextModel", "clipseg_text_model": "CLIPSegTextModel",
    "clipseg_vision_model": "CLIPSegVisionModel", "clvp_decoder": "ClvpForCausalLM",
    "ernie4_5_vl_moe_vision": "Ernie4_5_VLMoeVisionTransformerPretrainedModel", "flava_image_model": "FlavaImageModel",
    "flava_text_model": "FlavaTextModel", "git_vision_model": "GitVisionModel",
    "groupvit_text_model": "GroupViTTextModel", "groupvit_vision_model": "GroupViTVisionModel",
    "instructblip_vision_model": "InstructBlipVisionModel", "janus_vision_model": "JanusVisionModel",
    "llama4_vision_model": "Llama4VisionModel", "metaclip_2_text_model": "MetaClip2TextModel",
    "minimax_m3_vl_vision": "MiniMaxM3VLVisionModel", "mllama_text_model": "MllamaForCausalLM",
    "molmo2_vision": "Molmo2VisionModel", "owlv2_text_model": "Owlv2TextModel", "owlvit_text_model": "OwlViTTextModel",
    "paddleocr_vl_vision": "PaddleOCRVisionModel", "pix2struct_text_model": "Pix2StructTextModel",
    "pp_formulanet_vision": "PPFormulaNetVisionModel", "siglip_text_model": "SiglipTextModel",
    "siglip2_text_model": "Siglip2TextModel", "step3p5_vision": "Step3p7VisionModel",
    "unlimited_ocr_vision": "UnlimitedOcrVisionModel", "xclip_text_model": "XCLIPTextModel",
    "xclip_vision_model": "XCLIPVisionModel",
}  # fmt: skip


def model_classes() -> list[ModelClass]:
    """All classes of `TASKS`, and for the task "BASE" the classes of `PARTS` and the base models of other families."""
    tasks: dict[tuple[str, str], list[str]] = {}
    for task in TASKS:
        mapping = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
        for family, names in mapping.items():
            for name in (names,) if isinstance(names, str) else names:
                tasks.setdefault((family, name), []).append(task)
    families = {family for family, _ in tasks}
    for family, names in {**modeling_auto.MODEL_MAPPING_NAMES, **PARTS}.items():
        if family not in families:
            for name in (names,) if isinstance(names, str) else names:
                tasks.setdefault((family, name), []).append("BASE")
    return [ModelClass(*key, tuple(found)) for key, found in tasks.items()]


# By the name that transformers has for an attribute in all families (see `attribute_map` of configs).
SIZES = {
    "hidden_size": 64, "d_model": 64, "n_embd": 64, "embed_dim": 64, "hidden_dim": 64, "dim": 64, "emb_dim": 64,
    "embedding_size": 64, "word_embed_proj_dim": 64, "encoder_hidden_size": 64, "out_hidden_size": 64,
    "text_hidden_size": 64, "hidden_size_global": 64, "backbone_hidden_size": 64, "projector_hidden_size": 64, "projection_dim": 64,
    "intermediate_size": 48, "d_ff": 48, "d_inner": 48, "n_inner": 48, "ffn_dim": 48, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "ffn_hidden_size": 48, "dim_ff": 48, "dff": 48, "mlp_dim": 48, "intermediate_size_mlp": 48,
    "dense_intermediate_size": 48, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16, "shared_intermediate_size": 16,
    "num_hidden_layers": 2, "encoder_layers": 2, "decoder_layers": 2, "num_decoder_layers": 2, "num_encoder_layers": 2,
    "num_layers": 2, "n_layers": 2, "n_layer": 2, "layers": 2, "depth": 2, "num_global_layers": 1,
    "max_window_layers": 1, "first_k_dense_replace": 1, "num_kv_shared_layers": 0,
    "num_attention_heads": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_heads": 4, "n_heads": 4,
    "n_head": 4, "attention_heads": 4, "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4,
    "swa_num_attention_heads": 4, "num_key_value_heads": 2, "num_kv_heads": 2, "swa_num_key_value_heads": 2,
    "head_dim": 16, "d_kv": 16, "d_head": 16, "swa_head_dim": 16, "query_pre_attn_scalar": 16,
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
    "rotary_dim": 8, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4,
    "max_position_embeddings": 64, "n_positions": 64, "n_ctx": 64, "max_seq_len": 64, "context_length": 64,
    "max_source_positions": 64, "max_target_positions": 64,
    "sliding_window": 6, "attention_window_size": 6, "sliding_window_size": 6, "local_attention": 6,
    "attention_window": 4, "attention_chunk_size": 8,
    "num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4, "moe_num_experts": 4, "n_shared_experts": 1,
    "num_shared_experts": 1, "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2,
    "moe_top_k": 2, "n_group": 1, "topk_group": 1,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_num_heads": 4, "mamba_head_dim": 16,
    "ssm_state_size": 8, "state_size": 8, "mamba_chunk_size": 8, "chunk_size": 8, "n_groups": 2, "mamba_n_groups": 1,
    "mamba_dt_rank": 8, "time_step_rank": 8,
    "patch_size": 8, "image_size": 32, "num_labels": 3, "hidden_size_per_layer_input": 8, "mm_tokens_per_image": 4,
    "num_mel_bins": 16, "num_frames": 8,
}  # fmt: skip
_EVEN_IF_NONE = ("head_dim", "num_key_value_heads")
_ROPE = {"rope_type": "default", "rope_theta": 1e4}

# Arguments of a config by its `model_type`, in the place of what `shrink` makes of the defaults.
_CONVOLUTIONS = {"hidden_sizes": (16, 16), "depths": (1, 1), "num_stages": 2}
_VQ = {"base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1, "latent_channels": 8, "embed_dim": 8}  # fmt: skip
_WINDOWS = {"embed_dim": 16, "depths": [2, 1], "num_heads": [2, 4], "window_size": 4, "patch_size": 4}  # fmt: skip
FAMILIES = {
    "apertus1p5": {"image_token_offset": 128, "audio_token_offset": 160},
    "apertus1p5_text": {"vocab_size": 4256},
    "apertus1p5_vision_tokenizer": {**_VQ, "codebook_size": 32},
    "bamba": {"attn_layer_indices": [1]},
    "blip-2": {"image_token_index": _FIRST_SPECIAL, "num_query_tokens": 4},
    "blt": {"encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_size": [3, 4], "use_cache": False},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            kind: {**_ROPE, "mrope_section": [2, 3, 3]} for kind in ("sliding_attention", "full_attention")
        },
    },
    "chameleon": {"vocabulary_map": {"<image>": _FIRST_SPECIAL}},
    "convnext": _CONVOLUTIONS,
    "convnextv2": _CONVOLUTIONS,
    "cvt": {"embed_dim": (16, 32, 64), "num_heads": (1, 2, 4), "depth": (1, 2, 3), "drop_path_rate": (0.0, 0.0, 0.0)},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "diffusion_gemma_text": {
        "global_head_dim": 16, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16,
    },
    "deepseek_ocr2_text": {
        "mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "num_key_value_heads": 4,
    },
    "donut-swin": _WINDOWS,
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dory": {
        "num_hidden_layers": 3, "n_input_layers": 1, "n_output_layers": 1,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "dots3_note_audio_encoder": {"adapter_input_size": 64, "adapter_out_dim": 64, "downsample_hidden_size": 16},
    "dots3_note_text": {
        "num_attention_heads": 4, "num_key_value_heads": 4,
        **{f"swa_{name}": size for name, size in {
            "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "head_dim": 16,
            "qk_nope_head_dim": 8, "v_head_dim": 12,
        }.items()},
    },
    "dots3_note_vision_encoder": {"adapter_in_dim": 64, "adapter_out_dim": 64, "pyramid_num_routed": [-1, 4]},
    "emu3": {"vocabulary_map": {"<|extra_200|>": _FIRST_SPECIAL, "<image>": _FIRST_SPECIAL + 1}},
    "emu3_vqgan": _VQ,
    "esm": {"vocab_size": _VOCABULARY, "pad_token_id": 0, "mask_token_id": 3},
    "esmc": {"num_key_value_heads": None, "vocab_size": _VOCABULARY},
    "falcon_h1": {"mamba_d_ssm": 128},
    "florence_vision": {
        "depths": (1, 1), "patch_size": (7, 3), "patch_stride": (4, 2), "patch_padding": (3, 1),
        "patch_prenorm": (False, True), "embed_dim": (32, 64), "num_heads": (2, 4), "num_groups": (2, 4),
        "window_size": 4,
    },
    "gemma4_text": {"global_head_dim": 16},
    "gemma4_unified_text": {"global_head_dim": 16},
    "glm5_next_text": {"index_kpool": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 6},
    "granite4_vision": {"deepstack_layer_map": [[0, 0]], "downsample_rate": "1/2"},
    "granitemoehybrid": {"layers_block_type": ["mamba", "attention"]},
    "inkling_vision": {"n_layers": 2, "hidden_size": 32},
    "instructblip": {"image_token_index": _FIRST_SPECIAL, "num_query_tokens": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "janus_vqgan": {**_VQ, "num_embeddings": 32, "image_token_embed_dim": 64},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "kosmos-2": {"latent_query_num": PADDED},
    "levit": {"image_size": 64, "patch_size": 16},
    "lilt": {"hidden_size": 96},
    "longcat_flash": {"head_dim": 8, "num_layers": 1, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "mistral_large4_text": {"kv_source_layers": [0, 1, 2]},
    # Without norms float32 is 1e-3 from float64, in eager attention too.
    "mobilebert": {"normalization_type": "layer_norm"},
    "mobilevitv2": {"image_size": 256},
    "molmo2": {"image_patch_id": 100},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "molmo2_vision": {"image_size": [32, 32]},
    "muse_spark_audio": {"hidden_sizes": (8, 16, 16, 32), "depths": (1, 1, 1, 1), "num_hidden_layers": 4},
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "paddleocr_vl_text": {"rope_parameters": {**_ROPE, "mrope_section": [3, 3, 2]}},
    "pegasus_x": {"num_global_tokens": 2, "block_size": 4},
    "perceiver": {
        "num_latents": 8, "d_latents": 64, "num_self_attends_per_block": 2, "num_self_attention_heads": 4,
        "num_cross_attention_heads": 1, "vocab_size": _VOCABULARY,
    },
    "pp_formulanet_vision": {"decoder_hidden_size": 64},
    "qwen4_exp_text": {
        "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
        "indexer_compress_ratio": 2, "ngram_vocab_size_base": 64, "hc_lowrank": 8,
    },
    "radio": {"video_temporal_patch_size": 2},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        "axial_pos_shape": (8, 8), "axial_pos_embds_dim": (16, 48), "attn_layers": ("local", "lsh"),
        "attention_head_size": 16, "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "hash_seed": 0,
        "num_buckets": 4,
    },
    "shieldgemma2": {"yes_token_index": 5, "no_token_index": 6},
    "step3p5": {"sliding_window": 6},
    "swin": _WINDOWS,
    "swinv2": {**_WINDOWS, "pretrained_window_sizes": [0, 0]},
    "unlimited_ocr_text": {"num_key_value_heads": 4},
    "wavtokenizer_encoder": {"hidden_size": 512},
    "visual_bert": {"visual_embedding_dim": 64},
    "xmod": {"default_language": "en_XX"},
    "xlstm": {"qk_dim_factor": 1.0},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3},
    "zaya": {
        "num_experts_per_tok": 1, "router_hidden_size": 16, "layer_types": ["hybrid", "hybrid_sliding"],
        "sliding_window": 6,
    },
}  # fmt: skip


def tiny_config(model_class: ModelClass) -> PreTrainedConfig:
    """The config that the class takes: for the text model of a composite family, the config of the text."""
    config = shrink(CONFIG_MAPPING[model_class.family]())
    wanted = getattr(transformers, model_class.name).config_class
    if wanted is not None and not isinstance(config, wanted):
        parts = [getattr(config, name) for name in config.sub_configs]
        config = next((part for part in parts if isinstance(part, wanted)), config)
    if model_class.is_decoder and hasattr(config, "is_decoder"):
        config.is_decoder = True
    return config


def shrink(config: PreTrainedConfig, special: list[str] | None = None) -> PreTrainedConfig:
    """A config of the same class with small sizes. `special` collects the names of special tokens, which get ids
    after the words'."""
    special = [] if special is None else special
    cls = type(config)
    alias = {real: name for name, real in cls.attribute_map.items()}
    defaults = {name: f.default for name, f in cls.__dataclass_fields__.items() if f.init}
    counter, kept, per_layer = _kept_layers(config, alias)
    arguments = {}
    for name, value in vars(config).items():
        common = name if name in SIZES else alias.get(name, name)
        if isinstance(value, PreTrainedConfig):
            arguments[name] = shrink(value, special)
        elif name not in defaults or isinstance(value, bool):
            continue
        elif name in per_layer:
            arguments[name] = type(value)(list(value)[i] for i in kept)
        elif name == counter and isinstance(value, int):
            arguments[name] = len(kept)
        elif common == "rope_parameters" and isinstance(value, dict):
            has_sections = "mrope_section" in getattr(cls, "ignore_keys_at_rope_validation", ())
            arguments[name] = _small_rope(value, _rotary_dim(defaults), has_sections)
        elif _IS_TOKEN.search(common):
            arguments[name] = _token(common, value, special)
        elif common.endswith("vocab_size") and isinstance(value, int):
            arguments[name] = min(value, _VOCABULARY)
        elif common == "num_key_value_heads" and "kv_lora_rank" in defaults:
            arguments[name] = SIZES["num_attention_heads"]
        elif common in _EVEN_IF_NONE and not isinstance(value, (list, tuple)):
            arguments[name] = SIZES[common]
        elif (
            common in SIZES and isinstance(value, int) and value > 0 and defaults[name] is not None
        ):
            arguments[name] = SIZES[common]
    return cls(**{**arguments, **FAMILIES.get(cls.model_type, {})})


def _kept_layers(
    config: PreTrainedConfig, alias: dict[str, str]
) -> tuple[str | None, list[int], list[str]]:
    """The attribute that counts layers; the layers to keep, two or more, among which every kind of layer is; and the
    attributes with a value per layer."""
    common = {alias.get(name, name): name for name in reversed(vars(config))}
    counter = next((common[name] for name in _COUNTERS if name in common), None)
    count = getattr(config, counter, None) if counter is not None else None
    if not isinstance(count, int) or count < 3:
        return counter, [0, 1], []
    lists = {
        name: [str(item) for item in value]
        for name, value in vars(config).items()
        if isinstance(value, (list, tuple)) and len(value) == count
    }
    kinds = [values for values in lists.values() if len(set(values)) <= 5]
    kept = {values.index(kind) for values in kinds for kind in values}
    kept |= set([i for i in range(count) if i not in kept][: max(0, 2 - len(kept))])
    return counter, sorted(kept), list(lists)


_COUNTERS = ("num_hidden_layers", "depth", "num_layers", "n_layers", "decoder_layers")
_IS_TOKEN = re.compile(r"_token_id$|_token_index$|^(pad|bos|eos|unk|mask|sep)_(idx|index)$")
_FIRST_TOKENS = {
    "pad": 0, "bos": 1, "cls": 1, "forced_bos": 1, "eos": 2, "sep": 2, "decoder_start": 2, "forced_eos": 2, "mask": 3,
    "unk": 4,
}  # fmt: skip


def _token(name: str, value: int | list[int] | None, special: list[str]) -> int | list[int] | None:
    if value is None or (isinstance(value, int) and value < 0):
        return value
    if isinstance(value, (list, tuple)):
        return [2]
    first = _FIRST_TOKENS.get(re.sub(r"_(token_)?(id|idx|index)$", "", name.lstrip("_")))
    if first is not None:
        return first
    special.append(name)
    return _FIRST_SPECIAL + len(special) - 1


def _rotary_dim(names: Container[str]) -> int:
    return SIZES["qk_rope_head_dim" if "qk_rope_head_dim" in names else "head_dim"]


def _small_rope(rope: dict, dim: int, has_sections: bool) -> dict:
    if rope and all(isinstance(value, dict) for value in rope.values()):
        return {kind: _small_rope(value, dim, has_sections) for kind, value in rope.items()}
    small = dict(rope)
    half = int(dim * rope.get("partial_rotary_factor", 1)) // 2
    if has_sections:
        third = round(half / 3)
        small["mrope_section"] = [third, third, half - 2 * third]
    if "original_max_position_embeddings" in rope:
        small["original_max_position_embeddings"] = 32
    for name in ("long_factor", "short_factor"):
        if name in rope:
            small[name] = [1 + i / half for i in range(half)]
    return small


def tiny_model(
    model_class: ModelClass, config: PreTrainedConfig, attn_implementation: str
) -> torch.nn.Module:
    """A model with weights of one seed, large enough for attention to matter.

    Raises:
        CannotBeBuilt: the config is not small.
    """
    cls = getattr(transformers, model_class.name)
    with torch.device("meta"):
        skeleton = cls._from_config(copy.deepcopy(config), attn_implementation="eager")
    size = sum(p.numel() for p in skeleton.parameters())
    if size > _LARGEST:
        raise CannotBeBuilt(f"{size:,} parameters")
    torch.manual_seed(0)
    model = cls._from_config(copy.deepcopy(config), attn_implementation=attn_implementation)
    with torch.no_grad():
        for parameter in filter(torch.is_floating_point, model.parameters()):
            if parameter.dim() > 1:
                fan_in = parameter.shape[-1] if parameter.dim() < 4 else parameter[0].numel()
                parameter.normal_(std=min(0.3, 1.5 / math.sqrt(fan_in)))
            else:  # gates that begin at 0 and scales that begin at 1e-5 would hide attention
                noise = 0.2 * torch.randn_like(parameter)
                parameter.add_(torch.where(parameter.abs() < 0.01, noise, parameter * noise))
    return model.eval()


def inputs_for(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The simplest inputs without padding that `forward` takes: tokens, pixels, both, tokens of images, sound or video.

    Raises:
        Exception: what `forward` raises for the first of these.
    """
    names = inspect.signature(model.forward).parameters
    text, pixels = _text(names), _pixels(model, names)
    others = (functools.partial(_sound_or_video, names, *kind) for kind in _SOUND_AND_VIDEO)
    errors = []
    for make in (
        lambda: text,
        lambda: pixels,
        lambda: {**text, **pixels},
        lambda: inputs_with_images(model),
        *others,
    ):
        try:
            inputs = make()
            with torch.no_grad():
                model(**inputs)
            return inputs
        except Exception as error:
            errors.append(error)
    raise errors[0 if text else 1]


def inputs_with_images(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Tokens with an image in each row, as many image tokens as the model makes features.

    Raises:
        Exception: the model has no tokens for images, or wants more than pixels.
    """
    names = inspect.signature(model.forward).parameters
    config = model.config
    token = getattr(config, "image_token_id", None) or config.image_token_index
    pixels = _pixels(model, names)
    accepted = inspect.signature(model.get_image_features).parameters
    if "image_sizes" in accepted and accepted["image_sizes"].default is inspect.Parameter.empty:
        pixels["image_sizes"] = torch.tensor([pixels["pixel_values"].shape[-2:]] * 2)
    with torch.no_grad():
        features = model.get_image_features(**{k: v for k, v in pixels.items() if k in accepted})
    features = getattr(features, "pooler_output", features)
    if not isinstance(features, torch.Tensor):
        features = torch.cat([part.flatten(0, -2) for part in features])
    image = torch.full((2, features.flatten(0, -2).shape[0] // 2), token)
    words = _text(names)
    first, last = words["input_ids"].split([PADDED, TOKENS - PADDED], 1)
    inputs = {**words, **pixels, "input_ids": torch.cat([first, image, last], 1)}
    if "mm_token_type_ids" in names:
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == token).long()
    return inputs


def _text(names: Container[str]) -> dict[str, torch.Tensor]:
    inputs = {
        name: tokens(length, seed=1)
        for name, length in (
            ("input_ids", TOKENS),
            ("qformer_input_ids", TOKENS),
            ("decoder_input_ids", TARGETS),
        )
        if name in names
    }
    if "bbox" in names:
        corner = torch.arange(2 * TOKENS * 2).view(2, TOKENS, 2) * 7 % 500
        inputs["bbox"] = torch.cat([corner, corner + 100 + corner % 31], -1)
    if "image_attention_mask" in names:
        inputs["image_attention_mask"] = torch.ones(2, TOKENS, 1, dtype=torch.long)
    if "image_embeds_position_mask" in names:
        inputs["image_embeds_position_mask"] = torch.arange(TOKENS).lt(PADDED).expand(2, -1)
    return inputs


def tokens(length: int, seed: int) -> torch.Tensor:
    """Two rows of words, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(_FIRST_WORD, _FIRST_SPECIAL, (2, length), generator=generator)


# Inputs of models of sound and video: samples, features of frames in either order, and frames of pictures.
_SOUND_AND_VIDEO = (
    ("input_values", (2, 3200)),
    ("input_features", (2, SIZES["num_mel_bins"], 128)),
    ("input_features", (2, 128, SIZES["num_mel_bins"])),
    ("pixel_values", (2, SIZES["num_frames"], 3, SIZES["image_size"], SIZES["image_size"])),
    ("pixel_values_videos", (2, SIZES["num_frames"], 3, SIZES["image_size"], SIZES["image_size"])),
)


def _sound_or_video(
    names: Mapping[str, inspect.Parameter], name: str, shape: tuple
) -> dict[str, torch.Tensor]:
    if name not in names:
        raise CannotBeBuilt(f"takes no {name}")
    inputs = {name: torch.randn(shape, generator=torch.Generator().manual_seed(3))}
    for mask in ("attention_mask", "input_features_mask"):
        if mask in names and names[mask].default is inspect.Parameter.empty:
            inputs[mask] = torch.ones(2, 128, dtype=torch.long)
    return {**inputs, **{k: v for k, v in _text(names).items() if k == "decoder_input_ids"}}


def _pixels(model: torch.nn.Module, names: Container[str]) -> dict[str, torch.Tensor]:
    config = getattr(model.config, "vision_config", None) or model.config
    channels = getattr(config, "num_channels", None) or getattr(config, "in_channels", None) or 3
    generator = torch.Generator().manual_seed(3)
    grid = next((name for name in ("grid_thw", "image_grid_thw") if name in names), None)
    if grid is not None:
        patch = channels * getattr(config, "temporal_patch_size", 1) * config.patch_size**2
        return {
            "pixel_values" if "pixel_values" in names else "hidden_states": torch.randn(
                2 * _PATCHES, patch, generator=generator
            ),
            grid: torch.tensor([[1, 4, 4], [1, 2, 8]]),
        }
    if "flattened_patches" in names:
        size = 2 + config.patch_embed_hidden_size  # row and column of a patch, then its pixels
        return {"flattened_patches": torch.rand(2, _PATCHES, size, generator=generator) * 2 + 1}
    if "pixel_values" not in names:
        return {}
    if "spatial_shapes" in names:
        return {
            "pixel_values": torch.randn(
                2, _PATCHES, channels * config.patch_size**2, generator=generator
            ),
            "pixel_attention_mask": torch.ones(2, _PATCHES, dtype=torch.long),
            "spatial_shapes": torch.tensor([[4, 4], [2, 8]]),
        }
    size = getattr(config, "image_size", None) or SIZES["image_size"]
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    shape = (2, 1) if model.config.model_type in _SEVERAL_IMAGES else (2,)
    return {"pixel_values": torch.randn(*shape, channels, height, width, generator=generator)}


_PATCHES = 16  # of an image
_SEVERAL_IMAGES = (
    "granite_docling",
    "idefics",
    "idefics2",
    "idefics3",
    "smolvlm",
)  # have a dimension of images in a row
