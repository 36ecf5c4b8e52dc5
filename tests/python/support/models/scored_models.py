"""Tiny decoders of many families, with weights large enough for attention to matter. Doges have scores that differ, and other
models can get learned scores."""

import torch
import transformers

from flash_dmattn.integrations.transformers import add_learned_scores
from flash_dmattn.integrations.transformers.learned_scores.add import scored_layers
from transformers_version import IS_TRANSFORMERS_4

VOCABULARY = 64
_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
_MOE = {
    "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
}  # fmt: skip
FAMILIES = {
    "Llama": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "Qwen2": {},
    "Qwen3": {},
    "Qwen3Moe": _MOE,
    "Mistral": {"sliding_window": None},
    "Mixtral": {**_MOE, "sliding_window": None},
    "Gemma2": {"sliding_window": 6, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 3.0},
    "Gemma3": {"sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"]},
    "Phi3": {"sliding_window": None},
    "Olmo2": {},
    "SmolLM3": {"no_rope_layers": [1, 0], "layer_types": None},
    "Granite": {"attention_multiplier": 0.2},
    "GptOss": {**_MOE, "sliding_window": 6},
    "GPTNeoX": {"num_key_value_heads": ...},  # not an argument
    "GPT2": {"num_key_value_heads": ..., "intermediate_size": ..., "head_dim": ...},
    # Latent attention: keys have 16 columns, values 8.
    "DeepseekV3": {
        **_MOE, "num_experts": ..., "num_local_experts": ..., "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "num_key_value_heads": 4, "head_dim": ..., "kv_lora_rank": 6, "q_lora_rank": 8,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    },
}  # fmt: skip
if not IS_TRANSFORMERS_4:  # a hybrid model, which has a cache of its own there
    FAMILIES["FalconH1"] = {
        "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8,
        "mamba_d_conv": 4, "mamba_chunk_size": 8,
    }  # fmt: skip
DOGE = {"keep_window_size": 5}
RULES = {
    "window": {"keep_window_size": 5},
    "all": {"keep_window_size": 4, "recent_window": 3, "sink_tokens": 2},
    "competing": {"keep_window_size": 4, "recent_window": 3, "recent_competes": True},
    "heads": {"keep_window_size": [3, 6], "recent_window": 2},
    "divided": {"keep_window_size": [[3, 6], [0, 9]], "recent_window": 3, "sink_tokens": 2},
    "threshold": {"score_threshold": -0.7, "recent_window": 3},
    "streaming": {"keep_window_size": 0, "recent_window": 5, "sink_tokens": 2},
}


def make_config(family, **options):
    names = {"Gemma3": "Gemma3TextConfig"}
    config_class = getattr(transformers, names.get(family, f"{family}Config"))
    sizes = {**_SIZES, **(DOGE if family == "Doge" else FAMILIES[family]), **options}
    return config_class(**{name: size for name, size in sizes.items() if size is not ...})


def make_base(family="Llama", **options):
    torch.manual_seed(1)
    names = {"GPT2": "GPT2LMHeadModel"}
    model_class = getattr(transformers, names.get(family, f"{family}ForCausalLM"))
    model = model_class._from_config(make_config(family, **options), attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.2
            parameter.add_(noise * scale)
    return model.eval()


def make_scored(family="Llama", rule="all", scorer="hidden", **options):
    model = add_learned_scores(make_base(family, **options), **RULES[rule], scorer=scorer)
    return spread_scores(model)


def spread_scores(model):
    """Makes gates differ from key to key, as after training."""
    torch.manual_seed(2)
    with torch.no_grad():
        for layer in scored_layers(model):
            for parameter in layer.scorer.parameters():
                parameter.normal_()
    return model


def make_ids(length=21, batch=2):
    return torch.randint(2, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(3))
