"""The sequence of ranked hypotheses that `explain_failure` returns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, overload

from neuraldbg.failure_modes import FailureMode
from neuraldbg.hypotheses import CausalHypothesis, RootCause

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

BETTER_THAN_EVEN = 0.5
"""Probability from which a cause counts as found."""


class Explanations(Sequence[CausalHypothesis]):
    """Ranked hypotheses about one run, most probable first; printing them gives a table.

    Args:
        hypotheses: In descending order of probability.
        steps: Steps the run had when it was explained.

    Example:
        >>> from neuraldbg.failure_modes import FailureMode
        >>> sure = CausalHypothesis(FailureMode.HEALTHY, 0.97, None, None, (), (), (), "")
        >>> explanations = Explanations([sure], steps=10)
        >>> explanations[0].cause.value, len(explanations), explanations.root_causes()
        ('healthy', 1, [])
    """

    def __init__(self, hypotheses: Sequence[CausalHypothesis], steps: int) -> None:
        self._hypotheses = tuple(hypotheses)
        self.steps = steps

    @overload
    def __getitem__(self, index: int) -> CausalHypothesis: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[CausalHypothesis]: ...
    def __getitem__(self, index: int | slice) -> CausalHypothesis | Sequence[CausalHypothesis]:
        return self._hypotheses[index]

    def __len__(self) -> int:
        return len(self._hypotheses)

    def __iter__(self) -> Iterator[CausalHypothesis]:
        return iter(self._hypotheses)

    def of(self, cause: FailureMode | str) -> CausalHypothesis:
        """The hypothesis of a cause.

        Raises:
            KeyError: no hypothesis is about it; the message lists the causes there are.
        """
        for hypothesis in self._hypotheses:
            if hypothesis.cause == cause:
                return hypothesis
        causes = ", ".join(hypothesis.cause.value for hypothesis in self._hypotheses)
        raise KeyError(f"no hypothesis about {str(cause)!r}; there are {causes}")

    def root_causes(self) -> list[RootCause]:
        """Failure modes found: the first hypothesis, and all others at better than even odds.

        Empty for a healthy run; ``unknown`` counts when it comes first.
        """
        return [
            RootCause(h.cause, h.probability, h.layer, h.step)
            for position, h in enumerate(self._hypotheses)
            if h.cause is not FailureMode.HEALTHY
            and self._hypotheses[0].cause is not FailureMode.HEALTHY
            and (position == 0 or h.probability >= BETTER_THAN_EVEN)
        ]

    def to_dicts(self) -> list[dict[str, Any]]:
        """Plain values, fit for JSON."""
        return [asdict(hypothesis) for hypothesis in self._hypotheses]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from neuraldbg.report import render_explanations

        yield from render_explanations(self)

    def __str__(self) -> str:
        from neuraldbg.report import to_text

        return to_text(self)

    __repr__ = __str__
