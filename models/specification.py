"""What the network is made of, as plain records: causes, mechanisms, observations.

The shipped structure stands in three tables beside this file, one for each layer of the network.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

from neuraldbg.events import EventType
from neuraldbg.failure_modes import FailureMode
from neuraldbg.series import FLAGS, STATISTICS, Kind

_TOLERANCE = 1e-9


class NetworkFormatError(ValueError):
    """A table or file does not describe a valid network; the message says what and where."""


@dataclass(frozen=True, slots=True)
class Cause:
    """A root node: a failure mode (or ``unknown``) with its prior probability."""

    mode: FailureMode
    prior: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Mechanism:
    """A hidden node: what causes bring about, combined by a leaky noisy-OR (Pearl 1988, 4.3.2).

    Attributes:
        name: Its name.
        leak: Probability that it is present though none of its causes is.
        strengths: For each cause the probability that this cause alone brings it about.
        reasons: Why, by cause; the empty string stands for the leak.
    """

    name: str
    leak: float
    strengths: Mapping[FailureMode, float]
    reasons: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class State:
    """One state of an observation, the events that show it, and how probable it is.

    Attributes:
        name: Its name.
        event_types: Events any of which shows it; empty for the state that holds otherwise.
        to_state: State that the event must lead to, or any where empty.
        onset: ``start`` for events of step 0, ``later`` for others, or empty for both.
        share: Share of the observed layers that must show such an event; 0 for a single one.
        p_present: Probability of the state when the mechanism is present.
        p_absent: The same when it is absent.
        wording: The state in words.
        reason: Why these probabilities.
    """

    name: str
    event_types: tuple[EventType, ...]
    to_state: str
    onset: str
    share: float
    p_present: float
    p_absent: float
    wording: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Observation:
    """An observed node: states of which exactly one holds, given one mechanism.

    Attributes:
        name: Its name.
        mechanism: The mechanism it is a sign of.
        states: The first is the state that holds when none of the others' events is there; of
            several whose events are there, the last counts.
        kind: Rows of the series without which it cannot be observed.
        column: Column of those rows that must hold a number.
        frames: At how many steps.
    """

    name: str
    mechanism: str
    states: tuple[State, ...]
    kind: Kind
    column: str
    frames: int

    def state(self, name: str) -> State:
        """The state of a name.

        Raises:
            KeyError: there is no such state; the message lists those that exist.
        """
        for state in self.states:
            if state.name == name:
                return state
        choices = ", ".join(state.name for state in self.states)
        raise KeyError(f"observation {self.name} has no state {name!r}; its states are {choices}")


@dataclass(frozen=True)
class Specification:
    """A whole network as records.

    Raises:
        NetworkFormatError: a probability is out of range, the states of an observation do not sum
            to 1, or a name is used twice or refers to nothing.
    """

    causes: tuple[Cause, ...]
    mechanisms: tuple[Mechanism, ...]
    observations: tuple[Observation, ...]

    def __post_init__(self) -> None:
        modes = {cause.mode for cause in self.causes}
        names = {mechanism.name for mechanism in self.mechanisms}
        everything = [cause.mode.value for cause in self.causes]
        everything += [mechanism.name for mechanism in self.mechanisms]
        everything += [observation.name for observation in self.observations]
        for name in everything:
            if everything.count(name) > 1:
                raise NetworkFormatError(f"{name!r} names two nodes; each needs its own name")
        if FailureMode.HEALTHY in modes:
            raise NetworkFormatError("healthy is the absence of all causes, not a cause of its own")
        for cause in self.causes:
            _check_probability(cause.prior, f"prior of {cause.mode.value}", strict=True)
        for mechanism in self.mechanisms:
            _check_mechanism(mechanism, modes)
        for observation in self.observations:
            _check_observation(observation, names)

    def mechanism(self, name: str) -> Mechanism:
        """The mechanism of a name."""
        return self._mechanisms_by_name[name]

    @property
    def _mechanisms_by_name(self) -> dict[str, Mechanism]:
        return {mechanism.name: mechanism for mechanism in self.mechanisms}

    def observation(self, name: str) -> Observation:
        """The observation of a name.

        Raises:
            KeyError: there is none; the message lists those that exist.
        """
        for observation in self.observations:
            if observation.name == name:
                return observation
        choices = ", ".join(observation.name for observation in self.observations)
        raise KeyError(f"no observation {name!r}; the network observes {choices}")


def _check_probability(value: float, what: str, strict: bool = False) -> None:
    inside = 0.0 < value < 1.0 if strict else 0.0 <= value <= 1.0
    if not inside:
        limits = "between 0 and 1, both excluded" if strict else "from 0 to 1"
        raise NetworkFormatError(f"{what} is {value}; it must be {limits}")


def _check_mechanism(mechanism: Mechanism, modes: set[FailureMode]) -> None:
    _check_probability(mechanism.leak, f"leak of {mechanism.name}", strict=True)
    for mode, strength in mechanism.strengths.items():
        _check_probability(strength, f"strength of {mode.value} in {mechanism.name}")
        if mode not in modes:
            raise NetworkFormatError(
                f"mechanism {mechanism.name} has the cause {mode.value}, which has no prior"
            )


def _check_observation(observation: Observation, mechanisms: set[str]) -> None:
    name = observation.name
    if observation.mechanism not in mechanisms:
        raise NetworkFormatError(f"observation {name}: no mechanism {observation.mechanism!r}")
    if len(observation.states) < 2:
        raise NetworkFormatError(f"observation {name} needs at least two states")
    if observation.states[0].event_types:
        raise NetworkFormatError(f"observation {name}: its first state must need no event")
    if observation.column not in (*STATISTICS, *FLAGS):
        raise NetworkFormatError(f"observation {name}: the series has no column "
                                 f"{observation.column!r}")  # fmt: skip
    for which in ("p_present", "p_absent"):
        values = [getattr(state, which) for state in observation.states]
        for value in values:
            _check_probability(value, f"{which} of {name}")
        if abs(sum(values) - 1.0) > _TOLERANCE:
            raise NetworkFormatError(f"{which} of {name} sums to {sum(values):.12g}, not to 1")


@cache
def default_specification() -> Specification:
    """The shipped network, read from the package's tables.

    Example:
        >>> specification = default_specification()
        >>> len(specification.causes), specification.observation("loss_values").mechanism
        (39, 'numeric_failure')
    """
    return Specification(
        causes=tuple(
            Cause(FailureMode(row["cause"]), float(row["prior"]), row["reason"])
            for row in _table("causes")
        ),
        mechanisms=_mechanisms(_table("mechanisms")),
        observations=_observations(_table("observations")),
    )


def _table(name: str) -> list[dict[str, str]]:
    text = resources.files(__package__).joinpath(f"tables/{name}.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def _mechanisms(rows: Sequence[Mapping[str, str]]) -> tuple[Mechanism, ...]:
    return tuple(
        Mechanism(
            name=name,
            leak=next(float(row["strength"]) for row in group if not row["cause"]),
            strengths={
                FailureMode(row["cause"]): float(row["strength"]) for row in group if row["cause"]
            },
            reasons={row["cause"]: row["reason"] for row in group},
        )
        for name, group in _grouped(rows, "mechanism")
    )


def _observations(rows: Sequence[Mapping[str, str]]) -> tuple[Observation, ...]:
    return tuple(
        Observation(
            name=name,
            mechanism=group[0]["mechanism"],
            states=tuple(_state(row) for row in group),
            kind=Kind(group[0]["kind"]),
            column=group[0]["column"],
            frames=int(group[0]["frames"]),
        )
        for name, group in _grouped(rows, "observation")
    )


def _state(row: Mapping[str, str]) -> State:
    return State(
        name=row["state"],
        event_types=tuple(EventType(name) for name in row["event_types"].split()),
        to_state=row["to_state"],
        onset=row["onset"],
        share=float(row["share"] or 0.0),
        p_present=float(row["p_present"]),
        p_absent=float(row["p_absent"]),
        wording=row["wording"],
        reason=row["reason"],
    )


def _grouped(
    rows: Iterable[Mapping[str, str]], key: str
) -> Iterable[tuple[str, list[Mapping[str, str]]]]:
    groups: dict[str, list[Mapping[str, str]]] = {}
    for row in rows:
        groups.setdefault(row[key], []).append(row)
    return groups.items()
