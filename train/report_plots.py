"""The page's table of charts: title, one or two sentences, unit, and the metrics that each draws."""

import dataclasses

# Not recorded: tokens / seconds of a step.
THROUGHPUT = "throughput"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plot:
    """A chart of metrics as they were recorded.

    Attributes:
      title, text, unit: as in `Chart`.
      series: (metric, label, tone) of each line.
      may_log: whether a logarithmic axis makes sense.
      smooth: whether to draw each line's trailing mean, with its steps faint behind.
      only_sat: the chart says something of SAT only.
      unless: the chart is left out if every value equals this one: nothing happened.
    """

    title: str
    text: str
    unit: str
    series: tuple[tuple[str, str, int], ...]
    may_log: bool = False
    smooth: bool = False
    only_sat: bool = False
    unless: float | None = None


LEARNING = (
    Plot(
        title="Training reward",
        text="What the verifier gave the completions that a step trained on. Earlier weights sampled them, so this "
        "follows the policy with the delay of the lag.",
        unit="mean reward",
        series=(("reward/mean", "reward", 1),),
        smooth=True,
    ),
    Plot(
        title="Entropy",
        text="How undecided the policy is about its next token. A slow fall means that it commits to answers; a sudden "
        "fall to zero, that it has stopped exploring.",
        unit="nats per token",
        series=(("entropy", "entropy", 2),),
    ),
    Plot(
        title="Held-out accuracy during the run",
        text="Share of prompts kept out of training that are answered exactly.",
        unit="share of prompts",
        series=(("eval/sampled_accuracy", "sampled", 1), ("eval/greedy_accuracy", "greedy", 3)),
    ),
    Plot(
        title="Groups without a signal",
        text="Share of prompts whose completions all earned the same reward: their advantage, and so their gradient, "
        "is exactly zero.",
        unit="share of groups",
        series=(("reward/zero_std", "groups without a signal", 5),),
        smooth=True,
    ),
    Plot(
        title="Distance from the reference",
        text="k3 estimate of the divergence from the frozen policy that training began with.",
        unit="nats per token",
        series=(("kl/reference", "k3", 4),),
        may_log=True,
    ),
)
MISMATCH = (
    Plot(
        title="Mismatch",
        text="Mean |d| over sampled tokens: the sum of age, routing and arithmetic.",
        unit="nats",
        series=(("mismatch/abs_mean", "mean |d|", 1),),
        may_log=True,
        smooth=True,
    ),
    Plot(
        title="Divergence from the sampler",
        text="k3 estimate, mean of e^d - d - 1. It grows with the square of the mismatch, so it shows the tail first.",
        unit="nats",
        series=(("mismatch/k3", "k3", 2),),
        may_log=True,
        smooth=True,
    ),
    Plot(
        title="Largest mismatch",
        text="Greatest |d| of any token in the batch. A single large value is a rare token; a rising line is not.",
        unit="nats",
        series=(("mismatch/abs_max", "greatest |d|", 4),),
        may_log=True,
        smooth=True,
    ),
    Plot(
        title="Effective sample size",
        text="Share of the batch that is left once its tokens are weighted by the ratio; 1 means no mismatch.",
        unit="share of tokens",
        series=(("mismatch/ess", "effective sample size", 3),),
        smooth=True,
    ),
    Plot(
        title="Age of the tokens, by step",
        text="Trainer version minus the version that sampled the token. Publishing in windows makes it a saw-tooth.",
        unit="optimizer steps",
        series=(("lag/max", "greatest", 6), ("lag/mean", "mean", 1)),
    ),
)
TRUST_REGION = (
    Plot(
        title="Threshold q",
        text="The mismatch that nine active tokens in ten stay within. Where q passes a dashed line, SAT is switched "
        "off on that side and its gradient is that of the fixed clip.",
        unit="nats",
        series=(("sat/threshold", "q", 1),),
        may_log=True,
        smooth=True,
    ),
    Plot(
        title="Effective clip radii",
        text="The fixed clip that would have given the same gradient as SAT at this step: the lower, the tighter.",
        unit="distance of the ratio from 1",
        series=(("sat/effective_high", "upper", 1), ("sat/effective_low", "lower", 2)),
        smooth=True,
        only_sat=True,
    ),
    Plot(
        title="Gate and clip rates",
        text="Gated: beyond q, with a contracted radius. Clipped: no gradient. Newly clipped: only SAT clips them, the "
        "nominal radii would not; this is what the method changes.",
        unit="share of tokens",
        series=(("sat/gate_rate", "gated", 4), ("clip/fraction", "clipped", 2), ("clip/newly", "newly clipped", 1)),
        smooth=True,
    ),
    Plot(
        title="Sides on which SAT is active",
        text="1 while q is below the switch-off level of that side, 0 above it.",
        unit="1 = active",
        series=(("sat/active_high", "upper", 1), ("sat/active_low", "lower", 2)),
        only_sat=True,
    ),
)
GATES = (
    Plot(
        title="Dropped by the gate",
        text="Share of active tokens that the objective's gate takes out of the loss.",
        unit="share of tokens",
        series=(("gate/dropped", "dropped", 6),),
        smooth=True,
        unless=0.0,
    ),
    Plot(
        title="Importance weight",
        text="Mean weight of the active tokens; 1 where the objective does not weight them.",
        unit="weight",
        series=(("weight/mean", "weight", 5),),
        smooth=True,
        unless=1.0,
    ),
)
ROUTING = (
    Plot(
        title="Routing agreement",
        text="Share of the sampler's expert choices that the trainer's own router would have made too.",
        unit="share of choices",
        series=(("routing/agreement", "agreement", 1),),
    ),
    Plot(
        title="Missing routes",
        text="Share of positions that came without the sampler's routes and were routed freely. It should be 0.",
        unit="share of positions",
        series=(("routing/missing", "missing", 6),),
    ),
)
OPTIMIZER = (
    Plot(
        title="Gradient norm",
        text="Before clipping. Single spikes are harmless behind the clip; a steady rise is not.",
        unit="global L2 norm",
        series=(("grad_norm", "gradient norm", 1),),
        may_log=True,
    ),
    Plot(
        title="Learning rate",
        text="As the schedule set it.",
        unit="step size",
        series=(("learning_rate", "learning rate", 3),),
    ),
)
WORK = (
    Plot(
        title="Throughput",
        text="Sampled tokens trained on per second of wall clock, everything included.",
        unit="tokens per second",
        series=((THROUGHPUT, "throughput", 2),),
        smooth=True,
    ),
    Plot(
        title="Tokens per step",
        text="Sampled tokens that were trained on.",
        unit="tokens",
        series=(("tokens", "tokens", 3),),
        smooth=True,
    ),
    Plot(
        title="Completion length",
        text="Mean number of tokens of a completion, its stop token included.",
        unit="tokens",
        series=(("length/mean", "length", 4),),
        smooth=True,
    ),
    Plot(
        title="Truncated completions",
        text="Share of completions that ran into the length limit before they stopped.",
        unit="share of completions",
        series=(("length/truncated", "truncated", 6),),
        smooth=True,
    ),
    Plot(
        title="Packing",
        text="Share of a batch's positions that hold a token; the rest is padding, computed in vain.",
        unit="share of positions",
        series=(("pack/fill", "fill", 5),),
        smooth=True,
    ),
)
