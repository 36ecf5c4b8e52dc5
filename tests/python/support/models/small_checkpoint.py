"""A Doge and a tokenizer in a folder, as a user has them."""

import pytest


def save_doge(folder):
    """Saves a small untrained Doge with a tokenizer of bytes."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    characters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    bytes_alone = tokenizers.Tokenizer(
        tokenizers.models.BPE({c: i for i, c in enumerate(characters)}, [])
    )
    bytes_alone.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = tokenizers.decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=bytes_alone).save_pretrained(folder)
    config = transformers.DogeConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, keep_window_size=32, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    transformers.DogeForCausalLM(config).save_pretrained(folder)
