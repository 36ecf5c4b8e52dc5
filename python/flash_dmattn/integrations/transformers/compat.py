"""Work-arounds for missing features of transformers, each with the versions that need it, the issue or pull request (#) of
huggingface/transformers that it waits for or follows, if there is one, and the condition for its removal.

Two more are elsewhere: `_shared.layer_call.target_dtype`, which needs no transformers, reads private attributes of quantized
configs (4.57 to 5.24), and `context_parallel.ContextParallelTrainerMixin` overrides a private method of `Trainer` (4.57 to 5.24).
Where an argument differs between versions, a comment there names them ("transformers 4"). Everything else goes through the
registries `AttentionInterface` and `AttentionMaskInterface`, through subclasses of transformers' classes, and through hooks,
attributes and classes of layers of a model that the caller names. At import `wrap_implementation_setter` wraps two methods of
`PreTrainedModel`; nothing else of transformers is changed, then or later.
"""

import copy
import functools
import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel, cache_utils, masking_utils
from transformers.cache_utils import Cache
from transformers.configuration_utils import PretrainedConfig
from transformers.models.doge.modeling_doge import DogeModel

NEWEST_TESTED = (5, 24)


def is_untested() -> bool:
    """Whether this transformers is of a later minor version than those that were tested."""
    return tuple(map(int, transformers.__version__.split(".")[:2])) > NEWEST_TESTED


def bind_arguments(names: Iterable[str], args: tuple, options: Mapping[str, object]) -> dict:
    """Returns the arguments of a call by their names. names: of the positional ones, in their order."""
    return dict(zip(names, args, strict=False)) | options


# The function of masks in which every query sees every key. 4.57 has none. Remove when 4.57 is no longer supported.
BIDIRECTIONAL = getattr(masking_utils, "bidirectional_mask_function", None)

# ---- The caches of models ---------------------------------------------------------------------------

# The arguments of DogeModel.forward, in order. The cache is `past_key_values` in 4.57 to 5.23 and `cache` since 5.24, which
# takes the old name until 5.40. Remove the old name when 5.24 is the oldest version.
MODEL_ARGUMENTS = tuple(inspect.signature(DogeModel.forward).parameters)[1:]
CACHE = "cache" if "cache" in MODEL_ARGUMENTS else "past_key_values"
CACHE_NAMES = ("cache", "past_key_values", "layer_past")  # the last one of layers of older models
_PREPARE = "_prepare_cache_for_generation"

# Whether `crop` of a cache also takes the length to cut the text to, as in 4.57. #47720 left the number of tokens to remove, 0 or
# less. Remove when 4.57 is no longer supported.
CROPS_TO_A_LENGTH = "max_length" in inspect.signature(Cache.crop).parameters

# Types whose causal layers pass is_causal=False with every mask in 4.57, as their masks include causality. Remove when 4.57 is no
# longer supported.
FLAG_WITH_EVERY_MASK_IN_4 = ("decision_transformer", "gpt2") if CROPS_TO_A_LENGTH else ()

# Whether gradient checkpointing is reentrant by default. Remove when 4.57 is no longer supported.
CHECKPOINTS_REENTRANT = transformers.__version__.startswith("4.")

# The base class of cache layers with states of convolutions and recurrences, or one without instances: the hybrid models of 4.57
# have caches of their own. Remove when 4.57 is no longer supported.
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

    if hasattr(model, _PREPARE):
        setattr(model, _PREPARE, partial(_prepare_cache, model, make_cache))
    elif is_untested() and hasattr(model, "generate"):
        warnings.warn(
            f"{CACHE}: transformers {transformers.__version__} is newer than flash_dmattn's tests, and generate may make a cache of "
            "all keys. Pass it a DynamicMaskCache(model.config)",
            stacklevel=3,
        )


