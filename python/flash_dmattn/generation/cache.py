"""A KV cache that holds only the keys that later queries can see under per-query selection by a rule."""

from __future__ import annotations

import torch
from torch import Tensor

from .._core import finite, ops
from .._core.checks import (
    check_count,
    check_flag,
    check_shape,
    check_tensor,
    check_tensors,
    resolve_flag,
)
from .._core.kv_checks import (
    as_row_indices,
    check_chunk,
    check_dtype_and_device,
    check_lengths,
    check_mask,
    check_query,
    refuse_gradients,
)
from .._core.numerics import Numerics
from .._dispatch import run_backend
from ..keys.intervals import KeyIntervals
from ..keys.select import select_key_intervals
from ..keys.visible import Visible
from .held_keys import NO_KEY, HeldKeys


class KVSlots(HeldKeys):
    """A cache of the keys of one attention layer that a rule shows to the last token, for each batch row and kv head.

    Its size does not depend on the context length. A key that no query sees any more never returns, so attention over
    the slots equals attention over the whole past under the same rule, exactly. Slots are in no order: each slot
    carries the score and position of its key. Between equal scores, the more recent key wins. A masked token
    has no key, but counts as a token. A token whose score is NaN has a key, which may be a sink or recent.

    batch, heads_kv, head_dim: the sizes B, Hkv and D.
    keep_window_size, rule: a KeyRule, with one window for all kv heads or one for each. A head has sink_tokens + recent_window
        slots, and as many more as its window. score_threshold needs keep_window_size, which limits how many keys the
        threshold may show; `capped` counts the keys beyond this limit.
    chunk: the maximum number of pending tokens. `append` adds pending tokens (part of a prompt, or speculated tokens),
        queries see them, and `commit(n)` moves n of them to the slots and drops the others.

    value_dim: the head dimension Dv of values, 1 to head_dim; by default head_dim. Multi-head latent attention has
        smaller values than keys.
    dtype: of keys and values, float32, bfloat16 or float16. device: of all tensors.
    backend: "cuda", "cpu", "reference", or None for the first that supports the problem.

    All methods except `select`, `repeat` and `snapshot` change the tensors in place, wait for no device and can be
    captured in a CUDA graph. Rows of the batch are independent, and may have different numbers of tokens.

    On a CUDA GPU, slots are bfloat16 or float16, and head_dim and value_dim are multiples of 8. `step` takes at most 64 query
    heads for each kv head there (32 if head_dim is above 128 and a block has 99 KB of shared memory). At most 128 kv heads
    may have windows of their own there.

    Attributes:
        rule: a SelectionRule.
        k: [B, Hkv, places + chunk, D]; v: [B, Hkv, places + chunk, Dv].
        scores: float32 [B, Hkv, places + chunk].
        counts: int32 [B, Hkv, 8]. counts[..., 0] is the number of taken slots. Slots are taken from the first one on.
        positions: int32 [B, Hkv, places + chunk]. If heads have windows of different sizes, k, v, scores and positions are
            [B, total, ...] instead, with the slots of one head after those of the head before. In a taken slot it is
            position, if the key competes;
            -1 - position, if the key does not compete (a sink, or a recent key with too low a score);
            -2**31, if the key has left.
        seen: int32 [B], the number of tokens so far (the position of the next token, for RoPE).
        pending: the number of pending tokens, the same in every row.
        is_empty: whether there has been no token since the cache was made or cleared.
        rows: int32 [B] in a view of some rows (`over`), otherwise None.
    """

    @property
    def capped(self) -> Tensor:
        """Returns the number of keys that have competed so far beyond the window, int64 [B, Hkv].

        If it is above 0, the window binds: for each of these keys, some query did not see this key or one that it beat.
        It is 0 for a head whose window is 0, because none of its keys competes.
        """
        self._refuse_rows()
        windows = self.rule.windows()
        window = windows[0]
        if len(windows) > 1:
            window = torch.tensor(windows, device=self.counts.device)
        return (self.counts[..., 1] - window).clamp(min=0)

    def fill(
        self,
        key: Tensor,
        value: Tensor,
        scores: Tensor,
        intervals: KeyIntervals | None = None,
        *,
        lengths: Tensor | None = None,
        key_mask: Tensor | None = None,
    ) -> None:
        """Replaces the cache's content by the keys of a prompt, over which attention has run under the same rule.

        key: [B, S, Hkv, D]; value: [B, S, Hkv, Dv]; scores: float32 [B, Hkv, S].
        intervals: the result of select_key_intervals for this rule, these scores and all heads. Its last query has to
            be the last token of every row. By default it is computed.
        lengths: int32 [B], the number of tokens of each row, if rows are padded on the right to S. Numbers outside of
            0 to S raise an error on a CPU, and are clamped on a GPU, which does not read them first.
        key_mask: bool [B, S], False for padding. If `intervals` are given, it is the mask that they were made with.
        """
        self.check_tokens(key, value, scores)
        length = key.shape[1]
        if lengths is not None:
            lengths = as_row_indices(lengths, "lengths", self.batch)
        if key_mask is not None:
            check_mask(key_mask, (self.batch, length), self.k.device)
        if intervals is None:
            check_shape(scores, "scores", (self.batch, self.heads_kv, length))
            last_query = {}
            if lengths is not None:
                ends = lengths.clamp(0, length)  # as the kernels clamp them
                real = torch.arange(length, device=key.device) < ends[:, None]
                key_mask = real if key_mask is None else key_mask & real
                if self.rule.recent_window:
                    last_query["query_position"] = ends.long() - 1
            mask = None if key_mask is None else key_mask[:, None]
            intervals = select_key_intervals(
                scores, **self.rule._asdict(), key_mask=mask, query_length=1, **last_query
            )
        heads = (self.batch, self.heads_kv)
        _check_intervals(intervals, *heads, length)
        ops.kv_fill(
            *self.tensors,
            self._checked_rows(),
            *self._rule_arguments,
            key,
            value,
            scores,
            intervals.intervals.expand(*heads, -1, -1),
            lengths,
            key_mask,
            intervals.query_length,
            self.backend,
        )
        self.pending = 0
        self.is_empty = False

    def step(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scores: Tensor,
        *,
        key_mask: Tensor | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        nonfinite: str = "saturate",
        scores_are_bias: bool = True,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Adds one token to every row, drops the keys that it hides, and attends: out [B, 1, Hq, Dv].

        query: [B, 1, Hq, D]; key: [B, 1, Hkv, D]; value: [B, 1, Hkv, Dv]; scores: float32 [B, Hkv, 1]. Without
            recent_window, the new token may itself have the worst key, which its own query then does not see.
        key_mask: bool [B, 1], False for a token that is padding.
        scores_are_bias: whether a key's score is added to its attention score, as in dynamic mask attention.
        scale, softcap, nonfinite: as in flash_dmattn_func.
        return_lse: whether to return (out, lse), with lse [B, Hq, 1].
        """
        return_lse = resolve_flag(return_lse, "return_lse")
        numerics = Numerics.from_arguments(scale, None, softcap, nonfinite, None)
        scores_are_bias = check_flag(scores_are_bias, "scores_are_bias")
        result = self.step_with(query, key, value, scores, key_mask, numerics, scores_are_bias)
        return result if return_lse else result[0]

    def step_with(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scores: Tensor,
        key_mask: Tensor | None,
        numerics: Numerics,
        scores_are_bias: bool,
    ) -> tuple[Tensor, Tensor]:
        """Computes `step` for parsed arguments. Returns (out, lse)."""
        self.check_tokens(key, value, scores, query, key_mask=key_mask)
        self._refuse_pending()
        if numerics.scale is None:
            numerics = numerics.with_scale_for(key.shape[3])
        is_checked = finite.check_new_tokens(query, key, value, self.rows)
        out, lse = ops.kv_decode_step(
            *self.tensors,
            self._checked_rows(),
            *self._rule_arguments,
            query,
            key,
            value,
            scores,
            key_mask,
            numerics.scale,
            numerics.softcap,
            numerics.saturate,
            scores_are_bias,
            self.backend,
        )
        self.is_empty = False
        if is_checked:
            finite.check_outputs(out, lse[None])
        return out, lse

    def extend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scores: Tensor,
        *,
        lengths: Tensor | None = None,
        key_mask: Tensor | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        nonfinite: str = "saturate",
        scores_are_bias: bool = True,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Adds n tokens to every row, `chunk` at a time. The tokens attend to the slots and to each other.

        Returns out [B, n, Hq, Dv], or (out, lse [B, Hq, n]) with return_lse. Arguments are as in `step`, for n tokens.
        lengths: int32 [B], the number of tokens of each row, if rows are padded on the right to n. Padding holds finite
            numbers, does not count as a token, and has zeros in out and -inf in lse. Numbers outside of 0 to n raise an
            error on a CPU, and are clamped on a GPU.
        """
        check_tensor(query, "query")
        return_lse = resolve_flag(return_lse, "return_lse")
        scores_are_bias = check_flag(scores_are_bias, "scores_are_bias")
        numerics = Numerics.from_arguments(scale, None, softcap, nonfinite, None)
        if query.dim() == 4 and query.shape[1] == 1 and not self.pending and lengths is None:
            result = self.step_with(query, key, value, scores, key_mask, numerics, scores_are_bias)
            return result if return_lse else result[0]
        self.check_tokens(key, value, scores, query)
        length = check_chunk(
            self._by_token,
            self.value_dim,
            key_mask,
            query=query,
            key=key,
            value=value,
            scores=scores,
        )
        if lengths is not None:
            check_lengths(lengths, "lengths", self.batch, length, self.k.device)
            lengths = as_row_indices(lengths, "lengths")
        room = self.chunk - self.pending
        if room < 1:
            raise ValueError(
                f"chunk: got {self.chunk} with {self.pending} tokens pending, expected at least {self.pending + 1}: make the cache "
                "with KVSlots(..., chunk=N)"
            )
        finite.check_new_tokens(query, key, value)
        parts = []
        for start in range(0, length, room):
            part = slice(start, start + room)
            mask = None if key_mask is None else key_mask[:, part]
            kept, before = lengths, self.pending
            if lengths is not None and (before or length > room):
                kept = lengths.clamp(start, start + room) + (before - start)
            self.append(key[:, part], value[:, part], scores[..., part], key_mask=mask)
            parts.append(self.attend_with(query[:, part], kept, numerics, scores_are_bias))
            self.commit(kept)
        if not parts:
            out = query.new_empty(*query.shape[:3], self.value_dim)
            lse = self.scores.new_empty(self.batch, query.shape[2], 0)
        elif len(parts) == 1:
            out, lse = parts[0]
        else:
            outs, lses = zip(*parts, strict=True)
            out, lse = torch.cat(outs, dim=1), torch.cat(lses, dim=2)
        return (out, lse) if return_lse else out

    def append(
        self, key: Tensor, value: Tensor, scores: Tensor, *, key_mask: Tensor | None = None
    ) -> None:
        """Adds n pending tokens. Raises ValueError if n is above chunk - pending.

        key: [B, n, Hkv, D]; value: [B, n, Hkv, Dv]; scores: float32 [B, Hkv, n]; key_mask: bool [B, n], False for
            padding.
        """
        self._refuse_rows()
        self.check_tokens(key, value, scores, key_mask=key_mask)
        room = self.chunk - self.pending
        if key.shape[1] > room:
            raise ValueError(
                f"key: got {key.shape[1]} tokens, expected {room} or fewer: {self.pending} are pending and chunk is "
                f"{self.chunk}"
            )
        ops.kv_append(
            *self._arguments,
            self.pending,
            key,
            value,
            scores,
            key_mask,
            self.backend,
        )
        self.pending += key.shape[1]
        self.is_empty = False

    def pending_mask(self) -> Tensor:
        """Returns whether each pending token is not padding, bool [B, pending]."""
        self._refuse_rows()
        return (self.pending_part(self.positions) != NO_KEY).all(1)

    def pending_tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns copies of the pending tokens: key [B, n, Hkv, D], value [B, n, Hkv, Dv], scores float32 [B, Hkv, n]."""
        self._refuse_rows()
        k, v, scores = (self.pending_part(t).clone() for t in (self.k, self.v, self.scores))
        return k.transpose(1, 2), v.transpose(1, 2), scores

    def pending_intervals(
        self, query_length: int, kept_tokens: Tensor | None = None
    ) -> KeyIntervals:
        """Returns which slots the last `query_length` pending tokens see. The intervals include causality.

        kept_tokens: int32 [B], as in `commit`. The pending tokens after them are padding, which sees nothing and is not
            seen. By default there is no padding.
        If heads have windows of different sizes, they are for one head whose keys are all slots, and whose queries are
        those of head 0, then those of head 1, and so on.
        """
        if not 0 <= query_length <= self.pending:
            raise ValueError(
                f"query: got {query_length} queries, expected at most one for each of the {self.pending} pending tokens, which append adds"
            )
        if kept_tokens is not None:
            kept_tokens = as_row_indices(kept_tokens, "kept_tokens")
        intervals = ops.kv_pending_intervals(
            *self._arguments, self.pending, query_length, kept_tokens, self.backend
        )
        if self._has_equal_heads:
            return KeyIntervals(intervals, query_length, (self.places, int(query_length > 1)))
        # `query_length` more queries are those of one more head, and two neighbours may be of two heads.
        per_query = 1 + -(-self.places // max(query_length, 1))
        return KeyIntervals(intervals, self.heads_kv * query_length, (2 * self.places, per_query))

    def attend(
        self,
        query: Tensor,
        kept_tokens: Tensor | None = None,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        nonfinite: str = "saturate",
        scores_are_bias: bool = True,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Computes attention of the last n pending tokens, query [B, n, Hq, D], to the slots and the pending tokens.

        Returns out [B, n, Hq, Dv], or (out, lse [B, Hq, n]) with return_lse. kept_tokens: as in `pending_intervals`. Other
        arguments are as in `step`.
        """
        return_lse = resolve_flag(return_lse, "return_lse")
        numerics = Numerics.from_arguments(scale, None, softcap, nonfinite, None)
        scores_are_bias = check_flag(scores_are_bias, "scores_are_bias")
        out, lse = self.attend_with(query, kept_tokens, numerics, scores_are_bias)
        return (out, lse) if return_lse else out

    def attend_with(
        self,
        query: Tensor,
        kept_tokens: Tensor | None,
        numerics: Numerics,
        scores_are_bias: bool,
    ) -> tuple[Tensor, Tensor]:
        """Computes `attend` for parsed arguments. Returns (out, lse)."""
        refuse_gradients(query=query)
        queries = check_query(self._by_token, query=query)
        visible = Visible(intervals=self.pending_intervals(queries, kept_tokens))
        if self._has_equal_heads:
            end = self.places + self.pending
            scores = self.scores[:, :, None, :end]
            k, v = (t[:, :, :end].transpose(1, 2) for t in (self.k, self.v))
        else:
            scores = self.scores[:, None, None]
            k, v = self.k.unsqueeze(2), self.v.unsqueeze(2)
            query = _queries_by_head(query, self.heads_kv)
        bias = scores if scores_are_bias else None
        out, statistics = run_backend(
            query, k, v, bias, visible, numerics, self.backend, held_keys=self._held_keys
        )
        if self._has_equal_heads:
            return out, statistics[0]
        shape = (self.heads_kv, queries)
        out = out.unflatten(1, shape).transpose(1, 2).flatten(2, 3)
        return out, statistics[0].unflatten(2, shape).transpose(1, 2).flatten(1, 2)

    def commit(self, kept_tokens: int | Tensor | None = None) -> None:
        """Moves the first `kept_tokens` pending tokens to the slots, one by one as in `step`. Drops the others.

        kept_tokens: a number, or int32 [B] on the cache's device. By default all pending tokens are kept. Numbers of a
            tensor outside of 0 to `pending` raise an error on a CPU, and are clamped on a GPU.
        """
        pending = self.pending
        if isinstance(kept_tokens, Tensor):
            kept_tokens = as_row_indices(kept_tokens, "kept_tokens")
        elif kept_tokens is not None:
            check_count(kept_tokens, "kept_tokens")
            if kept_tokens > pending:
                raise ValueError(
                    f"kept_tokens: got {kept_tokens}, expected at most the {pending} pending tokens"
                )
            pending, kept_tokens = kept_tokens, None
        ops.kv_commit(*self._arguments, pending, kept_tokens, self.backend)
        self.pending = 0

    def drop(self, count: int) -> None:
        """Drops the last `count` pending tokens; the others stay pending. Raises ValueError if fewer are pending."""
        self._refuse_rows()
        check_count(count, "count")
        if count > self.pending:
            raise ValueError(
                f"count: got {count}, expected at most the {self.pending} pending tokens"
            )
        self.pending -= count

    @property
    def _by_token(self) -> Tensor:
        """Returns keys [B, any number, Hkv, D], whose shape, dtype and device checks of tokens read."""
        if self._has_equal_heads:
            return self.k.transpose(1, 2)
        return self.k.unsqueeze(2).expand(-1, -1, self.heads_kv, -1)

    def check_tokens(
        self,
        key: Tensor,
        value: Tensor,
        scores: Tensor,
        query: Tensor | None = None,
        *,
        key_mask: Tensor | None = None,
    ) -> None:
        """Raises unless the slots can take these tokens. Arguments as in `step`."""
        check_tensors(key=key, value=value, scores=scores)
        if key.dim() != 4:
            raise ValueError(f"key: got shape {tuple(key.shape)}, expected [B, n, Hkv, D]")
        if key.dtype != self.k.dtype:  # checked here: the operators' errors do not name the cache
            check_dtype_and_device(key, "key", self.k.dtype, self.k.device, "the cache")
        if key_mask is not None:
            check_mask(key_mask, (self.batch, key.shape[1]), self.k.device)
        refuse_gradients(query=query, key=key, value=value, scores=scores)


def _queries_by_head(query: Tensor, heads: int) -> Tensor:
    """Returns queries [B, n, Hq, D] as [B, heads n, Hq / heads, D]."""
    return query.unflatten(2, (heads, -1)).transpose(1, 2).flatten(1, 2)


def _check_intervals(intervals: KeyIntervals, batch: int, heads: int, length: int) -> None:
    if not isinstance(intervals, KeyIntervals):
        raise TypeError(f"intervals: got {type(intervals).__name__}, expected KeyIntervals")
    if not intervals.fits(batch, (heads,), length):
        got = tuple(intervals.intervals.shape[:3])
        raise ValueError(
            f"intervals: got intervals for (batch, heads, keys) {got}, expected {(batch, heads, length)}"
        )
