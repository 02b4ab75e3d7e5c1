"""Programs that learn well and do not look it: where false alarms come from."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .recipe import Recipe

HARD_RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "noisy-small-batches": Recipe("mlp", "digits", "sgd", 0.02, batch_size=4, steps=250),
        "large-learning-rate": Recipe("cnn_batchnorm", "digits_images", "sgd", 0.5, steps=150),
        "clipping-that-bites": Recipe("mlp", "digits", "momentum", 0.03, steps=150, clip_norm=0.5),
    }
)
"""Healthy recipes by what is odd about them."""