def _prepare_cache(
    model: PreTrainedModel, make_cache: Callable, generation_config, model_kwargs, *args, **kwargs
) -> None:
    cache_choice = find_cache(model_kwargs), generation_config.cache_implementation
    is_wanted = cache_choice == (None, None) and generation_config.use_cache is not False
    cache = make_cache(model) if is_wanted else None
    if cache is None:
        prepare = getattr(type(model), _PREPARE)
        return prepare(model, generation_config, model_kwargs, *args, **kwargs)
    if getattr(generation_config, "is_assistant", False):
        cache.activate_past_recording()
    model_kwargs[CACHE] = cache
    return None


# ---- Continuous batching ----------------------------------------------------------------------------

_BATCHING = "init_continuous_batching"


def refuse_continuous_batching(model: PreTrainedModel, names: Collection[str]) -> None:
    """Lets `generate_batch` raise while a model has an implementation of one of these names.

    4.57: it begins with any implementation, in a thread whose errors are only logged, and answers are cut off. Later versions
    raise for implementations that they do not know, unless they find FlashAttention. Remove with 4.57.
    """
    if hasattr(model, _BATCHING):
        setattr(model, _BATCHING, partial(_init_continuous_batching, model, names))


def allow_continuous_batching(model: PreTrainedModel) -> None:
    """Undoes `refuse_continuous_batching`."""
    vars(model).pop(_BATCHING, None)


def _init_continuous_batching(model: PreTrainedModel, names: Collection[str], *args, **kwargs):
    name = str(implementation_of(model.config))
    if name.removeprefix("paged|") in names:
        raise ValueError(
            f"attn_implementation: got {name!r}, expected another one: continuous batching (generate_batch) has a paged "
            "cache, which flash_dmattn does not support. Use generate, or vLLM"
        )
    return type(model).init_continuous_batching(model, *args, **kwargs)


# ---- Parameters that are elsewhere ------------------------------------------------------------------

# The attribute of a module where accelerate 1.0 to 1.15 keeps its hook, of which nothing public tells. Remove when a public
# function says where a module computes.
_HOOK = "_hf_hook"


def device_of(layer: nn.Module) -> torch.device:
    """Returns the device where a layer computes. accelerate's hooks bring parameters there from the CPU or a disk."""
    device = next(layer.parameters()).device
    return device if device.type != "meta" else next(_execution_devices(layer), device)


def _execution_devices(layer: nn.Module) -> Iterator[torch.device]:
    for module in layer.modules():
        hook = getattr(module, _HOOK, None)
        for own in getattr(hook, "hooks", (hook,)):
            device = getattr(own, "execution_device", None)
            if device is not None:
                yield torch.device(device)


def is_offloaded(module: nn.Module) -> bool:
    """Whether accelerate keeps parameters of a module on the CPU or a disk, and gives it empty ones on "meta"."""
    is_meta = any(parameter.is_meta for parameter in module.parameters())
    return is_meta and next(_execution_devices(module), None) is not None


def change_class(layer: nn.Module, cls: type[nn.Module]) -> None:
    """Makes a layer one of a subclass, with its parameters, modules, buffers and hooks. accelerate's hooks (`device_map`, 1.0 to
    1.15) call the forward that they found, so they get the new one. Remove when layers can be registered by class."""
    layer.__class__ = cls
    if "_old_forward" in vars(layer):
        layer._old_forward = partial(cls.forward, layer)


# ---- Tied parameters --------------------------------------------------------------------------------

_TIED_NAMES = "_flash_dmattn_tied_names"  # a model's patterns before `leave_untied`


def leave_untied(model: PreTrainedModel, part: str) -> None:
    """Excludes parameters below modules named `part` from patterns of tied ones. Zamba 2 ties whole blocks in each
    `tie_weights`, 5.0 to 5.24; a list of 4.57 has no pairs. Remove when patterns name parameters of the model's own."""
    tied, but = vars(model).get("_tied_weights_keys"), rf"(?!.*\.{part}\.)"
    if isinstance(tied, dict):
        setattr(model, _TIED_NAMES, tied)
        model._tied_weights_keys = {k + but: v + but for k, v in tied.items()}


