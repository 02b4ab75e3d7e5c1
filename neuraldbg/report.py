"""Explanations for a terminal (rich) and as plain text."""

from __future__ import annotations

import io
from collections.abc import Iterator

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from neuraldbg.explanations import Explanations
from neuraldbg.failure_modes import FailureMode, catalogue
from neuraldbg.hypotheses import CausalHypothesis
from neuraldbg.wording import describe_event

_SHOWN = 5
_SHOWN_FROM = 0.01
"""At most so many hypotheses are in the table, from this probability on; the rest is a sentence."""
_DETAILED = 0.2
"""Probability from which a hypothesis other than the first gets its own details."""
_LINES = 6
"""Events or findings listed under one heading."""


def render_explanations(explanations: Explanations) -> Iterator[RenderableType]:
    """The parts of the report: a table of hypotheses, then the details of the likely ones."""
    yield _table(explanations)
    for position, hypothesis in enumerate(explanations):
        likely = position == 0 or (
            hypothesis.probability >= _DETAILED and hypothesis.cause.is_root_cause
        )
        if likely and hypothesis.cause is not FailureMode.HEALTHY:
            yield _details(hypothesis)


def to_text(explanations: Explanations, width: int = 100) -> str:
    """The same report as plain text of a given width in characters."""
    out = io.StringIO()
    console = Console(
        file=out, width=width, color_system=None, force_terminal=False, force_jupyter=False
    )
    console.print(Group(*render_explanations(explanations)))
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())


def _table(explanations: Explanations) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=_headline(explanations), title_justify="left")
    table.add_column("cause", no_wrap=True)
    table.add_column("probability", justify="right", no_wrap=True)
    table.add_column("layer", overflow="ellipsis", max_width=28)
    table.add_column("step", justify="right")
    table.add_column("what to change", ratio=1)
    shown = [h for h in explanations if h.probability >= _SHOWN_FROM][:_SHOWN]
    for hypothesis in shown:
        table.add_row(
            hypothesis.cause.value,
            f"{hypothesis.probability:.0%}",
            Text(hypothesis.layer or "-"),
            "-" if hypothesis.step is None else str(hypothesis.step),
            Text(hypothesis.remedy),
        )
    rest = explanations[len(shown) :]
    if rest:
        most = max(hypothesis.probability for hypothesis in rest)
        table.caption = f"{len(rest)} more hypotheses at {most:.1%} or less each"
        table.caption_justify = "left"
    return table


def _headline(explanations: Explanations) -> str:
    if not len(explanations):
        return "nothing to explain"
    first = explanations[0]
    title = catalogue()[first.cause].title
    return f"{title} (probability {first.probability:.0%}, after {explanations.steps} steps)"


def _details(hypothesis: CausalHypothesis) -> Group:
    parts: list[RenderableType] = [
        Text.assemble((hypothesis.cause.value, "bold"), f" at {hypothesis.probability:.0%}")
    ]
    sections = (
        ("chain of events", [describe_event(event) for event in hypothesis.chain]),
        ("for", [finding.wording for finding in hypothesis.findings]),
        ("against", [finding.wording for finding in hypothesis.against]),
    )
    for heading, lines in sections:
        if lines:
            parts.append(Text(f"  {heading}:"))
            parts.extend(Text(f"    {line}") for line in lines[:_LINES])
            if len(lines) > _LINES:
                parts.append(Text(f"    and {len(lines) - _LINES} more"))
    parts.append(Text(""))
    return Group(*parts)
