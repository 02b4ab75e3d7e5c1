"""Importing pgmpy: late, since it takes seconds, and without the warnings it gives of itself."""

from __future__ import annotations

import warnings
from functools import cache


@cache
def load_pgmpy() -> None:
    """Import the parts of pgmpy that the network needs; a second call costs nothing.

    pgmpy 1.1 warns about deprecated names of its own while it is being imported, and tqdm, which
    it brings along, about widgets in notebooks: nothing that a user of this package can act on.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pgmpy.factors.discrete
        import pgmpy.inference
        import pgmpy.models  # noqa: F401
