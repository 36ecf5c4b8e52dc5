"""A transformers `Cache` of the keys that a rule shows to the last token of each head, for texts of any length.

A key that `keep_window_size` better keys beat is never seen again once it is no longer recent, so each key head keeps in
slots what its rule shows, and attention over them is attention over all keys. The price: slots of different heads hold
different positions, so only attention that chooses by the same scores can read them.
"""

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache
from transformers.configuration_utils import PretrainedConfig

from ..._core.checks import check_count, resolve_flag
from ...keys.rule import SelectionRule
from .._shared.config_rules import CONFIG_NAME, LearnedScores, rules_of
from .cache_layer import DynamicMaskLayer
from .compat import CACHE, CROPS_TO_A_LENGTH, StateLayer
from .recorded_tokens import RECORDED_TOKENS


class DynamicMaskCache(Cache):
    """A cache of `DynamicMaskLayer`s for a model whose attention chooses keys by scores: a Doge that `enable_flash_dmattn`
    has prepared, or any decoder after `add_learned_scores`.

        model.generate(**inputs, past_key_values=DynamicMaskCache(model.config))

    Except for rounding, every result equals the result with a cache of all keys. The exception is a row with left
    padding in a prompt that comes in several chunks (see docs/generation.md).
    """

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        static: bool = False,
        chunk: int | None = None,
    ):
        """
        Args:
            config: the model's config. It has learned scores, or the rule of the model's layers as attributes:
                `keep_window_size`, and those other parts of a `KeyRule` that differ from their defaults.
            static: whether memory stays in place and decoding steps read nothing from the device, for CUDA graphs and
                torch.compile. On a GPU, `generate` then compiles the model.
            chunk: the number of tokens that are stored in addition to the rule's keys, for chunked prompts and assisted
                decoding. The default is 128 with `static`; otherwise places are added as needed.

        Raises:
            ValueError: evicted keys could return under the rule, no window limits the number of keys, or layers share keys.
        """
        if not isinstance(config, PretrainedConfig):
            raise TypeError(
                f"config: got {type(config).__name__}, expected that of a model (model.config)"
            )
        config = config.get_text_config(decoder=True)
        scores = LearnedScores.from_config(config)
        if scores is not None and (shared := getattr(config, "num_kv_shared_layers", 0)):
            raise ValueError(
                f"config.num_kv_shared_layers: got {shared}, expected 0: these layers attend to all keys of layers with scores, which "
                "slots do not hold; such a model takes transformers' DynamicCache"
            )
        static = resolve_flag(static, "static")
        if chunk is None:
            chunk = RECORDED_TOKENS if static else 0
        check_count(chunk, "chunk")
        self._scores, self._chunk = scores, chunk
        rules = {}  # of each number
        for number, rule in (
            enumerate(rules_of(config))
            if scores is None
            else zip(scores.layers, scores.rules, strict=True)
        ):
            if rules.setdefault(number, rule) != rule:
                raise ValueError(
                    f"config.{CONFIG_NAME}: got different rules for layers that share the number {number}, expected one; such a model "
                    "takes transformers' DynamicCache"
                )
        super().__init__(layers=_layers_of(rules, config, static, chunk))

    def slots_of(self, layer_idx: int) -> DynamicMaskLayer:
        """Returns the slots for a layer with scores.

        Models may run a layer under several numbers. Each number that is not the layer's own gets slots at its first
        tokens.
        """
        if layer_idx >= len(self.layers):
            raise ValueError(
                f"{CACHE}: got {len(self.layers)} layers, expected more than {layer_idx}: a DynamicMaskCache(model.config) "
                "of this model"
            )
        layer = self.layers[layer_idx]
        if isinstance(layer, DynamicMaskLayer):
            return layer
        if (
            self._scores is None
            or not isinstance(layer, CacheLayerMixin)
            or isinstance(layer, StateLayer)  # a layer under several numbers that also holds states
            or layer.is_initialized
        ):
            raise ValueError(
                f"{CACHE}: got a DynamicMaskCache whose layer {layer_idx} is a {type(layer).__name__}, expected slots. Use "
                "transformers' DynamicCache"
            )
        records = any(getattr(other, "record_past", False) for other in self.layers)
        if len(set(self._scores.rules)) > 1:
            raise ValueError(
                f"{CACHE}: got tokens for layer {layer_idx}, a second number of a layer with scores, under rules that differ from "
                "layer to layer; expected one rule, or transformers' DynamicCache"
            )
        slots = _slots_in_place_of(layer, self._scores.rules[0], chunk=self._chunk)
        slots.record_past = records
        self.layers[layer_idx] = slots
        return slots

    def activate_past_recording(self) -> None:
        """Keeps new tokens pending until `crop` is called. Assisted decoding calls this function (transformers 5)."""
        for layer in self.layers:
            if hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the last `-tokens_to_remove` tokens. In transformers 4, a positive number is the length that remains."""
        if not CROPS_TO_A_LENGTH or int(tokens_to_remove) <= 0:
            super().crop(tokens_to_remove)
            return
        # The first layer of a static cache counts the tokens of the others, which would find fewer after its crop.
        removed = min(0, int(tokens_to_remove) - int(self.get_seq_length()))
        for layer in self.layers:
            layer.crop(removed if isinstance(layer, DynamicMaskLayer) else tokens_to_remove)

    def offload(self, layer_idx: int | None = None, only_non_sliding: bool = True) -> None:
        """Moves the slots of a layer, by default of every layer, to the CPU, for example between two turns of a chat.

        The next call moves them back. Layers of transformers, which would not come back, stay. A static cache cannot be
        moved. `only_non_sliding` changes nothing, because no slots slide.
        """
        for layer in self._slots_at(layer_idx):
            layer.offload()

    def prefetch(self, layer_idx: int | None = None, only_non_sliding: bool = True) -> None:
        """Moves the offloaded slots of a layer, by default of every layer, back to their device on the current stream."""
        for layer in self._slots_at(layer_idx):
            layer.prefetch()

    def _slots_at(self, layer_idx: int | None) -> list[DynamicMaskLayer]:
        layers = self.layers if layer_idx is None else [self.layers[layer_idx]]
        return [layer for layer in layers if isinstance(layer, DynamicMaskLayer)]


class HybridMaskLayer(DynamicMaskLayer, StateLayer):
    """Slots of an attention layer, and the states of convolutions and recurrences that belong to the same layer.

    States are kept as by transformers. `offload` moves the slots alone.
    """

    def __init__(self, states: CacheLayerMixin, rule: SelectionRule, **options):
        """
        Args:
            states: transformers' layer for the states, without tokens. Do not use it again.
            rule, options: the arguments of `DynamicMaskLayer`.
        """
        vars(self).update(vars(states))
        DynamicMaskLayer.__init__(self, rule, **options)

    @property
    def is_croppable(self) -> bool:
        return StateLayer.is_croppable.fget(self)

    def lazy_initialization(self, *states: Tensor, **others) -> None:
        """Allocates memory for slots (keys and values by position) or for states (by name)."""
        kind = DynamicMaskLayer if states else StateLayer
        kind.lazy_initialization(self, *states, **others)

    def crop(self, tokens_to_remove: int) -> None:
        DynamicMaskLayer.crop(self, tokens_to_remove)
        StateLayer.crop(self, tokens_to_remove)

    def reset(self) -> None:
        DynamicMaskLayer.reset(self)
        StateLayer.reset(self)

    def _select_rows(self, rows: Tensor) -> None:
        StateLayer.reorder_cache(self, rows)
        DynamicMaskLayer._select_rows(self, rows)


def _layers_of(
    rules: dict[int, SelectionRule], config: PretrainedConfig, static: bool, chunk: int
) -> list[CacheLayerMixin]:
    """Makes slots for layers with rules, and transformers' cache layers for the others, which slide or have only states of
    convolutions and recurrences."""
    others = DynamicCache(config=config).layers or [None] * config.num_hidden_layers
    if static and len(rules) < len(others):
        raise ValueError(
            f"static: got True for a model with scores in {len(rules)} of {len(others)} layers, expected False"
        )
    layers, counter = [], None
    for index, layer in enumerate(others):
        if index in rules:
            layer = _slots_in_place_of(
                layer, rules[index], static=static, chunk=chunk, counter=counter
            )
            counter = counter or layer
        layers.append(layer)
    return layers


def _slots_in_place_of(
    layer: CacheLayerMixin | None, rule: SelectionRule, **options
) -> DynamicMaskLayer:
    """Makes slots that take over the states of a layer of transformers, which has no tokens."""
    if isinstance(layer, StateLayer):
        return HybridMaskLayer(layer, rule, **options)
    return DynamicMaskLayer(rule, **options)
