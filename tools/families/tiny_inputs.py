"""Inputs for tiny models of transformers' families: tokens, pixels, sound, video."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Container, Mapping

import torch

from tiny_models import CannotBeBuilt
from tiny_sizes import FIRST_SPECIAL, FIRST_WORD, PADDED, SIZES, TARGETS, TOKENS


def inputs_for(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the simplest inputs without padding that `forward` accepts: tokens, pixels, both, image tokens, sound or video.

    Raises:
        Exception: what `forward` raises for the first of these.
    """
    names = inspect.signature(model.forward).parameters
    family = getattr(getattr(model, "config", None), "model_type", None)
    if family in _FAMILIES:
        return _FAMILIES[family](model, names)
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
    """Returns tokens with an image in each row, with one image token per feature that the model computes.

    Raises:
        Exception: the model has no tokens for images, or wants more than pixels.
    """
    names = inspect.signature(model.forward).parameters
    config = model.config
    token = getattr(config, "image_token_id", None) or config.image_token_index
    pixels = _pixels(model, names)
    encode = getattr(model, "get_image_features", None) or model.model.get_image_features
    accepted = inspect.signature(encode).parameters
    if "image_sizes" in accepted and accepted["image_sizes"].default is inspect.Parameter.empty:
        pixels["image_sizes"] = torch.tensor([pixels["pixel_values"].shape[-2:]] * 2)
    with torch.no_grad():
        encoded = encode(**{k: v for k, v in pixels.items() if k in accepted})
    features = getattr(encoded, "pooler_output", encoded)
    features = encoded.last_hidden_state if features is None else features
    if not isinstance(features, torch.Tensor):
        features = torch.cat([part.flatten(0, -2) for part in features])
    image = torch.full((2, features.flatten(0, -2).shape[0] // 2), token)
    words = _text(names)
    first, last = words["input_ids"].split([PADDED, TOKENS - PADDED], 1)
    inputs = {**words, **pixels, "input_ids": torch.cat([first, image, last], 1)}
    if "mm_token_type_ids" in names:
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == token).long()
    return inputs


def inputs_with_sound(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns tokens with sound in each row, as many as the encoder of Nemotron 3.5 Transcribe makes of its frames.

    Raises:
        CannotBeBuilt: another model.
    """
    config, count = model.config, 4
    if config.model_type != "nemo_speechlm":
        raise CannotBeBuilt("no tokens for sound")
    frames = count * config.audio_config.subsampling_factor
    sound = torch.full((2, count), config.audio_token_id)
    first, last = tokens(TOKENS, seed=1).split([PADDED, TOKENS - PADDED], 1)
    shape = (2, frames, config.audio_config.asr_config.num_mel_bins)
    return {
        "input_ids": torch.cat([first, sound, last], 1),
        "input_features": torch.randn(shape, generator=torch.Generator().manual_seed(3)),
        "input_features_mask": torch.ones(2, frames, dtype=torch.long),
    }


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
    """Returns two rows of words, without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_WORD, FIRST_SPECIAL, (2, length), generator=generator)


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


_PATCHES = 16  # patches per image
# Families whose pixels have a dimension for the images of a row.
_SEVERAL_IMAGES = (
    "granite_docling", "idefics", "idefics2", "idefics3", "perception_lm", "smolvlm",
)  # fmt: skip


def _video_between_words(
    model: torch.nn.Module, names: Container[str], frames: int = 2
) -> dict[str, torch.Tensor]:
    """Returns inputs of InstructBlipVideo: a fixed number of tokens for each frame."""
    config, words = model.config, _text(names)
    size = config.vision_config.image_size
    del words["decoder_input_ids"]
    video = torch.full((2, config.num_query_tokens * frames), config.video_token_index)
    first, last = words["input_ids"].split([PADDED, TOKENS - PADDED], 1)
    pixels = torch.randn(2, frames, 3, size, size, generator=torch.Generator().manual_seed(3))
    return {**words, "input_ids": torch.cat([first, video, last], 1), "pixel_values": pixels}


def _robot(model: torch.nn.Module, names: Container[str]) -> dict[str, torch.Tensor]:
    """Returns inputs of PI0: the state of a robot, what one camera sees, and noise in the place of its next actions."""
    config, generator = model.config, torch.Generator().manual_seed(3)
    vision = config.vlm_config.vision_config
    patches = (vision.image_size // vision.patch_size) ** 2
    image = torch.full((2, patches), config.vlm_config.image_token_id)
    ids = torch.cat([image, tokens(TOKENS, seed=1)], 1)
    shapes = {
        "state": (2, config.max_state_dim),
        "noise": (2, config.chunk_size, config.max_action_dim),
        "pixel_values": (2, 1, 3, vision.image_size, vision.image_size),
    }
    return {
        **{name: torch.randn(shape, generator=generator) for name, shape in shapes.items()},
        "timestep": torch.tensor([0.25, 0.75]),
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_attention_mask": torch.ones(2, 1, dtype=torch.bool),
    }


def _sound_for_each_token(model: torch.nn.Module, names: Container[str]) -> dict[str, torch.Tensor]:
    """Returns inputs of Voxtral Realtime: frames that make one feature, which is added to any number of tokens."""
    shape = (2, model.config.downsample_factor, model.config.audio_config.hidden_size)
    frames = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    return {**_text(names), "encoder_inputs_embeds": frames}


# Families whose inputs cannot be derived from the names of arguments.
_FAMILIES = {
    "instructblipvideo": _video_between_words,
    "pi0": _robot,
    "voxtral_realtime": _sound_for_each_token,
}
