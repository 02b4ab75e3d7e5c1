"""Several findings about a loss in the one text column of its row, and back."""

from __future__ import annotations

from collections.abc import Mapping

BROADCAST = "broadcast"
DOMAIN = "domain"
AXIS = "axis"
UNDEFINED = "undefined"


def join_findings(findings: Mapping[str, str]) -> str | None:
    """The text of a row, None where there is nothing to say.

    >>> join_findings({"domain": "softmax twice", "axis": "softmax over axis 0"})
    'domain: softmax twice | axis: softmax over axis 0'
    """
    return " | ".join(f"{name}: {text}" for name, text in findings.items()) or None


def finding(detail: str | None, name: str) -> str | None:
    """What the text of a row says under a name, None where it says nothing.

    >>> finding("domain: softmax twice | axis: softmax over axis 0", "axis")
    'softmax over axis 0'
    """
    for part in (detail or "").split(" | "):
        if part.startswith(f"{name}: "):
            return part[len(name) + 2 :]
    return None
