"""On the GPU, caches read lengths on the device, so one CUDA graph serves all tokens and no call waits."""

import copy

import pytest
import torch

from flash_dmattn import flash_dmattn_with_kvcache
from gpu import capture
from token_streams import Stream

DEVICE = "cuda"
BATCH, LENGTH, WINDOW = 2, 240, 100
BEGIN = (50, 37)  # tokens of each row before the first call
MODES = ("all keys", "slots")


class Text:
    """A stream, a cache of one mode with the first tokens of each row, and calls that add the next tokens.

    A call is a whole decoding step. Only `lengths`, on the device, says which tokens come next.
    """

    def __init__(self, mode, tokens, *, padding="left", window=WINDOW, device=None, **options):
        device = DEVICE if device is None else device
        self.stream = stream = Stream(
            LENGTH, WINDOW if window is None else window, kind="ties", padding=padding, head_dim=64,
            dtype=torch.bfloat16, seed=tokens, device=device, **options,
        )  # fmt: skip
        self.mode, self.tokens, self.window = mode, tokens, window
        self.lengths = torch.tensor(BEGIN, dtype=torch.int32, device=device)
        self.rows = torch.arange(BATCH, device=device)[:, None]
        self.next = torch.arange(tokens, device=device)
        self.options = {
            "scale": stream.options["scale"],
            "softcap": stream.options["softcap"],
            "scores_are_bias": stream.options["scores_are_bias"],
            "return_lse": True,
        }
        begin = max(BEGIN)
        k, v, scores = stream.tokens(0, begin)
        if mode == "slots":
            self.slots = stream.slots(chunk=tokens)
            self.slots.fill(k, v, scores, lengths=self.lengths, key_mask=stream.mask[:, :begin])
            self.lengths = self.slots.seen
            return
        self.options["keep_window_size"] = window
        self.caches = [torch.zeros_like(t) for t in stream.tokens(0, LENGTH)]
        for cache, first in zip(self.caches, (k, v, scores.transpose(1, 2)), strict=True):
            by_token = cache if cache.dim() == 4 else cache.transpose(1, 2)
            for row, length in enumerate(BEGIN):
                by_token[row, :length] = first[row, :length]
        if padding != "none":
            self.options["cache_leftpad"] = (~stream.mask).sum(1).int()

    def copy(self):
        """Returns another cache with the same content."""
        return copy.deepcopy(self)

    def call(self):
        """Adds the next tokens: the places that they have, their out and lse."""
        stream, places = self.stream, self.lengths[:, None].long() + self.next
        q, k, v = (t[self.rows, places] for t in (stream.q, stream.k, stream.v))
        scores = stream.scores[self.rows, :, places].transpose(1, 2).contiguous()
        if self.mode == "slots":
            mask = stream.mask[self.rows, places]
            add = self.slots.step if self.tokens == 1 else self.slots.extend
            return places, *add(q, k, v, scores, key_mask=mask, **self.options)
        out, lse = flash_dmattn_with_kvcache(
            q, *self.caches, k, v, scores=scores, cache_seqlens=self.lengths, **self.options
        )
        self.lengths += self.tokens
        return places, out, lse

    def tensors(self):
        """Returns all tensors that calls change, by name."""
        names = ("k", "v", "scores", "positions", "counts", "seen")
        if self.mode == "slots":
            return dict(zip(names, self.slots.tensors, strict=True))
        return dict(zip(names, (*self.caches, self.lengths), strict=False))


def assert_same_bits(actual, expected, where):
    torch.testing.assert_close(
        actual, expected, atol=0, rtol=0,
        msg=lambda text: f"{where}: a replayed graph and the call differ. {text}",
    )  # fmt: skip


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("mode", MODES)
def test_one_graph_serves_all_tokens(mode, tokens):
    captured = Text(mode, tokens)
    called = captured.copy()
    graph, (places, out, lse) = capture(captured.call)  # which adds the first tokens, once
    called.call()
    stream, rows, heads = captured.stream, captured.rows, torch.arange(4, device=DEVICE)
    calls = (LENGTH - max(BEGIN)) // tokens
    for i in range(1, calls):
        graph.replay()
        expected = called.call()
        where = f"{mode}, {tokens} at a time, call {i}"
        for name, ours, theirs in zip(
            ("places", "out", "lse"), (places, out, lse), expected, strict=True
        ):
            assert_same_bits(ours, theirs, f"{where}, {name}")
        stream.assert_close(out, stream.out[rows, places])
        stream_lse = stream.lse[rows[..., None], heads[:, None], places[:, None]]
        torch.testing.assert_close(lse, stream_lse, atol=stream.atol, rtol=stream.rtol)
    assert captured.lengths.tolist() == [begin + calls * tokens for begin in BEGIN]
    for (name, ours), theirs in zip(
        captured.tensors().items(), called.tensors().values(), strict=True
    ):
        assert_same_bits(ours, theirs, f"{mode}, {tokens} at a time, in the end, {name}")


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize(
    "mode, options",
    [
        ("all keys", {}),
        ("all keys", {"padding": "none"}),
        ("all keys", {"padding": "none", "window": None}),
        ("all keys", {"softcap": 2.0, "scores_are_bias": False}),
        ("slots", {}),
        ("slots", {"softcap": 2.0, "scores_are_bias": False}),
    ],
    ids=str,
)
def test_calls_do_not_wait_for_the_device(mode, options, tokens):
    text = Text(mode, tokens, **options)
    text.call()  # kernels are loaded at their first use
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            _, out, _ = text.call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert out.isfinite().all()
    assert text.lengths.tolist() == [begin + 4 * tokens for begin in BEGIN]


def test_graph_over_cached_keys_equals_eager():
    """A cache of all keys without new ones: queries of any length that the device knows."""
    stream = Stream(LENGTH, WINDOW, head_dim=64, dtype=torch.bfloat16, device=DEVICE)
    lengths = torch.tensor([LENGTH, 9], dtype=torch.int32, device=DEVICE)
    q = stream.q[:, :3].clone()

    def call():
        return flash_dmattn_with_kvcache(
            q, *stream.tokens(0, LENGTH), cache_seqlens=lengths, keep_window_size=WINDOW
        )

    graph, out = capture(call)
    rows = torch.arange(BATCH, device=DEVICE)[:, None]
    for new in ([3, LENGTH], [120, 121], [101, 60], [LENGTH, 4]):
        lengths.copy_(torch.tensor(new, dtype=torch.int32))
        places = lengths[:, None].long() + torch.arange(-3, 0, device=DEVICE)
        q.copy_(stream.q[rows, places])
        graph.replay()
        assert_same_bits(out, call(), f"lengths {new}")
        stream.assert_close(out, stream.out[rows, places])
