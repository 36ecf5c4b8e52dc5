"""The caches of models: the name of their argument, the cache of `generate`, and the argument of `crop`."""

import inspect
import types
from collections.abc import Callable, Mapping

from transformers import PreTrainedModel, cache_utils
from transformers.cache_utils import Cache
from transformers.models.doge.modeling_doge import DogeModel

# The arguments of DogeModel.forward, in order. The cache is `past_key_values` in 4.57 to 5.23 and `cache` since 5.24, which
# takes the old name until 5.40. No issue is known to us. Remove the old name when 5.24 is the oldest version.
MODEL_ARGUMENTS = tuple(inspect.signature(DogeModel.forward).parameters)[1:]
CACHE = "cache" if "cache" in MODEL_ARGUMENTS else "past_key_values"
CACHE_NAMES = ("cache", "past_key_values")

# Whether `crop` of a cache also takes the length to cut the text to, as in 4.57. #47720 left the number of tokens to remove, 0 or
# less. Remove when 4.57 is no longer supported.
CROPS_TO_A_LENGTH = "max_length" in inspect.signature(Cache.crop).parameters

# The base class of cache layers with states of convolutions and recurrences, or one without instances: the hybrid models of 4.57
# have caches of their own. No issue is known to us. Remove when 4.57 is no longer supported.
StateLayer = getattr(cache_utils, "LinearAttentionLayer", type("StateLayer", (), {}))


def find_cache(options: Mapping[str, object]) -> object | None:
    """Returns the cache among the arguments of a call, under either of its names."""
    return next((options[name] for name in CACHE_NAMES if options.get(name) is not None), None)


def pop_cache(options: dict) -> object | None:
    """Removes the cache from the arguments of a call, and returns it."""
    cache = find_cache(options)
    for name in CACHE_NAMES:
        options.pop(name, None)
    return cache


def set_cache_of_generate(
    model: PreTrainedModel, make_cache: Callable[[PreTrainedModel], Cache | None]
) -> None:
    """Lets `make_cache(model)` make the cache of this model's `generate` unless the call passes a cache or the name of
    one. If it returns None, transformers makes the cache.

    4.57 to 5.24: `generate` makes a cache before it calls the model, of a class in a list that others cannot extend. #41505
    left it to the model, and 5.24 makes it again. Remove when models, or a registry, make it.
    """

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        cache_choice = find_cache(model_kwargs), generation_config.cache_implementation
        is_wanted = cache_choice == (None, None) and generation_config.use_cache is not False
        cache = make_cache(self) if is_wanted else None
        if cache is None:
            prepare = type(self)._prepare_cache_for_generation
            return prepare(self, generation_config, model_kwargs, *args, **kwargs)
        if getattr(generation_config, "is_assistant", False):
            cache.activate_past_recording()
        model_kwargs[CACHE] = cache
        return None

    if hasattr(model, "_prepare_cache_for_generation"):
        model._prepare_cache_for_generation = types.MethodType(_prepare_cache_for_generation, model)
