"""Exact posteriors by passing messages between causes and mechanisms: the fast route.

A noisy-OR mechanism with observed signs is, over its causes, a sum of two products,

    P(signs | causes) = L_present + (L_absent - L_present) (1 - leak) product of (1 - strength)

where the last product runs over the causes that are present, so that a binary "switch" between
the two terms leaves only factors over one cause and one switch (Heckerman 1989, "A tractable
inference algorithm for diagnosing multiple diseases"; Diez and Galan 2003 for the general form).
Variables are then eliminated one by one, and messages are sent back the other way for the
probabilities of all causes at once (Dechter 1999, "Bucket elimination").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from neuraldbg.models.enumeration import sign_likelihoods
from neuraldbg.models.posterior import Posterior
from neuraldbg.models.specification import Mechanism, Specification

_FEW_CAUSES = 3
"""Causes up to which a mechanism is written out as one table instead of with a switch."""

Scope = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Factor:
    """A table over some binary variables, one axis each."""

    scope: Scope
    table: np.ndarray


def pass_messages(specification: Specification, evidence: Mapping[str, str]) -> Posterior:
    """The posterior of all causes.

    Args:
        specification: The network.
        evidence: Observation to state.

    Example:
        >>> from neuraldbg.models.specification import default_specification
        >>> posterior = pass_messages(default_specification(), {"gradient_reset": "kept"})
        >>> posterior.ranked()[0][0].value
        'missing_zero_grad'
    """
    causes = [cause.mode for cause in specification.causes]
    number = {mode: position for position, mode in enumerate(causes)}
    factors = [
        Factor((position,), np.array([1.0 - cause.prior, cause.prior]))
        for position, cause in enumerate(specification.causes)
    ]
    none_present = float(np.prod([1.0 - cause.prior for cause in specification.causes]))
    variables = len(causes)
    for mechanism in specification.mechanisms:
        absent, present = sign_likelihoods(specification, mechanism, evidence)
        if absent == present or not mechanism.strengths:
            continue  # it says nothing of any cause
        none_present *= (1.0 - mechanism.leak) * absent + mechanism.leak * present
        scope = tuple(number[mode] for mode in mechanism.strengths)
        if len(scope) <= _FEW_CAUSES:
            factors.append(Factor(scope, _written_out(mechanism, absent, present)))
        else:
            factors.extend(_switched(mechanism, scope, variables, absent, present))
            variables += 1
    marginals, total = marginalise(variables, factors)
    found = {mode: float(marginals[position]) for mode, position in number.items()}
    return Posterior(found, none_present / total, dict(evidence))


def _written_out(mechanism: Mechanism, absent: float, present: float) -> np.ndarray:
    missing = np.array(1.0 - mechanism.leak)
    for strength in mechanism.strengths.values():
        missing = np.multiply.outer(missing, np.array([1.0, 1.0 - strength]))
    return missing * absent + (1.0 - missing) * present


def _switched(
    mechanism: Mechanism, scope: Scope, switch: int, absent: float, present: float
) -> list[Factor]:
    terms = np.array([present, (absent - present) * (1.0 - mechanism.leak)])
    return [Factor((switch,), terms)] + [
        Factor((switch, cause), np.array([[1.0, 1.0], [1.0, 1.0 - strength]]))
        for cause, strength in zip(scope, mechanism.strengths.values(), strict=True)
    ]


@dataclass(slots=True)
class _Bucket:
    """The factors that meet when a variable is eliminated."""

    variable: int
    scope: Scope
    own: list[Factor]
    children: list[tuple[_Bucket, Factor]] = field(default_factory=list)
    above: Factor | None = None

    def product(self, onto: Scope, without: _Bucket | None = None) -> Factor:
        """The product of all that meets here, summed down to some of its variables."""
        factors = self.own + [message for child, message in self.children if child is not without]
        if self.above is not None:
            factors = [*factors, self.above]
        return Factor(onto, _contract(factors, onto))


def marginalise(variables: int, factors: Sequence[Factor]) -> tuple[np.ndarray, float]:
    """P(variable = 1) of every variable under a product of factors, and the sum of the product.

    Args:
        variables: How many there are.
        factors: Tables over them; each variable has one of its own among them.

    Example:
        >>> even = [Factor((v,), np.ones(2)) for v in (0, 1)]
        >>> pair = Factor((0, 1), np.array([[0.4, 0.1], [0.2, 0.3]]))
        >>> marginals, total = marginalise(2, [*even, pair])
        >>> marginals.round(3).tolist(), round(total, 3)
        ([0.5, 0.4], 1.0)
    """
    order = elimination_order(variables, tuple(factor.scope for factor in factors))
    rank = {variable: position for position, variable in enumerate(order)}
    waiting: list[list[Factor]] = [[] for _ in order]
    for factor in factors:
        waiting[min(rank[v] for v in factor.scope)].append(factor)
    buckets: list[_Bucket] = []
    arriving: list[list[tuple[_Bucket, Factor]]] = [[] for _ in order]
    total = 1.0
    for position, variable in enumerate(order):
        meeting = [*waiting[position], *(message for _, message in arriving[position])]
        scope = tuple(sorted({v for factor in meeting for v in factor.scope}, key=rank.__getitem__))
        bucket = _Bucket(variable, scope, waiting[position], arriving[position])
        buckets.append(bucket)
        message = bucket.product(scope[1:])
        if message.scope:
            arriving[rank[message.scope[0]]].append((bucket, message))
        else:
            total *= float(message.table)
    marginals = np.empty(variables)
    for bucket in reversed(buckets):
        table = bucket.product((bucket.variable,)).table
        marginals[bucket.variable] = table[1] / table.sum()
        for child, message in bucket.children:
            child.above = bucket.product(message.scope, without=child)
    return marginals, total


@cache
def elimination_order(variables: int, scopes: tuple[Scope, ...]) -> tuple[int, ...]:
    """An order of elimination that keeps tables small: fewest neighbours first.

    Args:
        variables: How many there are.
        scopes: Variables that stand in one table.

    Example:
        >>> elimination_order(4, ((0, 1), (0, 2), (0, 3)))
        (1, 2, 0, 3)
    """
    neighbours: dict[int, set[int]] = {v: set() for v in range(variables)}
    for scope in scopes:
        for v in scope:
            neighbours[v].update(other for other in scope if other != v)
    order = []
    while neighbours:
        chosen = min(neighbours, key=lambda v: (len(neighbours[v]), v))
        around = neighbours.pop(chosen)
        for v in around:
            neighbours[v] |= around - {v}
            neighbours[v].discard(chosen)
        order.append(chosen)
    return tuple(order)


def _contract(factors: Sequence[Factor], onto: Scope) -> np.ndarray:
    """The product of some factors, summed over all variables but some."""
    local: dict[int, int] = {}
    operands: list[Any] = []
    for factor in factors:
        operands += [factor.table, [local.setdefault(v, len(local)) for v in factor.scope]]
    result: np.ndarray = np.einsum(*operands, [local[v] for v in onto])
    return result