def restore_tied(model: PreTrainedModel) -> None:
    """Undoes `leave_untied`."""
    if _TIED_NAMES in vars(model):
        model._tied_weights_keys = vars(model).pop(_TIED_NAMES)


# ---- The name of an attention implementation --------------------------------------------------------


_METHODS = "_check_and_adjust_attn_implementation", "get_correct_attn_implementation"


def check_methods(*args, **kwargs) -> None:
    """Raises RuntimeError if transformers lacks a method that `wrap_implementation_setter` wraps. It takes the arguments of
    attention and mask functions, in whose place it is registered then."""
    missing = [name for name in _METHODS if not hasattr(PreTrainedModel, name)]
    if missing:
        raise RuntimeError(
            f"transformers: got version {transformers.__version__} without PreTrainedModel.{missing[0]}, expected one with it, as "
            "5.24: this flash_dmattn cannot check that its attention equals the model's own"
        )


def wrap_implementation_setter(
    resolve: Callable[[PreTrainedModel, str], str | None], aliases: Mapping[str, str]
) -> bool:
    """Lets `resolve(model, name)` replace the name of an attention implementation when it is set for a model.

    4.57 to 5.24: registries give a function for a name, and get neither the model nor a say in the name. A check at the first
    call would be too late: 5.x takes a name with "flash" in it for a package of FlashAttention and raises where it finds none,
    or takes another one that the model lists (GPT-OSS, #44177; `aliases` are names without that word); Doge's own layers
    expand their mask to N x N before they call the attention function; models with attention of their own call none, and
    would ignore the name. Both methods are needed: the second one alone gets the names of the parts of a model. #38974 made the
    setter public, so that models can refuse a name, but not implementations; #36609 (open) asks for attention functions that
    wrap others. Remove when `AttentionInterface` has a hook that gets the model.

    Returns False, and wraps nothing, if a later transformers lacks one of the methods.
    """
    if not all(hasattr(PreTrainedModel, name) for name in _METHODS):
        return False
    check = PreTrainedModel._check_and_adjust_attn_implementation

    @functools.wraps(check)
    def _check_and_adjust_attn_implementation(self, attn_implementation, *args, **kwargs):
        return check(self, aliases.get(attn_implementation, attn_implementation), *args, **kwargs)

    PreTrainedModel._check_and_adjust_attn_implementation = _check_and_adjust_attn_implementation
    original = PreTrainedModel.get_correct_attn_implementation

    @functools.wraps(original)
    def get_correct_attn_implementation(self, requested_attention, *args, **kwargs):
        name = resolve(self, requested_attention)
        return name or original(self, requested_attention, *args, **kwargs)

    PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation
    return True


def can_set_implementation(model: PreTrainedModel) -> bool:
    """Whether transformers lets the layers of a model have another implementation than eager attention, 4.57 to 5.24: they look
    it up in the registry. Remove when a public function says it."""
    return model._can_set_attn_implementation()


def implementation_of(config: PretrainedConfig) -> str:
    """Returns the name of the implementation in a config, 4.57 to 5.24. Remove when a public attribute says it."""
    return config._attn_implementation


def store_name(config: PretrainedConfig, name: str) -> None:
    """Sets the name of an implementation in one config alone.

    4.57 to 5.24: the setter of `config._attn_implementation` reaches the configs of its parts. Remove
    when the name is in the layers that it is for.
    """
    config._attn_implementation_internal = name


def own_config(model: nn.Module) -> None:
    """Copies the configs that modules of a model hold. Another model may share them, and would change with them.

    4.57 to 5.24: the name of an implementation is in the config. Remove when it is in the model.
    """
    check_methods()  # a name follows
    copies: dict[int, object] = {}
    for module in model.modules():
        config = vars(module).get("config")
        if isinstance(config, PretrainedConfig):
            module.config = copy.deepcopy(config, copies)
