"""`NeuralDbg`: the face that a training loop is wrapped in."""

from __future__ import annotations

import os
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Self

import pandas as pd

from neuraldbg.capture import Budget, Cost, Recorder, Schedule
from neuraldbg.diagnosis import Diagnosable
from neuraldbg.thresholds import Thresholds

if TYPE_CHECKING:
    from torch import nn

    from neuraldbg.capture.run_stream import RunStream
    from neuraldbg.models import FailureNetwork


class NeuralDbg(Diagnosable):
    """Watches a training loop and explains why it failed.

    Wrap an ordinary loop and ask afterwards (or at any time inside). The loop itself stays as it
    is: steps, loss, learning rate and optimizers are found by the capture. Nothing raises inside
    the loop, and the training's numbers are not touched.

    Args:
        models: One or several modules, or one tuple or list of them.
        thresholds: Limits at which statistics become events.
        overhead: Share of the bare step time that capture may take; it looks as often as that
            allows.
        schedule: Which steps are captured instead, whatever that costs.
        network: The Bayesian network to reason with; the shipped one if left out.
        run: Folder to keep the run in while it goes on, for `neuraldbg.load`: a path, or a URL
            that fsspec knows, such as ``s3://bucket/runs/today``. It is opened when the ``with``
            begins; from then on nothing that goes wrong with it reaches the loop.
        overwrite: Replace a run that the folder holds already.

    Raises:
        TypeError: no module was given, or something that is none.
        ValueError: the overhead is not above 0.
        OSError: when the ``with`` begins, the folder is in use (`RunInUseError`), holds a run
            (`RunExistsError`), or cannot be written to.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with NeuralDbg(model) as dbg:
        ...     for _ in range(60):
        ...         x = torch.randn(16, 3)
        ...         optimizer.zero_grad()
        ...         torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        ...         optimizer.step()
        >>> dbg.explain_failure()[0].cause.value
        'healthy'
    """

    def __init__(
        self,
        *models: nn.Module | Iterable[nn.Module],
        thresholds: Thresholds | None = None,
        overhead: float = 0.02,
        schedule: Schedule | None = None,
        network: FailureNetwork | None = None,
        run: str | os.PathLike[str] | None = None,
        overwrite: bool = False,
    ) -> None:
        self.thresholds = thresholds or Thresholds()
        self._recorder = Recorder(
            _modules(models), self.thresholds, schedule or Budget(overhead=overhead)
        )
        self._network = network
        self._events: tuple[int, pd.DataFrame] | None = None
        self._series: tuple[int, pd.DataFrame] | None = None
        self._run = run
        self._overwrite = overwrite
        self._stream: RunStream | None = None

    def __enter__(self) -> Self:
        if self._run is not None:
            # Only a run that is kept needs Arrow and fsspec.
            from neuraldbg.capture.run_stream import RunStream

            if self._stream is None:
                self._stream = RunStream(self._recorder, self._run, self._overwrite)
            self._stream.open()
        try:
            self._recorder.attach()
        except BaseException as error:
            if self._stream is not None:
                self._stream.close(error)
            raise
        if self._stream is not None:
            self._stream.follow()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._recorder.detach()
        if self._stream is not None:
            self._stream.close(error)
        self._recorder.stop_clock()

    def record(self, **metrics: object) -> None:
        """Keep numbers that only the training script knows: validation loss, accuracy, ...

        Never needed: losses of evaluations are seen by themselves where they are computed by
        PyTorch's loss functions or by the model. A name that says so (``val_loss``,
        ``test_perplexity``) makes a metric the validation loss of the run.

        Args:
            metrics: Each an int, a float, a NumPy scalar, or a tensor or array of one element;
                anything else is left out with a warning.

        Raises:
            RuntimeError: called before the ``with`` began.

        Example:
            >>> import torch
            >>> model = torch.nn.Linear(3, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> with NeuralDbg(model) as dbg:
            ...     model(torch.randn(8, 3)).square().mean().backward()
            ...     optimizer.step()
            ...     dbg.record(val_loss=0.5)
            >>> rows = dbg.series[dbg.series["kind"] == "metric"]
            >>> rows[["step", "layer", "value"]].values.tolist()
            [[1, 'val_loss', 0.5]]
        """
        self._recorder.record(metrics)

    @property
    def series(self) -> pd.DataFrame:
        """Statistics over steps: one row per step, rank, layer and kind."""
        version = self._recorder.log.version
        if self._series is None or self._series[0] != version:
            self._series = (version, self._recorder.series())
        return self._series[1]

    @property
    def events(self) -> pd.DataFrame:
        """The event table: one row per labelled span, in causal order."""
        version = self._recorder.log.version
        if self._events is None or self._events[0] != version:
            self._events = (version, self._recorder.events(self.series))
        return self._events[1]

    @property
    def steps(self) -> int:
        """Steps of the run so far."""
        return self._recorder.steps_seen

    @property
    def faults(self) -> list[tuple[int, str]]:
        """Faults of NeuralDBG's own during the run, as (step, message); empty if all went well."""
        return list(self._recorder.guard.faults)

    @property
    def coverage(self) -> pd.DataFrame:
        """What of the run was observed, what was not, and why: one row for each.

        Columns: ``what``, ``layer``, ``observed`` (number of steps), ``of`` (steps at which it
        might have been), ``reason`` (empty where all was observed).
        """
        return self._recorder.coverage(self.series)

    @property
    def cost(self) -> Cost:
        """What capture has cost so far, by its own clock."""
        return self._recorder.cost


def _modules(given: tuple[object, ...]) -> list[nn.Module]:
    from torch import nn

    if len(given) == 1 and isinstance(given[0], Iterable) and not isinstance(given[0], nn.Module):
        given = tuple(given[0])
    if not given:
        raise TypeError("NeuralDbg needs the model to watch: NeuralDbg(model)")
    for model in given:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"NeuralDbg watches torch.nn.Module objects, not {type(model).__name__}: pass the "
                "model itself, several models, or one tuple of them"
            )
    return [model for model in given if isinstance(model, nn.Module)]
