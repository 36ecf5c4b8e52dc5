"""However long the stream, the cache holds w keys: 524,288 tokens through small slots."""

import torch

from flash_dmattn import KVSlots


def test_half_a_million_tokens_need_constant_memory():
    tokens, window, chunk = 524_288, 32, 4096
    cache = KVSlots(1, 2, window, 8, chunk=chunk)
    size = sum(t.numel() * t.element_size() for t in cache.tensors)
    addresses = [t.data_ptr() for t in cache.tensors]
    generator = torch.Generator().manual_seed(0)
    best = torch.empty(2, 0)
    for begin in range(0, tokens, chunk):
        scores = torch.randn(1, 2, chunk, generator=generator)
        # The key of a token is its position.
        k = torch.arange(begin, begin + chunk).float()[None, :, None, None].expand(1, chunk, 2, 8)
        cache.append(k, k, scores)
        cache.commit()
        best = torch.cat([best, scores[0]], 1).sort(1, descending=True)[0][:, :window]
    assert cache.seen.tolist() == [tokens]
    assert torch.equal(cache.scores[0, :, :window].sort(1, descending=True)[0], best)
    assert torch.equal(cache.k[0, :, :window, 0], cache.positions[0, :, :window].float())
    assert size == sum(t.numel() * t.element_size() for t in cache.tensors)
    assert addresses == [t.data_ptr() for t in cache.tensors]

    q, k = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 2, 8)
    out, lse = cache.step(q, k, k, torch.full((1, 2, 1), -9.0), return_lse=True)
    assert out.isfinite().all() and lse.isfinite().all()  # the token itself is not among the best
    assert cache.seen.tolist() == [tokens + 1]
