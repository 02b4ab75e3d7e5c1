"""The causal graph over events as a Mermaid flowchart."""

from __future__ import annotations

import re

import networkx as nx

from neuraldbg.wording import describe_event

# A colon only before a space: Mermaid takes `style a:#35;` for a colour and drops the semicolon.
_SAFE = re.compile(r"[A-Za-z0-9 .,_%()+-]|:(?= )")


def escape_label(text: str) -> str:
    """Text fit to stand between double quotes in Mermaid, whatever it holds.

    Every character that could mean something to Mermaid (quotes, brackets, backticks, `#`, line
    breaks, other scripts' letters not among them) becomes a numeric entity.

    Example:
        >>> escape_label('fc["1"]')
        'fc#91;#34;1#34;#93;'
    """
    return "".join(
        char
        if _SAFE.match(text, position) or (char.isalnum() and not char.isascii())
        else f"#{ord(char)};"
        for position, char in enumerate(text)
    )


def causal_graph_to_mermaid(graph: nx.DiGraph[int]) -> str:
    """A Mermaid flowchart of a causal graph; edges that others imply are left out.

    Args:
        graph: From `neuraldbg.causal_chain.build_causal_graph`.

    Returns:
        The flowchart's text, valid also for a graph without events.

    Example:
        >>> print(causal_graph_to_mermaid(nx.DiGraph()))
        flowchart TD
            none["no events"]
    """
    lines = ["flowchart TD"]
    if not len(graph):
        return "\n".join([*lines, '    none["no events"]'])
    for node, data in graph.nodes(data=True):
        lines.append(f'    event{node}["{escape_label(describe_event(data["event"]))}"]')
    for cause, effect in nx.transitive_reduction(graph).edges:
        lines.append(f"    event{cause} --> event{effect}")
    return "\n".join(lines)
