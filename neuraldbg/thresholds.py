"""Every number at which a statistic turns into an event, in one documented place."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Limits that the event detectors compare statistics with.

    Absolute limits mislead when layers differ in scale, so most of these are ratios: to the
    layer's own early values, to its neighbours, or of the update to the weight. The absolute ones
    are floors beside them. All are dimensionless unless a unit is named.

    Sources: [AT] AutoTrainer's defaults (Zhang et al., ICSE 2021); [SM] Amazon SageMaker
    Debugger's built-in rules; [TM] torchmortem 0.1; [K] Karpathy's rule of thumb that an update
    is about 1e-3 of its weight (CS231n, "Ratio of weights:updates"); [D] this project's design
    contract; [O] observed on healthy and faulty runs of ``neuraldbg.evaluation``.

    Raises:
        ValueError: a limit is negative or not a number, or the two limits of a pair are in the
            wrong order.

    Example:
        >>> Thresholds().exploding_gradient
        1000.0
        >>> Thresholds(dead_share=0.3).dead_share
        0.3
        >>> Thresholds(update_large=0.2, update_huge=0.1)
        Traceback (most recent call last):
        ...
        ValueError: Thresholds: update_large=0.2 must not exceed update_huge=0.1
    """

    coupling_window: int = 5
    """Steps within which two events may be cause and effect [D]."""

    vanishing_gradient: float = 1e-6
    """Gradient norm below which a layer learns nothing, whatever its neighbours do [D]."""
    exploding_gradient: float = 1e3
    """Gradient norm above which a gradient explodes when it also left its own early scale [D]."""
    vanishing_ratio: float = 1e-3
    """A layer's gradient rms against the strongest layer's, below which it vanishes [AT]."""
    gradient_growth: float = 70.0
    """A layer's gradient norm against its own early median, above which it explodes [AT]."""
    opposing_cosine: float = -0.3
    """Cosine of successive gradients below which updates overshoot [O]: noise gives about 0."""
    aligned_cosine: float = 0.9
    """Cosine of successive gradients above which they are nearly the same gradient [O]."""

    dead_share: float = 0.5
    """Share of a layer's units that are zero for every sample, above which it is dead [SM, TM]."""
    dead_samples: int = 256
    """Samples in a row for which a unit must be zero: one batch's zeros are sparsity [D]. A unit
    that is active for 1 % of the samples would be silent this long with probability 0.08."""
    saturated_share: float = 0.5
    """Share of a layer's values in the activation's flat tails, above which it saturates [SM]."""
    sustained_share: float = 0.5
    """Share of the captured steps a state must hold to count as lasting [TM]."""

    input_odd: float = 3.0
    """Root mean square (or its inverse) of the input above which it is off scale [O]."""
    input_extreme: float = 12.0
    """The same for an input that is far off scale [O]: pixels 0..255 give about 130."""
    feature_spread: float = 30.0
    """Largest feature's rms over the smallest's above which features are unlike in scale [O]."""

    gain_collapsed: float = 0.03
    """Initial weight rms times sqrt(fan_in) far below every usual initialisation: PyTorch's
    default gives 0.58, Xavier 1, He 1.41, GPT-2's 0.02 at width 64 gives 0.16."""
    gain_small: float = 0.12
    """The same, low enough to look twice."""
    gain_large: float = 3.5
    """The same above every usual initialisation."""
    gain_extreme: float = 7.0
    """The same far above: N(0, 1) weights at 64 inputs give 8."""
    signal_fading: float = 0.15
    """Factor per layer by which activations shrink at step 0, below which the signal fades [O]:
    PyTorch's default initialisation with ReLU gives about 0.4."""
    signal_growth: float = 2.5
    """Factor per layer by which activations grow at step 0, above which the signal blows up [O]."""
    activation_growth: float = 30.0
    """A layer's activation rms over its own early size, above which it has run away [O]."""
    activation_floor: float = 0.3
    """Early size below which growth does not count as running away [O]: activations that come up
    from near zero to unit scale are recovering."""
    weight_growth: float = 5.0
    """A layer's weight rms over its initial value, above which weights have run away; half of
    torchmortem's tenfold, since most runs here are short [TM, O]."""
    unit_spread: float = 1e-4
    """Spread of a layer's units against their size, below which they are copies [O]."""

    update_tiny: float = 3e-5
    """Update rms over weight rms of the layer that moves most, below which nothing is learned in
    reasonable time [O]: 1e-5 for a single layer [TM]."""
    update_small: float = 3e-4
    """The same, a third of the rule of thumb [K]."""
    update_large: float = 0.1
    """The same above which a step throws much of the layer away: a hundred times [K] [TM]."""
    update_huge: float = 0.5
    """The same at which a step replaces the layer [O]."""

    loss_high: float = 3.0
    """First loss over what an untrained model should score (log of the number of classes, mean
    square of the target), above which the outputs start too large [O]."""
    loss_extreme: float = 10.0
    """The same far above."""
    loss_rise: float = 1.5
    """Smoothed loss over its first value above which training goes backwards [O]."""
    loss_divergence: float = 10.0
    """The same above which it runs away [O]."""
    loss_flat: float = 0.02
    """Share of the first loss that must be gained over the run, or the loss is flat [O]."""
    loss_slow: float = 0.1
    """The same below which progress is slow [O]."""
    minimum_steps: int = 40
    """Steps a run must have before a flat loss means anything [O]."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value != value or (value < 0 and field.name != "opposing_cosine"):
                raise ValueError(f"Thresholds: {field.name}={value} must be a number of at least 0")
        for low, high in _ORDERED_PAIRS:
            if getattr(self, low) > getattr(self, high):
                raise ValueError(
                    f"Thresholds: {low}={getattr(self, low)} must not exceed "
                    f"{high}={getattr(self, high)}"
                )


_ORDERED_PAIRS = (
    ("vanishing_gradient", "exploding_gradient"),
    ("opposing_cosine", "aligned_cosine"),
    ("input_odd", "input_extreme"),
    ("gain_collapsed", "gain_small"),
    ("gain_small", "gain_large"),
    ("gain_large", "gain_extreme"),
    ("signal_fading", "signal_growth"),
    ("update_tiny", "update_small"),
    ("update_small", "update_large"),
    ("update_large", "update_huge"),
    ("loss_high", "loss_extreme"),
    ("loss_rise", "loss_divergence"),
    ("loss_flat", "loss_slow"),
)
