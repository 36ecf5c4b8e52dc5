"""attn_implementation="flash_dmattn" is exact attention for models without scores: those of docs/transformers.md."""

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5")

import flash_dmattn.integrations.transformers  # noqa: E402, F401

FAMILIES = (
    "Cohere2 Ernie4_5 Exaone4 Gemma Gemma2 Glm4 Granite Helium Llama Mistral Mixtral Olmo2 OPT Phi3 Qwen2 "
    "Qwen3 Qwen3Moe SmolLM3 StableLm Starcoder2"
).split()
SIZES = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "sliding_window": 6, "attention_chunk_size": 8, "intermediate_size_mlp": 48, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "ffn_dim": 48, "word_embed_proj_dim": 32, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def make_model(family, config, name):
    config = getattr(transformers, config)(**SIZES)
    model = getattr(transformers, f"{family}ForCausalLM")
    return model._from_config(config, attn_implementation=name).eval()


@pytest.mark.parametrize(
    "family, config, name",
    [(family, f"{family}Config", "flash_dmattn") for family in FAMILIES]
    + [("Llama4", "Llama4TextConfig", "dynamic_mask_attention")],
)
def test_logits_and_gradients(family, config, name):
    model = make_model(family, config, name)
    ids = torch.randint(3, 99, (2, 17))
    padding = torch.ones_like(ids)
    padding[0, :5] = 0

    def results():
        model.zero_grad()
        plain = model(ids, labels=ids, use_cache=False)
        plain.loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return [plain.logits, model(ids, attention_mask=padding).logits[padding.bool()], *gradients]

    ours = results()
    model.set_attn_implementation("eager")
    for got, expected in zip(ours, results(), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


def test_attention_sinks_are_refused_by_name():
    model = make_model("GptOss", "GptOssConfig", "dynamic_mask_attention")
    with pytest.raises(ValueError, match="s_aux: got a Parameter"):
        model(torch.randint(3, 99, (1, 9)))
