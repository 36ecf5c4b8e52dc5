"""The major version of transformers that the tests run with, and how its drafts differ."""

import transformers

IS_TRANSFORMERS_4 = int(transformers.__version__.split(".")[0]) < 5


def recording(cache):
    """Returns a `DynamicMaskCache` that records for assisted decoding. transformers 5 itself announces that it will crop."""
    if IS_TRANSFORMERS_4:
        cache.activate_past_recording()
    return cache


def within_limit(drafted, length):
    """Returns drafted ids up to `length`, which transformers 4 exceeds with any cache."""
    return drafted[:, :length] if IS_TRANSFORMERS_4 else drafted
