"""Programs that learn well: the ground that faults are put on, and the check on false alarms."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .recipe import Recipe

_RECIPES = (
    Recipe("mlp", "digits", "sgd", 0.1, steps=150),
    Recipe("mlp", "digits", "momentum", 0.02, steps=120, activation="tanh"),
    Recipe("mlp", "breast_cancer", "adam", 3e-3, steps=100),
    Recipe("mlp", "wine", "sgd", 0.1, steps=120, activation="gelu"),
    Recipe("mlp", "diabetes", "adam", 3e-3, steps=150),
    Recipe("mlp", "surface", "momentum", 0.02, steps=200, activation="tanh"),
    Recipe("mlp", "spirals", "adam", 1e-2, batch_size=64, steps=200),
    Recipe("mlp", "digits", "adam", 1e-2, steps=200, activation="sigmoid"),
    Recipe("residual_mlp", "digits", "adamw", 2e-3, steps=120),
    Recipe("residual_mlp", "surface", "sgd", 0.02, steps=200, activation="gelu"),
    Recipe("deep_mlp", "digits", "adam", 1e-3, steps=200),
    Recipe("deep_mlp", "breast_cancer", "momentum", 0.01, steps=120, activation="tanh"),
    Recipe("cnn", "digits_images", "momentum", 0.05, steps=200),
    Recipe("cnn", "textures", "adam", 3e-3, steps=120),
    Recipe("cnn", "textures", "rmsprop", 1e-3, steps=150, activation="tanh"),
    Recipe("cnn_batchnorm", "digits_images", "sgd", 0.1, steps=150),
    Recipe("cnn_batchnorm", "textures", "adamw", 3e-3, steps=100),
    Recipe("deep_cnn", "textures", "adam", 2e-3, steps=200),
    Recipe("deep_cnn", "digits_images", "momentum", 0.02, steps=250, activation="tanh"),
    Recipe("rnn", "digits_rows", "adam", 3e-3, steps=200),
    Recipe("rnn", "gestures", "rmsprop", 2e-3, steps=250),
    Recipe("lstm", "digits_rows", "adam", 1e-2, steps=200),
    Recipe("lstm", "gestures", "adam", 5e-3, steps=250),
    Recipe("lstm", "tokens", "rmsprop", 3e-3, steps=200),
    Recipe("gru", "tones", "adam", 3e-3, steps=300),
    Recipe("gru", "gestures", "adamw", 1e-2, steps=200),
    Recipe("gru", "tokens", "adam", 1e-2, steps=200),
    Recipe("transformer", "tokens", "adamw", 3e-3, steps=200),
    Recipe("transformer", "digits_rows", "adam", 3e-3, steps=200, activation="relu"),
)

HEALTHY_RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "-".join(
            (
                recipe.architecture,
                *((recipe.activation,) if recipe.activation else ()),
                recipe.dataset,
                recipe.optimizer,
            )
        ): recipe
        for recipe in _RECIPES
    }
)
"""Healthy recipes by name: architecture, activation where it is not the usual one, data and
optimizer. Each learns within its steps: the loss falls by more than half."""
