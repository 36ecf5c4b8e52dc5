"""On the GPU, too, a 16-bit Doge keeps the keys that the float32 model keeps."""

import pytest
import torch

from gpu import needs_gpu

pytest.importorskip("transformers")

from doge_gradients import (  # noqa: E402
    assert_the_choice_is_that_of_float32,
    median_distances,
)

pytestmark = needs_gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_are_nearer_to_the_float32_models(dtype):
    assert_the_choice_is_that_of_float32(median_distances(dtype, "cuda"))
