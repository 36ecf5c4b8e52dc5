"""attn_implementation="flash_dmattn" is exact attention for models without scores: those of docs/transformers.md."""

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5")

import flash_dmattn.integrations.transformers  # noqa: E402, F401

FAMILIES = (
    "Bart Cohere2 DeepseekV3 Ernie4_5 Exaone4 Gemma Gemma2 Gemma3 Glm4 GPT2 Granite Helium Llama Mistral Mixtral Olmo2 "
    "OPT Phi Phi3 Qwen2 Qwen3 Qwen3Moe SmolLM3 StableLm Starcoder2"
).split()
ENCODERS = ("Bert", "Roberta")
SIZES = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "sliding_window": 6, "attention_chunk_size": 8, "intermediate_size_mlp": 48, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "ffn_dim": 48, "word_embed_proj_dim": 32, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


# Beside, or in the place of, those of all families.
SIZES_OF = {
    "Bart": {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48},
    "Bloom": {"n_layer": 2, "n_head": 4},
    "DeepseekV3": {
        "num_key_value_heads": 4, "head_dim": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
        "v_head_dim": 6,
    },
    "Gemma4": {"attention_chunk_size": None},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "GPTJ": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 64},
    "GPTNeo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "XGLM": {"d_model": 32, "num_layers": 2, "attention_heads": 4},
}  # fmt: skip
_NAME = "_flash_attention_forward|dynamic_mask_attention"
REASONS = {
    "Bloom": "size of tensor", "Falcon": _NAME, "Gemma4": "query: got head dimension 512", "GPTJ": _NAME, "GPTNeo": _NAME,
    "XGLM": "Attention mask should be of size",
}  # fmt: skip
KINDS = {"GPT2": "GPT2LMHeadModel", **{name: f"{name}ForMaskedLM" for name in ENCODERS}}
CONFIGS = {"Gemma3": "Gemma3TextConfig", "Gemma4": "Gemma4TextConfig", "Llama4": "Llama4TextConfig"}


def make_model(family, name):
    sizes = {**SIZES, **SIZES_OF.get(family, {})}
    if family == "Falcon":
        del sizes["head_dim"]  # it follows
    config = getattr(transformers, CONFIGS.get(family, f"{family}Config"))(**sizes)
    model = getattr(transformers, KINDS.get(family, f"{family}ForCausalLM"))
    return model._from_config(config, attn_implementation=name).eval()


@pytest.mark.parametrize(
    "family, name",
    [(family, "flash_dmattn") for family in (*FAMILIES, *ENCODERS)]
    + [("Llama4", "dynamic_mask_attention")],
)
def test_logits_and_gradients(family, name):
    model = make_model(family, name)
    ids = torch.randint(3, 99, (2, 17))
    padding = torch.ones_like(ids)
    padding[0, :5] = 0
    options = {} if family in ENCODERS else {"use_cache": False}

    def results():
        model.zero_grad()
        plain = model(ids, labels=ids, **options)
        plain.loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return [plain.logits, model(ids, attention_mask=padding).logits[padding.bool()], *gradients]

    ours = results()
    model.set_attn_implementation("eager")
    for got, expected in zip(ours, results(), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


def test_attention_sinks_are_refused_by_name():
    model = make_model("GptOss", "dynamic_mask_attention")
    with pytest.raises(ValueError, match="s_aux: got a Parameter"):
        model(torch.randint(3, 99, (1, 9)))


@pytest.mark.parametrize("name", ["flash_dmattn", "dynamic_mask_attention"])
@pytest.mark.parametrize("family", ["Bloom", "Falcon", "Gemma4", "GPTJ", "GPTNeo", "XGLM"])
def test_families_that_cannot_work_raise(family, name):
    """Most of these errors are transformers' own, which take our mask for theirs or our name for one of their kernels."""
    ids, padding = torch.randint(3, 99, (2, 17)), torch.ones(2, 17, dtype=torch.long)
    padding[0, :5] = 0
    with pytest.raises((ValueError, RuntimeError, NameError, KeyError), match=REASONS[family]):
        make_model(family, name)(ids, attention_mask=padding)
