"""Which slots of a KV cache hold keys, and changes of the positions and scores of held keys."""

from __future__ import annotations

import torch
from torch import Tensor

from .._core.checks import check_shape, check_tensor, may_read
from .._core.kv_checks import as_row_indices
from .slot_memory import SlotMemory

NO_KEY = -(2**31)  # the entry of `positions` for a slot without a key
_VICTIM_POSITION = 7  # the index of the victim's position in the last dimension of `counts`


class HeldKeys(SlotMemory):
    """The methods of a KVSlots that find its keys in their slots."""

    def renumber(self, positions: Tensor, seen: Tensor) -> None:
        """Gives the keys of `fill` other positions. Under context parallelism a key's position is not its index.

        positions: int32 [B, Hkv, S], the positions of the tokens of `fill`. The positions of keys have to ascend. The
            last recent_window tokens have the last positions before `seen`; the other tokens have earlier positions.
        seen: int [B], the number of tokens so far.

        Waits for the device, and raises ValueError for other positions. While a CUDA graph is captured, values cannot
        be read: other positions then break the cache.
        """
        self._refuse_rows()
        check_tensor(positions, "positions")
        heads = (self.batch, self.heads_kv)
        shape, device = tuple(positions.shape), positions.device
        fits = len(shape) == 3 and shape[:2] == heads and shape[2] > 0
        if positions.dtype != torch.int32 or device != self.k.device or not fits:
            raise ValueError(
                f"positions: got {positions.dtype} of shape {shape} on {device}, expected torch.int32 [{heads[0]}, {heads[1]}, S] "
                f"on {self.k.device}, S above 0"
            )
        seen = as_row_indices(seen, "seen", self.batch)
        entries, length = self.positions.flatten(1), shape[2]
        head, _, taken, _ = self._describe_slots()
        index = torch.where(entries < 0, ~entries, entries)
        index = head * length + index.clamp(max=length - 1)  # any index will do without a key
        at = positions.flatten(1).gather(1, index)
        is_key = taken & (entries != NO_KEY)
        if may_read() and not self._positions_agree(is_key, index, at, seen, length):
            recent = self.rule.recent_window
            last = f", of which the last {recent} are the last before seen" if recent else ""
            raise ValueError(
                f"positions: got positions that these keys cannot have, expected ascending positions below seen, {seen.tolist()}{last}"
            )
        renumbered = torch.where(entries < 0, ~at, at)
        self.positions.copy_(renumbered.where(is_key, entries).view_as(self.positions))
        victim = self.counts[..., _VICTIM_POSITION]
        index = victim.clamp(0, length - 1).long()
        victim.copy_(positions.gather(-1, index[..., None])[..., 0])
        self.seen.copy_(seen)

    @torch.no_grad()
    def rescore_last(self, scores: Tensor, key_mask: Tensor | None = None) -> None:
        """Gives the last key of each head the score that is known when the next token comes.

        scores: float32 [B, Hkv]. key_mask: bool [B], False for rows that stay as they are. Raises ValueError if a key
            competes sooner than two tokens after itself.
        """
        self._refuse_rows()
        check_shape(scores, "scores", (self.batch, self.heads_kv))
        if self.rule.delay() < 2:
            raise ValueError(
                f"recent_window: got {self.rule.recent_window} with recent_competes={self.rule.recent_competes}, expected 2 or more "
                "with False"
            )
        entries, held_scores = self.positions.flatten(1), self.scores.flatten(1)
        head, number, taken, is_pending = self._describe_slots()
        held = (taken | is_pending) & (entries != NO_KEY)
        at = torch.where(entries < 0, ~entries, entries).where(held, -1)
        is_last = held & (at == self._largest_of_heads(at)[:, head])
        if key_mask is not None:
            is_last = is_last & key_mask[:, None]
        scores = scores[:, head]
        competes = ~scores.isnan() & (number >= self.rule.sink_tokens)
        if self.rule.score_threshold is not None:
            competes = competes & (scores.double() >= self.rule.score_threshold)
        always_seen = self.rule.sink_tokens + self.rule.recent_window
        for h, places in enumerate(self.rule.places_of_heads(self.heads_kv)):
            if places == always_seen:
                competes = competes & (head != h)
        entries = torch.where(is_last, torch.where(competes, at, ~at), entries)
        self.positions.copy_(entries.view_as(self.positions))
        self.scores.copy_(torch.where(is_last, scores, held_scores).view_as(self.scores))

    def _largest_of_heads(self, numbers: Tensor) -> Tensor:
        """Returns the largest of numbers [B, total], one for each slot, of each head, [B, Hkv]. Each head has slots."""
        if self._has_equal_heads:
            return numbers.view_as(self.positions).amax(-1)
        sizes = [places + self.chunk for places in self.rule.places_of_heads(self.heads_kv)]
        return torch.stack([t.amax(-1) for t in numbers.split(sizes, 1)], 1)

    def _describe_slots(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns the head of each slot and its number in this head, int64 [total], and whether it has been taken or has a
        pending token, bool [B, total].

        No number is copied from the host, so that a CUDA graph can capture it.
        """
        slot = torch.arange(self.positions.flatten(1).shape[1], device=self.k.device)
        head, number, token = torch.zeros_like(slot), slot, slot
        if self._has_equal_heads:
            size = self.positions.shape[2]
            head, number = slot.div(size, rounding_mode="floor"), slot.remainder(size)
            token = number - self.places
        else:
            for h, (first, pending) in enumerate(self._head_ranges()):
                is_of_head = slot >= first
                head = torch.where(is_of_head, h, head)
                number = torch.where(is_of_head, slot - first, number)
                token = torch.where(is_of_head, slot - pending, token)
        taken = number < self.counts[..., 0][:, head]
        is_pending = (0 <= token) & (token < self.pending)
        return head, number, taken, is_pending.expand_as(taken)

    def _held_keys(self) -> Tensor:
        """Returns which slots that attention reads hold a key, bool [B, Hkv, places + pending] or [B, 1, total]."""
        _, _, taken, is_pending = self._describe_slots()
        held = (taken | is_pending) & (self.positions.flatten(1) != NO_KEY)
        if not self._has_equal_heads:
            return held[:, None]
        return held.view_as(self.positions)[..., : self.places + self.pending]

    def _positions_agree(
        self, is_key: Tensor, index: Tensor, at: Tensor, seen: Tensor, length: int
    ) -> bool:
        """Returns whether keys with these indices among the tokens of `fill` can have the positions `at`.

        A recent key leaves once recent_window tokens have followed it, so at another position it would keep its slot.
        is_key, index, at: [B, total]. index: head * length + token.
        """
        before, seen, recent = self.seen[:, None], seen[:, None], self.rule.recent_window
        token = index.remainder(length)
        expected = torch.where(
            token >= before - recent, at == token - before + seen, at < seen - recent
        )
        ordered_index, order = index.where(is_key, -1).sort(-1)
        ordered = at.where(is_key, -1).gather(-1, order)
        head = ordered_index.div(length, rounding_mode="floor")
        ascends = (ordered[:, 1:] > ordered[:, :-1]) | (head[:, 1:] != head[:, :-1])
        ascends |= ordered[:, 1:] < 0
        return bool((((at >= 0) & expected) | ~is_key).all() & ascends.all())
