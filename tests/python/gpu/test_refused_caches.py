"""A KV cache that no kernel on the GPU supports raises an error that names the argument and says what to do."""

import pytest
import torch

from flash_dmattn import KVSlots

transformers = pytest.importorskip("transformers")

from doge_generation import make_ids, make_model  # noqa: E402
from flash_dmattn.integrations.transformers import (  # noqa: E402
    DynamicMaskCache,
    enable_flash_dmattn,
)
from flash_dmattn.integrations.transformers.compat import CACHE  # noqa: E402


@torch.no_grad()
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_float32_model_cache_raises(static):
    model = enable_flash_dmattn(make_model().cuda())
    ids = make_ids(1, 40).cuda()
    for _ in range(2):
        cache = DynamicMaskCache(model.config, static=static)
        with pytest.raises(TypeError, match=rf"{CACHE}: got torch.float32 on cuda:0, .*bfloat16"):
            model(ids, past_key_values=cache)
        assert cache.get_seq_length() == 0
    model(ids, past_key_values=DynamicMaskCache(model.bfloat16().config, static=static))


def test_larger_group_than_a_step_has_rows_raises():
    cache = KVSlots(1, 1, 4, 64, dtype=torch.bfloat16, device="cuda")
    q = torch.randn(1, 1, 65, 64, device="cuda").bfloat16()
    k, score = (
        torch.randn(1, 1, 1, 64, device="cuda").bfloat16(),
        torch.zeros(1, 1, 1, device="cuda"),
    )
    with pytest.raises((ValueError, RuntimeError), match="heads_q: got 65, expected at most 64"):
        cache.step(q, k, k, score)
    assert cache.seen.tolist() == [0] and cache.is_empty
    assert cache.step(q[:, :, :64], k, k, score).isfinite().all()
