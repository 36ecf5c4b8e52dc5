"""Compares a model under an attention implementation's name with eager attention, with the same weights and inputs in float32.

There is a wide gap between equal and different results. In all classes of transformers 5.24, results that should be equal differ
by less than 1e-4 of their largest value, and results of a wrong mask by more than 1e-2. `TOLERANCE` is in the middle.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from tiny_inputs import inputs_for, inputs_with_images, inputs_with_sound
from tiny_models import CannotBeBuilt, ModelClass, tiny_config, tiny_model
from tiny_sizes import PADDED

TOLERANCE = 1e-3
GENERATING = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT")
_CHANGED = 4  # how many last tokens are changed, to see whether earlier tokens notice

Results = dict[str, "torch.Tensor | list[torch.Tensor] | Exception"]


class Verdict(NamedTuple):
    """The behaviour of a class under a name.

    kind: one of
        "equal": the results equal eager attention.
        "own": the class computes attention itself and equals eager attention.
        "refused": building the model raises.
        "raises": a call raises; `reason` says with which inputs.
        "wrong": the results differ.
        "none": the class has no attention.
        "untested": the class could not be tested.
    """

    kind: str
    reason: str = ""
    error: float = 0.0  # largest error, relative to the largest expected value
    tested: tuple[str, ...] = ()  # names of the tested inputs


def compare(model_class: ModelClass, name: str) -> Verdict:
    """Returns the verdict on a class under attn_implementation=`name`."""
    try:
        config = tiny_config(model_class)
        eager = tiny_model(model_class, config, "eager")
        inputs = inputs_for(eager)
        seen = Counter()
        with _Watch(seen):
            first, second = (_logits(eager(**inputs)).detach() for _ in range(2))
    except Exception as error:
        if not _may_attend(model_class):
            return Verdict("none")
        reason = _refusal(model_class, name)
        return Verdict("refused", reason) if reason else Verdict("untested", _in_words(error))
    if not torch.equal(first, second):
        return Verdict("untested", "eager attention is not the same twice")
    if not seen["softmax"]:
        return Verdict("none")
    try:
        model = tiny_model(model_class, config, name)
    except Exception as error:
        return Verdict("refused", _in_words(error))
    model.load_state_dict(eager.state_dict())
    expected = results(eager, inputs, model_class)
    with _Watch(seen):
        got = results(model, inputs, model_class)
    is_ours = seen["ours"] > 0
    verdict = _verdict(got, expected, is_ours)
    if verdict.kind != "wrong":
        return verdict
    seen_padding = _results_that_see_padding(eager, inputs, expected)
    without = {key: value for key, value in expected.items() if key not in seen_padding}
    verdict = _verdict(got, without, is_ours)
    if verdict.kind == "equal":
        reason = "where padding does not reach the results of real tokens, as it does under eager attention too"
        return verdict._replace(reason=reason)
    return verdict


def _refusal(model_class: ModelClass, name: str) -> str:
    """Returns the reason why a class refuses a name, or "" if it does not. Needs no model that can be called."""
    try:
        with torch.device("meta"):
            getattr(transformers, model_class.name)._from_config(
                tiny_config(model_class), attn_implementation=name
            )
    except ValueError as error:
        return _in_words(error) if str(error).startswith("attn_implementation: got") else ""
    except Exception:
        return ""
    return ""


def _results_that_see_padding(eager: torch.nn.Module, inputs: dict, expected: Results) -> set[str]:
    """Returns the names of results of real tokens that change with the tokens in the place of padding. The result of a query
    without visible keys is then part of them: the mean of all values in eager attention, 0 in others, torch's among them."""
    names = set()
    for key, padded in _padded(inputs).items():
        if isinstance(expected.get(key), torch.Tensor):
            ids, mask = padded["input_ids"], padded["attention_mask"]
            others = {**padded, "input_ids": torch.where(mask.bool(), ids, ids.flip(1))}
            with torch.no_grad():
                changed = _real(_logits(eager(**others)), mask)
            if _error(changed, expected[key], expected["plain"].abs().max()) > TOLERANCE:
                names |= {key, f"decoding, {key}"}
    return names


def _may_attend(model_class: ModelClass) -> bool:
    """Returns whether a class that cannot be built may attend: its source has a softmax, or the models it contains
    may have one."""
    name = getattr(getattr(transformers, model_class.name, None), "__module__", "")
    if not name.startswith("transformers.models.") or name not in sys.modules:
        return True  # the class needs another package
    source = inspect.getsource(sys.modules[name]).lower()
    return any(
        word in source for word in ("softmax", "attention_functions", "scaled_dot", "automodel")
    )


def _verdict(got: Results, expected: Results, is_ours: bool) -> Verdict:
    tested = tuple(key for key, value in expected.items() if not isinstance(value, Exception))
    scale = expected["plain"].abs().max()
    errors = {
        key: _error(got[key], expected[key], scale)
        for key in tested
        if not isinstance(got[key], Exception)
    }
    worst = max(errors.values(), default=0.0)
    wrong = [f"{key} {error:.2g}" for key, error in errors.items() if not error <= TOLERANCE]
    raised = {key: _in_words(got[key]) for key in tested if isinstance(got[key], Exception)}
    if wrong:
        return Verdict("wrong", ", ".join(wrong), worst, tested)
    if raised:
        where = "" if "plain" in raised else ", ".join(raised) + ": "
        return Verdict("raises", where + next(iter(raised.values())), worst, tested)
    return Verdict("equal" if is_ours else "own", "", worst, tested)


