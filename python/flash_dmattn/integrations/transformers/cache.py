"""A transformers `Cache` of the keys that a rule shows to the last token of each head, for texts of any length.

A key that `keep_window_size` better keys beat is never seen again once it is no longer recent, so each key head keeps in
slots what its rule shows, and attention over them is attention over all keys. The price: slots of different heads hold
different positions, so only attention that chooses by the same scores can read them.
"""

from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache
from transformers.configuration_utils import PretrainedConfig

from ..._core.checks import check_count, resolve_flag
from ..config_rules import LearnedScores, rules_of
from .cache_layer import RECORDED_TOKENS, DynamicMaskLayer


class DynamicMaskCache(Cache):
    """A cache of `DynamicMaskLayer`s for a model whose attention chooses keys by scores: a Doge that `enable_flash_dmattn`
    has prepared, or any decoder after `add_learned_scores`.

        model.generate(**inputs, past_key_values=DynamicMaskCache(model.config))

    Every result is that of a cache of all keys, to rounding, except rows with left padding in a prompt that comes
    in several chunks (see docs/generation.md).
    """

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        static: bool = False,
        selection: str = "per_query",
        chunk: int | None = None,
    ):
        """
        Args:
            config: the model's config, with learned scores, or with the rule of its layers: keep_window_size (of all key heads,
                or a sequence with one for each), and where they are not the defaults recent_window, recent_competes,
                sink_tokens and score_threshold, all as in `select_key_intervals`.
            static: memory stays in place and no step of decoding reads from the device, for CUDA graphs and
                torch.compile; `generate` compiles the model then on a GPU.
            selection: "per_query" is possible.
            chunk: number of tokens stored in addition to the rule's keys, for chunked prompts and assisted decoding;
                default 128 with `static`, otherwise grown as needed.

        Raises:
            ValueError: a choice of keys under which evicted keys return, or whose number no window limits.
        """
        if not isinstance(config, PretrainedConfig):
            raise TypeError(
                f"config: got {type(config).__name__}, expected that of a model (model.config)"
            )
        config = config.get_text_config(decoder=True)
        if selection != "per_query":
            raise ValueError(
                f"selection: got {selection!r}, expected 'per_query'; with one choice for all queries a new key changes "
                "which keys the others see, so none can be evicted. Use transformers' DynamicCache"
            )
        scores = LearnedScores.from_config(config)
        static = resolve_flag(static, "static")
        if chunk is None:
            chunk = RECORDED_TOKENS if static else 0
        check_count(chunk, "chunk")
        if scores is not None:
            layers = _layers_of(scores, config, static, chunk)
        else:
            layers = [
                DynamicMaskLayer(rule, static=static, chunk=chunk, counts_on_device=index == 0)
                for index, rule in enumerate(rules_of(config))
            ]
        super().__init__(layers=layers)

    def activate_past_recording(self) -> None:
        """Keeps new tokens pending until `crop` is called. Assisted decoding calls this function (transformers 5)."""
        for layer in self.layers:
            layer.activate_past_recording()

    def offload(self, layer_idx: int | None = None, only_non_sliding: bool = True) -> None:
        """Moves a layer, by default all of them, to the CPU: between two turns of a chat. The next call moves it
        back.

        Not for a static cache. `only_non_sliding`: no layer here slides.
        """
        for layer in self.layers if layer_idx is None else [self.layers[layer_idx]]:
            layer.offload()

    def prefetch(self, layer_idx: int | None = None, only_non_sliding: bool = True) -> None:
        """Moves an offloaded layer, by default all of them, back to its device, on the current stream."""
        for layer in self.layers if layer_idx is None else [self.layers[layer_idx]]:
            layer.prefetch()


def _layers_of(
    scores: LearnedScores, config: PretrainedConfig, static: bool, chunk: int
) -> list[CacheLayerMixin]:
    """Slots for the layers that have learned scores, and transformers' layers for the others, which slide."""
    others = DynamicCache(config=config).layers or [None] * config.num_hidden_layers
    if static and len(scores.layers) < len(others):
        raise ValueError(
            f"static: got True for a model with scores in {len(scores.layers)} of {len(others)} layers, expected False"
        )
    options, first = {"static": static, "chunk": chunk}, scores.layers[0]
    return [
        DynamicMaskLayer(scores.rule, **options, counts_on_device=index == first)
        if index in scores.layers
        else other
        for index, other in enumerate(others)
    ]
