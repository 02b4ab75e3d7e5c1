"""The causal graph is valid Mermaid whatever the layers are called: the real parser says so."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import networkx as nx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neuraldbg import EventType, SemanticEvent
from neuraldbg.causal_chain import build_causal_graph
from neuraldbg.mermaid import causal_graph_to_mermaid, escape_label

HOME = Path(__file__).parent / "mermaid"

ODD_NAMES = [
    'fc["1"]', "end", "subgraph", "a --> b", "x; y", "%% comment", "#quot;", "`code`",
    "**bold**", "<b>html</b>", "<script>alert(1)</script>", "line\nbreak", "tab\there",
    "back\\slash", "&amp;", "(round)", "{curly}", "[[square]]", "|pipe|", "'single'", '"',
    "click event0 href", "style x", "gr\xf6\xdfe", "\u0441\u043b\u043e\u0439", "\u5c64",
    "\U0001f525", "a" * 500, " ", "graph TD", "@{ shape: x }", "$$x^2$$", "~", "\x00", "\u202e",
    ":::class", 'style:["', "classDef a:[b", "<br/>", "href=`javascript:x`", "---",
    "%%{init: {}}%%",
]  # fmt: skip


@pytest.fixture(scope="session")
def parse() -> Callable[[list[str]], list[str | None]]:
    """The real parser: for each diagram None, or what is wrong with it."""
    if shutil.which("npm") is None:
        if os.environ.get("CI"):
            pytest.fail("the Mermaid parser needs Node.js and npm on the CI machine")
        pytest.skip("the Mermaid parser needs Node.js and npm")
    if not (HOME / "node_modules" / "mermaid").exists():
        subprocess.run(["npm", "ci", "--no-audit", "--no-fund"], cwd=HOME, check=True)

    def run(diagrams: list[str]) -> list[str | None]:
        done = subprocess.run(
            ["node", "parse.mjs"],
            cwd=HOME,
            input=json.dumps(diagrams),
            capture_output=True,
            text=True,
            check=True,
        )
        return json.loads(done.stdout)

    return run


def graph_of(*names: str | None) -> nx.DiGraph:
    """A graph in which every kind of event happens to every name, one after another."""
    events = [
        SemanticEvent(number, kind, name, number, number, number + 9, "a", "b", 1.0, 0.5, 0.1)
        for number, (kind, name) in enumerate((kind, name) for name in names for kind in EventType)
    ]
    return build_causal_graph(events)


def test_the_parser_refuses_what_is_no_mermaid(parse) -> None:
    valid, broken = parse(['flowchart TD\n    a["b"]', "flowchart TD\n    a[[["])
    assert valid is None
    assert broken


def test_layers_of_any_name_give_valid_mermaid(parse) -> None:
    diagrams = [causal_graph_to_mermaid(graph_of(name)) for name in [*ODD_NAMES, None]]
    verdicts = dict(zip([*ODD_NAMES, None], parse(diagrams), strict=True))
    assert {name: verdict for name, verdict in verdicts.items() if verdict} == {}


def test_random_names_give_valid_mermaid(parse) -> None:
    names: list[str] = []

    @settings(max_examples=150, database=None, suppress_health_check=list(HealthCheck))
    @given(st.text(max_size=30))
    def collect(name: str) -> None:
        names.append(name)

    collect()
    verdicts = parse([causal_graph_to_mermaid(graph_of(name)) for name in names])
    assert [name for name, verdict in zip(names, verdicts, strict=True) if verdict] == []


def test_a_graph_without_events_is_valid(parse) -> None:
    assert parse([causal_graph_to_mermaid(nx.DiGraph())]) == [None]


def test_every_event_is_a_node_and_implied_edges_are_left_out() -> None:
    graph = graph_of("fc")
    lines = causal_graph_to_mermaid(graph).splitlines()
    assert lines[0] == "flowchart TD"
    assert sum("[" in line for line in lines) == len(graph)
    edges = {tuple(line.strip().split(" --> ")) for line in lines if " --> " in line}
    drawn = nx.DiGraph((int(a[5:]), int(b[5:])) for a, b in edges)
    assert nx.transitive_closure(drawn).edges == nx.transitive_closure(graph).edges


@given(st.text())
def test_escaped_labels_hold_no_character_that_mermaid_reads(text: str) -> None:
    assert not set(escape_label(text)) & set('"[]{}<>|`\n\\*~$@')


@given(st.text(st.sampled_from("ab: #;[")))
def test_no_entity_is_taken_for_the_colour_of_a_style(text: str) -> None:
    # Mermaid strips the last semicolon of what this matches before it reads entities.
    assert re.search(r"(style|classDef).*:\S*#.*;", "style " + escape_label(text)) is None
