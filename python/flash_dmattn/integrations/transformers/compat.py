"""Work-arounds for missing features of transformers, each with the versions that need it, the issue or pull request (#) of
huggingface/transformers that it waits for or follows, and the condition for its removal.

Everything else goes through transformers' registries: `AttentionInterface` and `AttentionMaskInterface`.
"""

import copy
import functools
import inspect
import types
from collections.abc import Callable, Container, Mapping

import torch
import transformers
from packaging import version
from transformers import PreTrainedModel, masking_utils
from transformers.configuration_utils import PretrainedConfig
from transformers.models.doge.modeling_doge import DogeModel

# The arguments of DogeModel.forward, in order. The cache is `past_key_values` in 4.57 to 5.23 and `cache` since 5.24, which
# takes the old name until 5.40. No issue is known to us. Remove the old name when 5.24 is the oldest version.
MODEL_ARGUMENTS = tuple(inspect.signature(DogeModel.forward).parameters)[1:]
CACHE = "cache" if "cache" in MODEL_ARGUMENTS else "past_key_values"
CACHE_NAMES = ("cache", "past_key_values")


def find_cache(options: Mapping[str, object]) -> object | None:
    """The cache among the arguments of a call, under either of its names."""
    return next((options[name] for name in CACHE_NAMES if options.get(name) is not None), None)


def pop_cache(options: dict) -> object | None:
    """`find_cache`, which is no longer among the arguments then."""
    cache = find_cache(options)
    for name in CACHE_NAMES:
        options.pop(name, None)
    return cache


def wrap_implementation_setter(
    resolve: Callable[[PreTrainedModel, str], str | None], aliases: Mapping[str, str]
) -> None:
    """Lets `resolve(model, name)` replace the name of an attention implementation when it is set for a model.

    4.57 to 5.24: the registries of transformers never see the model for which a name is set, so that no
    implementation can refuse one. 5.x also takes every name with "flash" in it for a package of FlashAttention
    and tries to load it, before it asks a model that lists its own such packages (GPT-OSS, #44177): `aliases` are names without
    that word. #38974 made the setter public, so that models can refuse a name, but not implementations; #36609 (open)
    asks for attention functions that wrap others. Remove when `AttentionInterface` has a hook that gets the model.
    """
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


KEPT_MANAGER = (
    "_cached_continuous_batching_manager"  # attribute of a model: with `persistent_manager`
)
HAS_SLOTS_IN_BATCHES = version.parse(transformers.__version__).release[:2] == (5, 24)


def set_continuous_batching(
    model: PreTrainedModel, names: Container[str], make_manager: Callable | None
) -> None:
    """Makes `make_manager(model, ...)` the manager of continuous batching of this model, under implementations of these
    names; None: the model refuses it at its start.

    4.57: it begins with any implementation, in a thread whose errors are only logged, and answers are cut off. Later
    versions raise for unknown implementations; up to 5.24 none takes a cache of another kind: #47809 has an allocator for each
    type of attention, in a table that it does not let others extend. #48305 (open) asks for states of one size per
    request, and #48735 (open) for paging by call instead of by model. Remove when that table is a registry.
    """

    def init_continuous_batching(self, *args, **kwargs):
        name = str(self.config._attn_implementation)
        if name.removeprefix("paged|") not in names:
            drop_slot_manager(self)  # which transformers would take for its own
            return type(self).init_continuous_batching(self, *args, **kwargs)
        if make_manager is not None and name in names:
            return make_manager(self, *args, **kwargs)
        raise ValueError(
            f"attn_implementation: got {name!r}, expected another one: continuous batching (generate_batch) has a paged "
            "cache, which flash_dmattn does not support. For a Doge it has slots, with transformers 5.24 and "
            f"enable_flash_dmattn; this is {transformers.__version__}. Use generate"
        )

    if hasattr(model, "init_continuous_batching"):
        model.init_continuous_batching = types.MethodType(init_continuous_batching, model)


def drop_slot_manager(model: PreTrainedModel) -> None:
    """Ends the manager with slots that a model keeps: its slots have one rule, and its CUDA graphs the model's parameters."""
    if getattr(getattr(model, KEPT_MANAGER, None), "has_slots", False):
        model.destroy_cached_continuous_batching_manager()


def documents_of(mask_function: Callable) -> torch.Tensor | None:
    """The number of each token's document, int [B, S], where a mask function is causality within packed documents.

    4.57 to 5.24: the functions are closures, in the order of #40753. No issue asks for more. Remove when mask functions carry
    their kind. Compiled code cannot look into a closure, and gets None.
    """
    if torch.compiler.is_compiling() or not _is_local_of(mask_function, "and_masks"):
        return None
    documents = None
    for part in _closure(mask_function)["mask_functions"]:
        if _is_local_of(part, "packed_sequence_mask_function"):
            documents = _closure(part)["packed_sequence_mask"]
        elif _is_local_of(part, "remap_positions_for_packed_sequence"):
            part = _closure(part)["mask_function"]
            if part is not masking_utils.causal_mask_function:
                return None
        elif part is not masking_utils.causal_mask_function:
            return None
    return documents


def _is_local_of(function: Callable, maker: str) -> bool:
    """Whether a function of transformers' masking module made another one."""
    is_of_module = getattr(function, "__module__", None) == masking_utils.__name__
    return is_of_module and function.__qualname__.startswith(f"{maker}.<locals>")


def _closure(function: Callable) -> dict[str, object]:
    cells = (cell.cell_contents for cell in function.__closure__)
    return dict(zip(function.__code__.co_freevars, cells, strict=True))


def own_config(model: torch.nn.Module) -> None:
    """Copies the configs that modules of a model hold. Another model may share them, and would change with them.

    4.57 to 5.24: the name of an implementation is in the config. No issue is known to us. Remove when it is in the model.
    """
    copies: dict[int, object] = {}
    for module in model.modules():
        config = vars(module).get("config")
        if isinstance(config, PretrainedConfig):
            module.config = copy.deepcopy(config, copies)


def adopt_layer(layer: torch.nn.Module, layer_class: type[torch.nn.Module]) -> torch.nn.Module:
    """A layer of another class with the parameters, modules, buffers and hooks of `layer`, which is not to be used any more.

    Every version: torch's modules have no such conversion. Remove when models get their attention layers from a registry.
    """
    adopted = layer_class.__new__(layer_class)
    vars(adopted).update(vars(layer))
    _adopt_hooked_forward(adopted, layer)
    return adopted


def _adopt_hooked_forward(layer: torch.nn.Module, replaced: torch.nn.Module) -> None:
    """Accelerate's hooks (`device_map`) keep the `forward` of a layer beneath their own; `layer` has taken over the
    attributes of `replaced`, and gets its own `forward` there. huggingface/accelerate#1971 does so for copies. Remove when
    accelerate hooks modules without replacing `forward`."""
    if "_old_forward" not in vars(replaced):
        return
    layer._old_forward = types.MethodType(type(layer).forward, layer)
    hooked = vars(replaced)["forward"].func
    layer.forward = functools.update_wrapper(functools.partial(hooked, layer), layer._old_forward)
