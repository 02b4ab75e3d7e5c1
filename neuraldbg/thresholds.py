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
    target_large: float = 20.0
    """Root mean square of the target, and its ratio to the outputs of the untrained model, above
    which the target is off scale [O]: standardised targets have 1, house prices 200,000."""
    label_majority: float = 0.75
    """Weight of the commonest class among the labels above which it can swallow the others [O]."""
    swallowed_share: float = 0.5
    """Share of the other classes' labels below which their predictions count as swallowed [O]."""
    batch_variety: float = 0.6
    """Entropy of a batch's labels over that of random batches, below which batches come in order
    [O]: shuffled ones have 1, sorted ones nearly 0."""
    between_batches: float = 0.5
    """Share of a target's variance that lies between batches, above which these come in order
    [O]: shuffled batches of n samples have 1/n."""
    unreachable_share: float = 0.1
    """Share of the target beyond the range of the output's activation, above which they do not
    suit each other [O]."""
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
    alike_spread: float = 0.01
    """Spread between a layer's rows over their size below which all samples get the same output
    [O]: trained layers have 0.15 to 1, untrained sigmoid networks down to 0.02."""
    alike_fall: float = 0.1
    """The same over its first value, below which it has fallen rather than been small [O]: in
    healthy runs it stays above 0.4."""
    weight_growth: float = 5.0
    """A layer's weight rms over its initial value, above which weights have run away; half of
    torchmortem's tenfold, since most runs here are short [TM, O]."""
    unit_spread: float = 1e-4
    """Spread of a layer's units against their size, below which they are copies [O]."""

    dropout_strong: float = 0.7
    """Drop probability from which dropout is too strong [O]: 0.5 is the usual maximum, and a
    probability to keep passed as one to drop gives 0.7 to 0.9."""
    batch_small: float = 4.0
    """Samples in a batch up to which batch normalisation suffers: Wu and He, "Group
    Normalization" (2018), table 2, find 3 points more error at 4 and 11 at 2."""
    statistics_unlike: float = 0.3
    """Distance between batch and running statistics, in running deviations, above which batches
    are unlike [O]: sampling alone gives about 1.3 over the root of the values per channel."""
    statistics_off: float = 0.5
    """The same above which outputs in eval mode are others than in training [O]."""
    statistics_lag: float = 0.2
    """Share of the initial running statistics that remains, above which they lag: the usual
    momentum of 0.1 leaves less after 16 steps."""
    format_share: float = 0.25
    """Share of a number format's range above which an activation is near overflow [O]: two more
    doublings. Healthy half-precision activations stay below 0.05."""
    flushed_share: float = 0.3
    """Share of a gradient flushed to zero by its number format, above which it underflows [O]."""

    update_tiny: float = 3e-5
    """Update rms over weight rms of the layer that moves most, below which nothing is learned in
    reasonable time [O]: 1e-5 for a single layer [TM]."""
    update_small: float = 3e-4
    """The same, a third of the rule of thumb [K]."""
    update_large: float = 0.1
    """The same above which a step throws much of the layer away: a hundred times [K] [TM]."""
    update_huge: float = 0.5
    """The same at which a step replaces the layer [O]."""

    rank_difference: float = 1e-5
    """Difference between replicas on different ranks, relative to their size, above which they
    have parted: the same averaged gradient gives the same weights to the last bit (float32 rounds
    at 6e-8), and a gradient that was not averaged differs by whole percents [O]."""

    update_at_start: float = 0.02
    """The same above which first updates can throw the initial weights away [O]: twenty times
    [K]."""
    start_ratio: float = 5.0
    """First updates over those of the second half, above which they count as far larger [O]."""
    update_spike: float = 5.0
    """An update over the 90 % quantile of those before it, per learning rate, above which it
    spikes [O]. Momentum of 0.9 alone gives up to 4.4, between pure noise and one direction."""
    gradient_usual: float = 2.0
    """A gradient's norm over the same quantile, below which it is ordinary [O]."""
    gradient_unusual: float = 20.0
    """The same above which it is not, whatever came just before [O]: in a converged run single
    hard samples give 10."""
    gradient_spike: float = 10.0
    """Gradient norm over its course, the median of 32 steps, above which it spikes [O]."""
    gradient_noise: float = 25.0
    """Noise over signal of successive gradients, from the first on, above which a flat loss has
    nothing to follow [O]: healthy runs begin with 0.3 to 20 and end with up to 40."""
    clip_tight: float = 10.0
    """Norm before clipping over the threshold, above which clipping at nearly every step is too
    tight [O]: Pascanu et al. (2013) use thresholds down to half the average norm."""
    skipped_share: float = 0.1
    """Share of skipped steps in the second half of a run above which a scaler has failed [O]:
    `torch.amp.GradScaler` skips one in 2,000 once its scale has settled."""
    rate_collapse: float = 0.01
    """Learning rate over its peak below which it has collapsed, if that comes early [O]."""
    collapse_left: float = 0.5
    """Share of the run that must be spent below it: planned schedules end there."""
    decay_over_gradient: float = 1.0
    """Weight decay times weight over gradient, above which decay rules [O]."""
    weight_shrinkage: float = 0.7
    """Weight rms over its first value below which weights shrink [O]."""
    weight_collapse: float = 0.3
    """The same below which they collapse [O]."""

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
    loss_spike: float = 5.0
    """A loss over its own course before, above which it may have jumped [O]."""
    loss_spike_size: float = 0.25
    """The jump as a share of the first loss above which it matters for the run [O]: converged
    losses of nearly zero multiply at every hard batch."""
    loss_period: float = 0.5
    """Autocorrelation of the loss at a lag above which it repeats itself [O]."""
    loss_period_swing: float = 0.5
    """Swing within a period over the level of the loss, above which batches are unlike [O]."""
    loss_tail_gain: float = 0.07
    """Share of all that a run has gained that falls into its last tenth, above which it has not
    begun to level off [O]: a straight line has 0.1."""
    loss_tail_fall: float = 0.05
    """Fall over the last tenth as a share of the last loss, below which there is little left to
    gain soon [O]."""
    loss_tail_left: float = 0.25
    """Last loss as a share of the first below which most is done, still falling or not [O]."""
    validation_rise: float = 1.1
    """Validation loss at the end over its best value, above which it turned round [O]."""
    validation_strong_rise: float = 1.5
    """The same above which most of what was learned late does not carry over [O]."""
    validation_share: float = 0.05
    """The rise as a share of what was gained before the best value, below which it is no loss to
    speak of [O]."""
    evaluation_gap: float = 2.0
    """A layer's rms in evaluation against that in training (or its inverse) at the same weights,
    above which it depends on the mode [O]: dropout of one half gives at most 1.4 there."""
    evaluation_loss_gap: float = 0.2
    """Training loss less that of evaluations, as a share of the first loss, above which training
    is held back [O]: dropout of one half gives up to 0.05."""
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
    ("statistics_unlike", "statistics_off"),
    ("update_tiny", "update_small"),
    ("update_small", "update_large"),
    ("update_large", "update_huge"),
    ("gradient_usual", "gradient_unusual"),
    ("weight_collapse", "weight_shrinkage"),
    ("loss_high", "loss_extreme"),
    ("loss_rise", "loss_divergence"),
    ("loss_flat", "loss_slow"),
    ("validation_rise", "validation_strong_rise"),
)
