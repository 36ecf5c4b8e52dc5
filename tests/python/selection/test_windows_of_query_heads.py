"""Windows per key head work with scores, a bias or a mask per query head."""

import pytest
import torch

from flash_dmattn import flash_dmattn_func, flash_dmattn_varlen_func, packed_documents


@pytest.mark.parametrize("kind", ["row", "padding", "documents", "varlen", "global"])
@pytest.mark.parametrize("heads_of_scores, heads_of_bias", [(4, 2), (4, None), (1, 4), (2, 4)])
def test_query_heads_have_the_window_of_their_key_head(kind, heads_of_scores, heads_of_bias):
    torch.manual_seed(4)
    q, k, v = (torch.randn(1, 30, heads, 16) for heads in (4, 2, 2))
    scores = torch.randn(1, heads_of_scores, 30)
    bias = None if heads_of_bias is None else torch.randn(1, heads_of_bias, 30)
    if heads_of_bias == 4:
        bias[torch.rand(1, 4, 30) < 0.2] = -torch.inf
    offsets = torch.tensor([0, 11, 30]).int()
    rule = {"is_causal": True, "recent_window": 3} if kind != "global" else {"selection": "global"}
    if kind == "padding":
        rule["attn_mask"] = torch.rand(1, 4, 30) < 0.8
    elif kind == "documents":
        rule["key_intervals"] = packed_documents(offsets)

    def of_head(tensor, head):
        return tensor[:, [head * tensor.shape[1] // 4]] if tensor is not None else None

    def attend(q, k, v, bias, scores, window, **rule):
        if kind == "varlen":
            bias = None if bias is None else bias[0].T
            options = {"attn_bias": bias, "selection_scores": scores[0].T, **rule}
            return flash_dmattn_varlen_func(
                q[0], k[0], v[0], offsets, offsets, keep_window_size=window, **options
            )[None]
        options = {"attn_bias": bias, "selection_scores": scores, **rule}
        return flash_dmattn_func(q, k, v, keep_window_size=window, **options)

    expected = []
    for head in range(4):
        head_rule = dict(rule)
        if kind == "padding":
            head_rule["attn_mask"] = of_head(rule["attn_mask"], head)
        one = slice(head // 2, head // 2 + 1)
        expected.append(
            attend(q[:, :, [head]], k[:, :, one], v[:, :, one], of_head(bias, head),
                   of_head(scores, head), (2, 5)[head // 2], **head_rule)
        )  # fmt: skip
    actual = attend(q, k, v, bias, scores, (2, 5), **rule)
    torch.testing.assert_close(actual, torch.cat(expected, 2), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", ["row", "varlen", "global"])
def test_windows_that_do_not_divide_heads_of_scores_raise(kind):
    q, k = torch.randn(1, 8, 6, 16), torch.randn(1, 8, 3, 16)
    scores, offsets = torch.randn(1, 6, 8), torch.tensor([0, 8]).int()
    rule = {"keep_window_size": [1, 2, 3, 4], "is_causal": True}
    if kind == "global":
        rule["selection"] = "global"
    with pytest.raises(ValueError, match="keep_window_size: got 4 sizes, expected one, or"):
        if kind == "varlen":
            flash_dmattn_varlen_func(
                q[0], k[0], k[0], offsets, offsets, selection_scores=scores[0].T, **rule
            )
        else:
            flash_dmattn_func(q, k, k, selection_scores=scores, **rule)


def test_windows_that_do_not_divide_heads_make_no_rule():
    from flash_dmattn.keys.rule import SelectionRule

    with pytest.raises(ValueError, match="6 heads of scores are no multiple of 4"):
        SelectionRule((1, 2, 3, 4)).rule_of_heads(6)
