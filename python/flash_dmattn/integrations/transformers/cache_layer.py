"""A layer of a transformers `Cache` that holds the slots of one attention layer."""

from collections.abc import Callable

import torch
from transformers.cache_utils import CacheLayerMixin

from ..._core.kv_checks import check_slot_kernels
from ..._core.numerics import Numerics
from ...generation.cache import KVSlots
from ...keys.rule import SelectionRule
from ...merge import add_sink
from .._shared.layer_call import swap_heads_and_tokens
from .._shared.token_order import ScoredTokens, TokenOrder, gather_columns, tokens_first
from .compat import CACHE
from .recorded_tokens import RECORDED_TOKENS, RecordedTokens


class DynamicMaskLayer(CacheLayerMixin):
    """The slots of one attention layer.

    `attend_call` is a call of the layer: `fill` stores its first tokens after their attention, `attend` stores later tokens
    and computes their attention. `get_seq_length` counts all tokens, but the layer holds only the keys that the rule shows,
    and pending tokens.
    """

    is_sliding = False
    is_croppable = True

    def __init__(
        self,
        rule: SelectionRule,
        *,
        static: bool = False,
        chunk: int = 0,
        counter: "DynamicMaskLayer | None" = None,
    ):
        """
        Args:
            rule: which keys a query sees.
            static: whether memory stays in place and lengths stay on the device, for CUDA graphs and torch.compile.
            chunk: the number of places for tokens that are attended to before they are committed. Without `static`, the
                layer adds places as needed.
            counter: the layer that counts the tokens of a static cache in a tensor, which compiled code may read; None: this
                layer. All layers of a cache hold the same number of tokens, and a counter in each of them would add one
                kernel per token and layer.
        """
        super().__init__()
        self.rule, self.chunk = rule.checked_cache_rule(), chunk
        self.is_compileable = static
        self.record_past = False
        self._expects_keys = False
        self.slots: KVSlots | None = None
        self._counter = counter if static else None
        self._counts_on_device = static and counter is None
        # The number of tokens so far, pending ones included. In a static layer it only says whether there are any, and
        # _length counts them.
        self._seen = 0
        self._length: torch.Tensor | None = None
        self._recorded = RecordedTokens(self.rule)
        # score_weights' result, and whether it is of this text.
        self._score_weights: tuple[torch.Tensor | None, ...] | None = None
        self._has_score_weights = False

    # ---- What attention uses ------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        return self._seen == 0

    def score_weights(self, make: Callable[[], tuple | None]) -> tuple | None:
        """Returns weights that `make` computes of the attention layer's parameters, once for each text, without gradients.
        A static layer keeps their memory."""
        if self._has_score_weights:
            return self._score_weights
        kept, made = self._score_weights, make()
        if made is None or not self.is_compileable:
            kept = made
        elif kept is None:
            kept = tuple(None if tensor is None else tensor.clone() for tensor in made)
            if not torch.compiler.is_compiling():
                for tensor in filter(torch.is_tensor, kept):
                    torch._dynamo.mark_static_address(tensor)
        else:
            for old, new in zip(kept, made, strict=True):
                if old is not None:
                    old.copy_(new)
        self._score_weights, self._has_score_weights = kept, True
        return kept

    @torch.no_grad()
    def fill(self, tokens: ScoredTokens) -> None:
        """Stores the first tokens, whose attention has been computed already."""
        if not self.is_initialized:
            self.lazy_initialization(*swap_heads_and_tokens(tokens.key, tokens.value))
        self._check_rows(tokens.key)
        self.prefetch()
        length = tokens.key.shape[1]
        pending = 0
        if self.record_past:
            self._resize_chunk(max(self.chunk, RECORDED_TOKENS))
            pending = min(length, self.slots.chunk)
        filled = length - pending
        if filled:
            part, order = tokens.part(0, filled), None
            if self._recorded.have_order(part):
                order = TokenOrder.of_padding(part.present, filled)
            if order is not None:
                part = part.at(order.keys)
            self.slots.fill(*part[:3], key_mask=part.present)
        if pending:
            self._recorded.append(self.slots, tokens.part(filled, length))
        self._seen = length
        if self._counts_on_device:
            self._length.fill_(length)

    @torch.no_grad()
    def adopt_slots(self, slots: KVSlots, tokens: int) -> None:
        """Continues after `tokens` tokens. slots: slots of the same shape with the keys that later tokens see."""
        if not self.is_initialized:
            dims = (slots.head_dim, slots.value_dim)
            self.lazy_initialization(
                *(slots.k.new_empty(slots.batch, slots.heads_kv, 0, dim) for dim in dims)
            )
        self._check_rows(slots.k)
        self.prefetch()
        self.slots.restore(slots)
        self._recorded.clear()
        self._seen = tokens
        if self._counts_on_device:
            self._length.fill_(tokens)

    def attend_call(
        self,
        rule: SelectionRule,
        layer_idx: int,
        states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        scores: torch.Tensor,
        present: torch.Tensor | None,
        numerics: Numerics,
        attend_to_prompt: Callable[[], torch.Tensor],
        *,
        scores_are_bias: bool = True,
        late_scores: torch.Tensor | None = None,
        sink_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes attention of a call of an attention layer, and adds its tokens. Returns out [B, S, Hq, Dv].

        Args:
            rule, layer_idx: of the attention layer.
            states: query [B, S, Hq, D], key [B, S, Hkv, D], value [B, S, Hkv, Dv].
            scores: float32 [B, Hkv, S].
            present: bool [B, S], False for padding; None: all are tokens.
            attend_to_prompt: computes attention of the first tokens, which are all that they see.
            late_scores: float32 [B, Hkv], the scores of the last keys before these tokens, if they are known only now.
            sink_logits: [Hq]; `attend_to_prompt` adds them itself.
        """
        self.check_rule(rule, layer_idx)
        query, key, value = states
        tokens = ScoredTokens(key, value, scores, present)
        if self.is_empty:
            self.check_kernels(key, value)  # before attention that the slots could not take over
            out = attend_to_prompt()
            self.fill(tokens)
            return out
        out, lse = self.attend(query, tokens, numerics, scores_are_bias, late_scores)
        return out if sink_logits is None else add_sink(out, lse, sink_logits)[0]

    def attend(
        self,
        query: torch.Tensor,
        tokens: ScoredTokens,
        numerics: Numerics,
        scores_are_bias: bool = True,
        late_scores: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds tokens and computes their attention. Returns out [B, S, Hq, Dv] and its log-sum-exp [B, Hq, S].

        Args:
            query: [B, S, Hq, D].
            scores_are_bias: as in `KVSlots.step`.
            late_scores: as in `attend_call`.
        """
        self._check_rows(query)
        length = query.shape[1]
        if self.is_compileable and not self.chunk and length > 1:
            raise ValueError(
                f"{CACHE}: got {length} tokens at a time for a static cache without places for them, expected "
                "one; give it some by DynamicMaskCache(chunk=...)"
            )
        options = numerics, scores_are_bias
        keywords = {"scale": numerics.scale, "softcap": numerics.softcap}
        keywords |= {"scores_are_bias": scores_are_bias, "return_lse": True}
        self.prefetch()
        if late_scores is not None:
            self.slots.check_tokens(*tokens[:3], query, key_mask=tokens.present)
            self._recorded.rescore_last(self.slots, late_scores, tokens.present)
        self._make_room(length)
        has_order = self._recorded.have_order(tokens)
        if self.record_past:
            out, lse = self._recorded.attend(self.slots, query, tokens, *options)
        elif not has_order and length == 1:
            out, lse = self.slots.step_with(query, *tokens, *options)
        elif length == 1:
            out, lse = self._step_of_tokens(query, tokens, *options)
        elif not has_order:
            out, lse = self.slots.extend(query, *tokens[:3], key_mask=tokens.present, **keywords)
        else:
            columns = tokens_first(tokens.present)
            out, lse = self.slots.extend(
                gather_columns(query, columns, 1), *tokens.at(columns)[:3],
                lengths=tokens.present.sum(1, dtype=torch.int32), **keywords,
            )  # fmt: skip
            inverse = columns.argsort(1)
            out, lse = gather_columns(out, inverse, 1), gather_columns(lse, inverse, 2)
        self._count_tokens(length)
        return out, lse

    def _step_of_tokens(
        self, query: torch.Tensor, tokens: ScoredTokens, *options
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds one token to the rows in which it is no padding. The other rows stay unchanged."""
        slots = self.slots
        # Padding has no key, so it writes nothing but these.
        counters = slots.positions, slots.counts, slots.seen
        before = [t.clone() for t in counters]
        result = slots.step_with(query, *tokens, *options)
        for tensor, old in zip(counters, before, strict=True):
            is_token = tokens.present.view(-1, *[1] * (tensor.dim() - 1))
            tensor.copy_(torch.where(is_token, tensor, old))
        return result

    def _check_rows(self, states: torch.Tensor) -> None:
        if states.shape[0] != self.batch_size:
            raise ValueError(
                f"{CACHE}: got tokens of {states.shape[0]} rows, expected {self.batch_size}"
            )
        if states.dtype != self.dtype:
            raise TypeError(
                f"{CACHE}: got tokens in {states.dtype}, expected {self.dtype}, in which its first ones were: all of them come "
                "from one model, and all or none under torch.autocast"
            )

    def check_rule(self, rule: SelectionRule, layer_idx: int) -> None:
        """Raises unless the slots follow the rule of an attention layer."""
        if self.rule == rule:
            return
        for part, value, expected in zip(rule._fields, self.rule, rule, strict=True):
            if value != expected:
                raise ValueError(
                    f"{CACHE}: got {part} {value} in layer {layer_idx}, expected {expected}: a "
                    "DynamicMaskCache(model.config) of this model"
                )

    @staticmethod
    def check_kernels(key: torch.Tensor, value: torch.Tensor) -> None:
        """Raises if no kernel supports slots for keys and values like these. The last of four dimensions is D or Dv."""
        check_slot_kernels(
            CACHE, key.dtype, key.shape[3], value.shape[3], key.device,
            instead="Load the model with dtype=torch.bfloat16, generate under torch.autocast, or use transformers' "
            "DynamicCache",
        )  # fmt: skip

    # ---- What transformers uses ---------------------------------------------------------------------

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocates memory for keys and values like these, [B, Hkv, any number, D] and [B, Hkv, any number, Dv]."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.check_kernels(key_states, value_states)
        if self._counts_on_device:
            # Each step changes slots.seen, so compiled code would have to read it again in later layers.
            self._length = torch.zeros((), dtype=torch.int64, device=self.device)
            if not torch.compiler.is_compiling():
                torch._dynamo.mark_static_address(self._length)
        self._hold_slots(self._make_slots(key_states, value_states, self.chunk))
        self.is_initialized = True

    def expect_keys(self) -> None:
        """Announces a call of a layer with scores. The layer's next `update` returns the new keys, which `attend_call` adds with
        their scores. `stop_expecting` ends this after the layer's forward, which may have raised before its `update`."""
        self._expects_keys = True

    def stop_expecting(self) -> bool:
        """Returns whether no `update` has come since `expect_keys`."""
        expected, self._expects_keys = self._expects_keys, False
        return expected

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values that are expected. Raises ValueError for those without scores."""
        if self.stop_expecting():
            return key_states, value_states
        raise ValueError(
            "scores: got none, expected those by which a DynamicMaskCache keeps keys. A Doge makes them after "
            "enable_flash_dmattn(model), another model after add_learned_scores(model, ...) in the phase 'hard' "
            "(set_score_phase). Without scores use transformers' DynamicCache"
        )

    def get_seq_length(self) -> int | torch.Tensor:
        """Returns the number of tokens. For a static cache it is a tensor on the device."""
        if self.is_empty or not self.is_compileable:
            return self._seen
        return self._length if self._counter is None else self._counter.get_seq_length()

    def get_mask_sizes(self, query_length: int | torch.Tensor) -> tuple[int, int | torch.Tensor]:
        """Returns the length and offset of the keys that a mask covers: the new tokens only.

        Slots hold different tokens in each head, so a mask cannot cover them.
        """
        if isinstance(query_length, torch.Tensor):  # transformers 4: the positions of the queries
            query_length = query_length.shape[0]
        return query_length, self.get_seq_length()

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def activate_past_recording(self) -> None:
        """Keeps new tokens pending from now on, until `crop` drops some of them and commits the others."""
        if self.is_compileable and not self.chunk:
            raise ValueError("chunk: got 0, expected places for the tokens that crop may drop")
        self.record_past = True

    @torch.no_grad()
    def crop(self, tokens_to_remove: int) -> None:
        """Drops the last `-tokens_to_remove` tokens and commits the others."""
        if self.is_empty:
            return
        tokens_to_remove = int(tokens_to_remove)  # a tensor in some versions of transformers
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove: got {tokens_to_remove}, expected 0 or less")
        kept = self.slots.pending + tokens_to_remove
        if kept < 0:
            length = int(self.get_seq_length())
            if tokens_to_remove < -length:
                raise ValueError(
                    f"tokens_to_remove: got {tokens_to_remove}, expected {-length} or more: the text has {length} tokens"
                )
            raise RuntimeError(
                f"tokens_to_remove: got {tokens_to_remove}, expected {-self.slots.pending} or more: {self.slots.pending} tokens "
                "are pending, and the others have evicted keys. Call activate_past_recording before the tokens are added"
            )
        self._recorded.commit(self.slots, kept)
        self._count_tokens(tokens_to_remove)

    def reset(self) -> None:
        """Forgets all tokens and keeps the memory. New tokens are not recorded until recording is activated again."""
        self.record_past = False
        self._recorded.clear()
        self._has_score_weights = False
        if self.is_initialized:
            self.slots.clear()
        self._seen = 0
        if self._length is not None:
            self._length.zero_()

    def offload(self) -> None:
        """Moves the slots to the CPU. `prefetch` or the next call moves them back."""
        if self.is_compileable:
            raise ValueError(
                "static: got True, expected a cache without it to offload: graphs and compiled code go on with its memory"
            )
        if self.is_initialized:
            self._move_slots("cpu")

    def prefetch(self) -> None:
        """Moves offloaded slots back to their device."""
        if self.is_initialized and self.keys.device != self.device:
            self._move_slots(self.device)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._select_rows(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._select_rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if not self.is_empty:
            rows = torch.arange(self.batch_size, device=self.keys.device)
            self._select_rows(rows.repeat_interleave(repeats))

    # ---- Memory -------------------------------------------------------------------------------------

    def _make_slots(self, keys: torch.Tensor, values: torch.Tensor, chunk: int) -> KVSlots:
        """Makes slots for keys and values like these, as in `lazy_initialization`."""
        batch, heads, _, head_dim = keys.shape
        return KVSlots(
            batch, heads, head_dim=head_dim, value_dim=values.shape[3], **self.rule._asdict(),
            chunk=chunk, dtype=self.dtype, device=self.device,
        )  # fmt: skip

    def _hold_slots(self, slots: KVSlots) -> None:
        self.slots, self._slot_chunk = slots, slots.chunk
        self.keys, self.values = slots.k, slots.v
        self.batch_size = self.max_batch_size = slots.batch
        if self.is_compileable and not torch.compiler.is_compiling():
            for tensor in slots.tensors:
                torch._dynamo.mark_static_address(tensor)

    def _count_tokens(self, tokens: int) -> None:
        if not self.is_compileable:
            self._seen += tokens
        elif self._counts_on_device:
            self._length.add_(tokens)

    @torch.no_grad()
    def _select_rows(self, rows: torch.Tensor) -> None:
        """Replaces the rows of the batch by the rows with these numbers. A static layer keeps its memory if the number
        of rows stays the same."""
        if self.is_empty:
            return
        rows = rows.to(self.keys.device)
        self._recorded.select_rows(rows)
        if self.is_compileable and len(rows) == self.batch_size:
            self.slots.reorder(rows)
        else:
            self._hold_slots(self.slots.select(rows))

    def _move_slots(self, device: torch.device | str) -> None:
        """Moves the slots to a device. The copy is synchronous, because the host may read the tensors next."""
        k, v, scores, positions, counts, seen = (tensor.to(device) for tensor in self.slots.tensors)
        self._hold_slots(
            KVSlots.from_tensors(
                k=k, v=v, scores=scores, positions=positions, counts=counts, seen=seen,
                **self.rule._asdict(), pending=self.slots.pending,
            )
        )  # fmt: skip
        self._recorded.move(device)

    def _resize_chunk(self, chunk: int) -> None:
        """Changes the number of places for pending tokens, except in a static layer, whose memory stays."""
        if self.is_compileable or chunk == self._slot_chunk:
            return
        rows = torch.arange(self.slots.batch, dtype=torch.int32, device=self.keys.device)
        self._hold_slots(self.slots.select(rows, chunk=chunk))

    def _make_room(self, tokens: int) -> None:
        """Makes places for new tokens: for all of them if they are recorded, else for as many as a query can see keys.

        With one new token, the places beyond `chunk` are freed.
        """
        if self.record_past:
            self._resize_chunk(max(tokens, RECORDED_TOKENS, self._slot_chunk))
            return
        self._recorded.commit(self.slots, self.slots.pending)  # nothing is recorded any more
        if tokens == 1:
            self._resize_chunk(self.chunk)
        else:
            self._resize_chunk(
                max(min(tokens, max(self.rule.place_count(), RECORDED_TOKENS)), self._slot_chunk)
            )
