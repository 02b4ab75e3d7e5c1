"""The catalogue of failure modes, and the enum that mirrors it."""

import csv
from pathlib import Path

import pytest

from neuraldbg import FailureMode
from neuraldbg.failure_modes import catalogue

TABLE = Path(__file__).parents[1] / "neuraldbg" / "failure_modes.csv"
with TABLE.open(encoding="utf-8", newline="") as file:
    ROWS = {row["id"]: row for row in csv.DictReader(file)}
VERDICTS = ["healthy", "unknown"]
WORDS = {"converged run", "bad batch", "rank-local data"}


def test_the_enum_is_the_rows_of_the_table_and_the_two_verdicts() -> None:
    assert [mode.value for mode in FailureMode] == [*ROWS, *VERDICTS]
    assert list(catalogue()) == list(FailureMode)


def test_no_mode_stands_in_the_table_twice() -> None:
    lines = TABLE.read_text(encoding="utf-8").splitlines()[1:]
    assert len(lines) == len(ROWS)


def test_only_the_verdicts_are_no_root_causes() -> None:
    assert [mode.value for mode in FailureMode if not mode.is_root_cause] == VERDICTS


@pytest.mark.parametrize("mode", FailureMode)
def test_every_mode_says_what_it_is_and_what_to_do(mode: FailureMode) -> None:
    facts = catalogue()[mode]
    assert facts.mode is mode
    for text in (facts.title, facts.group, facts.primary_sign, facts.separated_by, facts.remedy):
        assert text == text.strip() != ""


def test_titles_tell_modes_apart() -> None:
    titles = [facts.title for facts in catalogue().values()]
    assert len(set(titles)) == len(titles)


@pytest.mark.parametrize("name", ROWS)
def test_look_alikes_are_other_modes_or_known_words(name: str) -> None:
    look_alikes = catalogue()[FailureMode(name)].look_alikes
    assert len(look_alikes) == ROWS[name]["look_alikes"].count(";") + 1
    assert FailureMode(name) not in look_alikes
    # A misspelt mode would pass as words.
    assert {like for like in look_alikes if not isinstance(like, FailureMode)} <= WORDS


def test_the_catalogue_cannot_be_changed_by_a_reader() -> None:
    with pytest.raises(TypeError):
        catalogue()[FailureMode.HEALTHY] = None  # type: ignore[index]
