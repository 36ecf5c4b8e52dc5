"""torch.export works for attention whose keys are selected by a rule."""

import pytest
import torch

from flash_dmattn import flash_dmattn_func

RULES = {
    "delayed": {"keep_window_size": 6, "recent_window": 4, "sink_tokens": 2},
    "threshold": {"score_threshold": 0.0, "recent_window": 3},
    "by head, with a delayed bias": {"keep_window_size": (3, 8), "recent_window": 4, "recent_competes": True, "bias_delay": 4},
}  # fmt: skip


class Chosen(torch.nn.Module):
    def __init__(self, rule):
        super().__init__()
        self.rule = rule

    def forward(self, q, k, v, scores):
        return flash_dmattn_func(q, k, v, attn_bias=scores, is_causal=True, **self.rule)


def states(length):
    q = torch.randn(2, length, 4, 16)
    k, v = torch.randn(2, 2, length, 2, 16)
    return q, k, v, torch.randn(2, 2, length)


@pytest.mark.parametrize("rule", RULES)
def test_exported_rule_equals_eager_at_other_lengths(rule):
    call = Chosen(RULES[rule])
    length = torch.export.Dim("length", min=12, max=256)
    dynamic = ({1: length}, {1: length}, {1: length}, {2: length})
    exported = torch.export.export(call, states(40), dynamic_shapes=dynamic).module()
    for other in (13, 40, 97):
        inputs = states(other)
        assert torch.equal(exported(*inputs), call(*inputs))