def results(model: torch.nn.Module, inputs: dict, model_class: ModelClass) -> Results:
    """Returns a model's logits (or last states) for every kind of input and the gradients of all parameters, or the error that
    was raised."""
    names = inspect.signature(model.forward).parameters
    free = {"use_cache": False} if "use_cache" in names else {}
    key = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    outcomes: Results = {}

    def add(name: str, function: Callable[[], torch.Tensor | list[torch.Tensor]]) -> None:
        try:
            outcomes[name] = function()
        except Exception as error:
            outcomes[name] = error

    def logits(**changes) -> torch.Tensor:
        with torch.no_grad():
            return _logits(model(**{**inputs, **changes}, **free))

    add("plain", lambda: logits())
    add("gradients", lambda: _gradients(model, {**inputs, **free}))
    if "input_ids" in inputs:
        if "attention_mask" in names:
            for name, padded in _padded(inputs).items():
                mask = padded["attention_mask"]
                add(name, lambda padded=padded, mask=mask: _real(logits(**padded), mask))
        add("later tokens", lambda: _leak(logits, inputs, key))
        for length in (1, 2):
            add(f"{length} tokens", lambda length=length: logits(**_short(inputs, length)))
        if set(GENERATING) & set(model_class.tasks) and {"cache", "past_key_values"} & set(names):
            add("decoding", lambda: _decode(model, inputs, key, None))
            if key == "input_ids" and "attention_mask" in names:
                mask = _padded(inputs)["left padding"]["attention_mask"]
                add("decoding, left padding", lambda: _decode(model, inputs, key, mask))
        add("images", lambda: logits(**inputs_with_images(model)))
        add("sound", lambda: logits(**inputs_with_sound(model)))
    return outcomes


def _padded(inputs: dict) -> dict[str, dict]:
    """Returns inputs with padding in the first row."""
    if "input_ids" not in inputs:
        return {}
    left, right = (torch.ones_like(inputs["input_ids"]) for _ in range(2))
    left[0, :PADDED] = 0
    right[0, -PADDED:] = 0
    return {
        "left padding": {**inputs, "attention_mask": left},
        "right padding": {**inputs, "attention_mask": right},
        "2 tokens, padding": {
            **_short(inputs, 2),
            "attention_mask": torch.tensor([[0, 1], [1, 1]]),
        },
    }


def _short(inputs: dict, length: int) -> dict:
    """Returns the first tokens of every input with tokens."""
    tokens = {inputs[key].shape for key in ("input_ids", "decoder_input_ids") if key in inputs}
    return {k: v[:, :length] if v.shape[:2] in tokens else v for k, v in inputs.items()}


def _real(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Returns the logits of real tokens, if there are logits for each token."""
    return logits[mask.bool()] if logits.shape[:2] == mask.shape else logits


def _leak(logits: Callable[..., torch.Tensor], inputs: dict, key: str) -> torch.Tensor:
    """Returns how much earlier tokens change with the last ones, which is 0 under causal attention."""
    changed = inputs[key].clone()
    changed[:, -_CHANGED:] = changed[:, -_CHANGED:].flip(0)
    before, after = logits(), logits(**{key: changed})
    if before.shape[:2] != changed.shape:
        raise CannotBeBuilt("no result per token")
    return (after - before)[:, :-_CHANGED]


def _gradients(model: torch.nn.Module, inputs: dict) -> list[torch.Tensor]:
    """Returns the gradients of a random weighted sum of all logits with respect to all parameters."""
    model.zero_grad()
    out = _logits(model(**inputs))
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(4)))
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    model.zero_grad()
    return gradients


def _decode(
    model: torch.nn.Module, inputs: dict, key: str, mask: torch.Tensor | None
) -> torch.Tensor:
    """Returns the logits of the last tokens, after a prompt and two steps with the model's own cache."""
    names = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in names else "past_key_values"
    length, start, cache, last = inputs[key].shape[1], 0, None, []
    for end in (length - 2, length - 1, length):
        step = {**inputs, key: inputs[key][:, start:end], name: cache, "use_cache": True}
        if mask is not None:
            step["attention_mask"] = mask[:, :end]
        with torch.no_grad():
            out = model(**step)
        cache, start = out[name], end
        last.append(_logits(out)[:, -1])
    return torch.stack(last)


def _logits(out: object) -> torch.Tensor:
    for name in ("logits", "prediction_logits", "reconstruction", "last_hidden_state"):
        if isinstance(getattr(out, name, None), torch.Tensor):
            return getattr(out, name)
    values = out.values() if hasattr(out, "values") else out if isinstance(out, tuple) else (out,)
    return next(v for v in values if isinstance(v, torch.Tensor) and v.is_floating_point())


def _error(got, expected, scale: torch.Tensor) -> float:
    """Returns the largest difference, relative to the largest expected value but at least to `scale`, which matters for a tensor
    of small values."""
    if isinstance(expected, list):
        scale = 1e-2 * max(t.abs().max() for t in expected if t.numel())
        return max(_error(*pair, scale) for pair in zip(got, expected, strict=True))
    if got.shape != expected.shape or not torch.equal(got.isfinite(), expected.isfinite()):
        return float("inf")
    if not expected.numel():
        return 0.0
    difference = (got - expected)[expected.isfinite()].abs()
    return float(difference.max() / torch.maximum(expected.abs().max(), scale))


def _in_words(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"


class _Watch(TorchDispatchMode):
    """Counts softmaxes of torch and calls of this library."""

    def __init__(self, seen: Counter):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "flash_dmattn":
            self.seen["ours"] += 1
        elif "softmax" in function.__name__ or "scaled_dot_product" in function.__name__:
            self.seen["softmax"] += 1
        return function(*args, **(kwargs or {}))
