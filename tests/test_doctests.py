"""The examples in the docstrings are true.

Pytest's own `--doctest-modules` would import `models/` and its like by their folders' names.
"""

import doctest
from importlib import import_module

import pytest
from source_tree import find_modules


@pytest.mark.parametrize("name", find_modules())
def test_examples_of(name: str) -> None:
    assert doctest.testmod(import_module(name)).failed == 0


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    assert any(
        test.examples for name in find_modules() for test in finder.find(import_module(name))
    )
