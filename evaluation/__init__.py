"""Programs with a known cause of failure, on which every claim about the diagnosis rests.

>>> from neuraldbg.evaluation import HEALTHY_RECIPES, build, train
>>> losses = train(build(HEALTHY_RECIPES["mlp-digits-sgd"], seed=0))
>>> losses[-1] < 0.5 * losses[0]
True
"""

if __name__ == "evaluation":
    raise ImportError(
        "import neuraldbg.evaluation, not evaluation: this folder is installed under that name, "
        "and a second import would give a second copy of every class"
    )

from .architectures import (
    ACTIVATIONS,
    ARCHITECTURES,
    Architecture,
    DataShape,
    build_architecture,
    find_architecture,
)
from .datasets import DATASETS, Dataset, load_dataset
from .demo import demo_recipe
from .faults import FAULTS, Fault, find_fault
from .healthy_recipes import HEALTHY_RECIPES
from .program import Program, build
from .recipe import LoopHabits, Recipe
from .training_loop import train
from .twins import TwinComparison, compare_with_twin

__all__ = [
    "ACTIVATIONS",
    "ARCHITECTURES",
    "DATASETS",
    "FAULTS",
    "HEALTHY_RECIPES",
    "Architecture",
    "DataShape",
    "Dataset",
    "Fault",
    "LoopHabits",
    "Program",
    "Recipe",
    "TwinComparison",
    "build",
    "build_architecture",
    "compare_with_twin",
    "demo_recipe",
    "find_architecture",
    "find_fault",
    "load_dataset",
    "train",
]
