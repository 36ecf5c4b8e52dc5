"""Runs transformers' own tests of models with attn_implementation="flash_dmattn" (`make test-peers`).

Its source distribution lacks the tests of generation and of exporters, whose mixins are empty here.
"""

import sys
import unittest
from types import ModuleType

import torch
import transformers

import flash_dmattn.integrations.transformers  # noqa: F401  # registers the name

for package, module, mixin in (
    ("tests.exporters", "test_export", "ExportTesterMixin"),
    ("tests.generation", "test_utils", "GenerationTesterMixin"),
):
    sys.modules[package] = ModuleType(package)
    sys.modules[f"{package}.{module}"] = ModuleType(module)
    setattr(sys.modules[f"{package}.{module}"], mixin, type(mixin, (), {}))

from tests.test_modeling_common import ModelTesterMixin, ids_tensor  # noqa: E402
from tests.test_training_mixin import TrainingTesterMixin  # noqa: E402

DECODER = {"vocab_size": 99, "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 37,
           "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
           "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
T5 = {"vocab_size": 99, "num_layers": 2, "num_heads": 4, "d_model": 32, "d_kv": 8, "d_ff": 37, "dropout_rate": 0,
      "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2}  # fmt: skip


class ModelTests(ModelTesterMixin):
    """The tests, and the inputs and the config of a small model that they take from `model_tester`."""

    all_generative_model_classes = ()
    is_encoder_decoder = False
    # As model_tester.
    is_training = True
    batch_size, seq_length = 13, 7
    hidden_size, num_hidden_layers, num_attention_heads, vocab_size = 32, 2, 4, 99
    model_tester = property(lambda self: self)
    causal_lm_class = property(lambda self: self.all_model_classes[1])

    def get_config(self):
        config = self.config_class(**self.sizes)
        config._attn_implementation = "flash_dmattn"
        return config

    def prepare_config_and_inputs_for_common(self):
        ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size).clamp(min=3)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if self.is_encoder_decoder:
            inputs |= {f"decoder_{name}": tensor.clone() for name, tensor in inputs.items()}
        return self.get_config(), inputs

    @unittest.skip("transformers takes output_attentions in a config of eager attention only")
    def test_retain_grad_hidden_states_attentions(self):
        pass


class LlamaTest(ModelTests, TrainingTesterMixin, unittest.TestCase):
    config_class, sizes = transformers.LlamaConfig, DECODER
    all_model_classes = (transformers.LlamaModel, transformers.LlamaForCausalLM)


class Qwen3Test(ModelTests, TrainingTesterMixin, unittest.TestCase):
    config_class, sizes = transformers.Qwen3Config, DECODER
    all_model_classes = (transformers.Qwen3Model, transformers.Qwen3ForCausalLM)


class Gemma3Test(ModelTests, TrainingTesterMixin, unittest.TestCase):
    config_class = transformers.Gemma3TextConfig
    sizes = {**DECODER, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    all_model_classes = (transformers.Gemma3TextModel, transformers.Gemma3ForCausalLM)


class T5Test(ModelTests, unittest.TestCase):
    config_class, sizes, is_encoder_decoder = transformers.T5Config, T5, True
    all_model_classes = (transformers.T5Model, transformers.T5ForConditionalGeneration)
