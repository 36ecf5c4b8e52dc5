"""A plugin of pytest that runs kvpress' own tests with our attention (`make test-kvpress`).

The tests load models of the hub. In their place it makes a random Llama of the same size, with one token for each byte.
"""

import sys

import pytest
import requests
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, processors

import flash_dmattn.integrations.transformers  # noqa: F401  # registers the name, before kvpress wraps what is registered

make_pipeline = transformers.pipeline


def make_model(*args, attn_implementation="flash_dmattn", **options):
    config = transformers.LlamaConfig(
        vocab_size=4096, hidden_size=24, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation=attn_implementation)  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def make_tokenizer(*args, **options):
    # Random models write every token, so numbers stand for those that are no byte.
    tokens = [
        "<s>",
        "</s>",
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        *map(str, range(10, 3848)),
    ]
    tokenizer = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>",
        model_input_names=["input_ids", "attention_mask"])  # fmt: skip


def skip(*args, **options):
    pytest.skip("needs files of the hub")


transformers.AutoModelForCausalLM.from_pretrained = make_model
transformers.AutoTokenizer.from_pretrained = make_tokenizer
sys.modules["transformers"].pipeline = lambda task, model=None, **options: make_pipeline(
    task, model=make_model(), tokenizer=make_tokenizer()
)

import kvpress  # noqa: E402

requests.get = skip
kvpress.QFilterPress.load_q_filters = skip
kvpress.presses.expected_attention_with_stats.ExpectedAttentionStats.from_pretrained = skip
REASONS = dict.fromkeys(("test_load_qfilters", "test_load_stats"), "needs files of the hub") | dict.fromkeys(
    ("test_pipeline", "test_pipeline_single_or_no_question[]", "test_pipeline_answer_is_correct",
     "test_pipeline_single_or_no_question[When was this article written?]", "test_pipeline_compresses_context"),
    "counts the tokens or reads the answer of a trained model",
) | {"test_pipeline_only_computes_the_logits_it_needs[KVzipPress]": "no key is orthogonal to queries of a random model"}  # fmt: skip


def pytest_collection_modifyitems(items):
    for item in items:
        if item.name in REASONS:
            item.add_marker(pytest.mark.skip(reason=REASONS[item.name]))
