"""A 16-bit Doge keeps the same keys as the float32 model, also on the GPU."""

import pytest
import torch

pytest.importorskip("transformers")

from doge_gradients import (  # noqa: E402
    LENGTH,
    assert_the_choice_is_that_of_float32,
    assert_the_error_of_delta_does_not_add_up,
    median_distances,
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_gradients_are_nearer_to_float32_than_eager(dtype):
    assert_the_choice_is_that_of_float32(median_distances(dtype, "cuda"))


@pytest.mark.parametrize("autocast", [False, True])
def test_gradient_of_A_without_selection_is_near_float32(autocast):
    distances = median_distances(torch.bfloat16, "cuda", autocast=autocast, window=LENGTH)
    assert_the_error_of_delta_does_not_add_up(distances)
