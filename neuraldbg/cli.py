"""The command line: `neuraldbg` and `python -m neuraldbg`."""

from __future__ import annotations

import json
import math
import warnings
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from neuraldbg import __version__
from neuraldbg.failure_modes import FailureMode

if TYPE_CHECKING:
    from neuraldbg.evaluation.demo import DemoRun
    from neuraldbg.stored_run import StoredRun

app = typer.Typer(
    help="Tells why a neural network failed to train.", no_args_is_help=True, add_completion=False
)


class DemoFault(StrEnum):
    """The faults the demo can show.

    Named here and not read from the evaluation package, so that `--help` does not import torch; a
    test holds the two together.
    """

    LR_BLOWUP = FailureMode.LR_BLOWUP.value
    LR_TOO_LOW = FailureMode.LR_TOO_LOW.value
    INIT_COLLAPSE = FailureMode.INIT_COLLAPSE.value
    INIT_BLOWUP = FailureMode.INIT_BLOWUP.value
    SYMMETRIC_INIT = FailureMode.SYMMETRIC_INIT.value
    DEAD_RELU = FailureMode.DEAD_RELU.value
    SATURATED_ACTIVATION = FailureMode.SATURATED_ACTIVATION.value
    VANISHING_DEPTH = FailureMode.VANISHING_DEPTH.value
    UNNORMALISED_INPUT = FailureMode.UNNORMALISED_INPUT.value
    NAN_INPUT = FailureMode.NAN_INPUT.value
    MISSING_ZERO_GRAD = FailureMode.MISSING_ZERO_GRAD.value
    PARAM_NOT_IN_OPTIMIZER = FailureMode.PARAM_NOT_IN_OPTIMIZER.value


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"neuraldbg {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Tells why a neural network failed to train."""


@app.command()
def demo(
    fault: Annotated[
        DemoFault, typer.Option(help="The fault to train with.")
    ] = DemoFault.LR_BLOWUP,
    seed: Annotated[int, typer.Option(help="Seed of weights and batches.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document instead of the report.")
    ] = False,
) -> None:
    """Train a small network on real digits twice, healthy and with a fault, and explain both."""
    console = Console(stderr=as_json)
    try:
        from neuraldbg.evaluation.demo import run_demo
    except ModuleNotFoundError as error:
        if error.name != "sklearn":
            raise
        console.print(
            "The demo trains on scikit-learn's digits: pip install 'neuraldbg\\[evaluation]'"
        )
        raise typer.Exit(2) from error
    mode = FailureMode(fault.value)
    runs = {}
    for title, faulty in (("healthy", False), (mode.value, True)):
        with console.status(f"training the {title} run"):
            runs[title] = run_demo(mode, faulty, seed)
        if not as_json:
            _print_run(console, title, runs[title])
    if as_json:
        document = {"seed": seed, "fault": mode.value, "runs": _as_documents(runs)}
        typer.echo(json.dumps(document, indent=1, allow_nan=True))


_FAILED = 1
_UNREADABLE = 2


@app.command()
def explain(
    run: Annotated[str, typer.Argument(help="The run's folder, or a URL that fsspec knows.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document instead of the report.")
    ] = False,
) -> None:
    """Explain a run that is kept on disk, whether it has ended or still goes on.

    Exit code 0: nothing is wrong. 1: a failure was found. 2: the run could not be read.
    """
    errors = Console(stderr=True)
    try:
        code = _explain(run, as_json, errors)
    except (OSError, ValueError, ImportError) as error:
        errors.print(str(error), markup=False, highlight=False)
        code = _UNREADABLE
    except Exception:  # noqa: BLE001 - Python's own exit code for it would read as a verdict
        errors.print_exception()
        code = _UNREADABLE
    raise typer.Exit(code)


def _explain(run: str, as_json: bool, errors: Console) -> int:
    from neuraldbg.stored_run import DamagedRunWarning, load

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DamagedRunWarning)
        stored = load(run)
    for problem in stored.problems:
        errors.print(f"warning: {problem}", markup=False, highlight=False)
    if not stored.steps:
        raise ValueError(f"{run} holds no steps yet (it is {stored.state}): nothing to explain")
    explanations = stored.explain_failure()
    failed = bool(explanations.root_causes())
    if as_json:
        document = _describe(stored) | {"failed": failed, "hypotheses": explanations.to_dicts()}
        typer.echo(json.dumps(_without_nan(document), indent=1, allow_nan=False))
    else:
        console = Console()
        console.print(_headline(stored), markup=False, highlight=False)
        console.print(explanations)
    return _FAILED if failed else 0


def _describe(stored: StoredRun) -> dict[str, Any]:
    return {
        "run": stored.url,
        "state": stored.state,
        "ranks": stored.ranks,
        "steps": stored.steps,
        "updated": stored.meta.get("updated"),
        "problems": list(stored.problems),
    }


def _headline(stored: StoredRun) -> str:
    ranks = f", {len(stored.ranks)} ranks" if len(stored.ranks) > 1 else ""
    steps = f"{stored.steps} step{'' if stored.steps == 1 else 's'}"
    told = {
        # Whether its process still lives cannot always be seen from here.
        "running": f"still running (or killed): {steps} so far",
        "broken off": f"broken off after {steps}: the process that wrote it has ended",
    }.get(stored.state, stored.state)
    return f"{stored.url}: {told}, last written {stored.meta.get('updated', '?')}{ranks}"


def _without_nan(value: Any) -> Any:
    """Plain values with None for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _print_run(console: Console, title: str, run: DemoRun) -> None:
    console.rule(f"run with {title}" if title != "healthy" else "healthy run", align="left")
    console.print(run.description)
    console.print(run.explanations)


def _as_documents(runs: dict[str, DemoRun]) -> list[dict[str, Any]]:
    return [
        {
            "run": title,
            "description": run.description,
            "steps": run.explanations.steps,
            "first_loss": run.losses[0],
            "last_loss": run.losses[-1],
            "hypotheses": run.explanations.to_dicts(),
        }
        for title, run in runs.items()
    ]
