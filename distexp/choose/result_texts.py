"""Sentences about the result of a search: the winner, its margin, and its command line."""

from collections.abc import Iterator, Sequence
from math import expm1

from distexp.choose.axes import read_axes
from distexp.choose.candidate import BETTER, STRATEGY, Candidate, Metrics, Objective, format_gib, format_share, label
from distexp.choose.loss_check import LossCheck
from distexp.choose.ranking import Margin, margin_between, mean_metrics, ranked, simplest
from distexp.choose.space import Settings
from distexp.config.overrides import copyable_override, shell_quote
from distexp.plan.plan_table import replace_overrides
from distexp.statistics.noise import SINGLE_CPU_RUN, distinct_ratio
from distexp.strategies.base import reference_name
from distexp.system.units import format_amount

SET_BY_COMMAND = ("choose.", "hydra.", "plan.output=", "plan.timeout_s=", "name=choose")
"""Overrides that are not part of the real training."""

SIZE_KEYS = ("cluster.nodes=", "cluster.workers_per_node=")  # overrides that set the number of workers


def winner_sentence(candidates: Sequence[Candidate], winner: Candidate, objective: Objective) -> str:
    """Return the winner with its evidence, and its margin to the second best candidate."""
    evidence = f"{label(winner)}: {describe_values(mean_metrics(winner))}"
    second = next((candidate for candidate in ranked(candidates, objective) if candidate is not winner), None)
    margin = None if second is None else margin_between(winner, second, objective, candidates)
    if second is None or margin is None:
        return evidence
    return f"{evidence}, {describe_margin(margin, objective, label(second))}"


def describe_values(values: Metrics) -> str:
    """Return the measured values: ``812.0 samples/s at 31.2 GiB, 0.52 J/sample``."""
    speed = "-" if values.samples_per_second is None else f"{values.samples_per_second:,.1f} samples/s"
    parts = [f"{speed} at {format_gib(values.peak_allocated_mib)}"]
    if values.j_per_sample is not None:
        parts.append(f"{format_amount(values.j_per_sample)} J/sample")
    if values.price_per_sample is not None:
        parts.append(f"{format_amount(1e6 * values.price_per_sample)} per million samples")
    return ", ".join(parts)


def describe_margin(margin: Margin, objective: Objective, second: str) -> str:
    """Return the margin to the second best: ``6.0 % (4.0 to 8.0 %) faster than ddp``, or that both are equal."""
    if margin.is_noise:
        return f"equal within the noise of ±{format_noise(margin)} to {second}"
    if margin.value < 0:  # The budget ended before the second best was repeated.
        saving = -margin.value
        gain = saving / (1 - saving) if objective is Objective.THROUGHPUT else saving
        return f"but a shorter trial of {second} was {format_share(gain)} better"
    # A saving is a share of what the second best needs.
    share, *ends = (
        format_share(value if objective is Objective.THROUGHPUT else value / (1 + value))
        for value in (margin.value, *(margin.interval or ()))
    )
    if ends:
        return f"{share} ({ends[0].removesuffix(' %')} to {ends[1]}) {BETTER[objective]} {second}"
    unknown = "" if objective is Objective.MEMORY else " (noise unknown: no trial was repeated)"
    return f"{share} {BETTER[objective]} {second}{unknown}"


def format_noise(margin: Margin) -> str:
    """Return the largest relative difference that may be noise."""
    return format_share(expm1(margin.noise or 0.0))


def equals_sentence(winner: Candidate, equal: Sequence[Candidate]) -> str:
    """Return how many configurations are as good as the winner within the noise, and the simplest one of all."""
    simple = simplest([winner, *equal])
    name = "the winner" if simple is winner else label(simple)
    count = len(equal)
    others = f"{count} other configuration{'' if count == 1 else 's'} may be as good as the winner (= in the table)"
    return f"not decided: {others}, because the differences are within the noise. The simplest of them is {name}"


def command_line(settings: Settings, candidate: Candidate) -> str:
    """Return the command that runs the real training with a candidate."""
    typed = [*settings.options, *training_overrides(settings.command, candidate)]
    return " ".join(["distexp", *map(shell_quote, typed)])


def training_overrides(command: Sequence[str], candidate: Candidate) -> list[str]:
    """Return all overrides of the real training with a candidate."""
    merged = map(copyable_override, replace_overrides(command, candidate.overrides))
    return [text for text in merged if not text.startswith(SET_BY_COMMAND)]


def other_sizes_hint(candidates: Sequence[Candidate], settings: Settings) -> str:
    """Return how to try one worker too; empty if a candidate has one, or if the command sets the number of workers."""
    most = max((candidate.workers for candidate in candidates), default=1)
    is_set = any(text.lstrip("+").startswith(SIZE_KEYS) for text in settings.command)
    if is_set or settings.section.gpus or any(candidate.workers == 1 for candidate in candidates):
        return ""
    return f"all configurations have {most} workers. One worker may be faster: to try it too, set choose.gpus=1,{most}"


def may_add_single(settings: Settings) -> bool:
    """Return whether ``choose.gpus`` alone would make ``single`` a candidate."""
    axes = read_axes(settings.section.space, settings.command)
    return not settings.section.gpus and reference_name() in axes.values.get(STRATEGY, ())


def faster_reference(check: LossCheck | None, winner: Candidate, candidates: Sequence[Candidate]) -> str:
    """Return that a reference that is no candidate was faster in its one trial, beyond the noise; empty if not."""
    speed, best = check.outside_speed if check else None, mean_metrics(winner).samples_per_second
    is_on_cpus = winner.config is not None and winner.config.cluster.device == "cpu"
    least = distinct_ratio(SINGLE_CPU_RUN) if is_on_cpus else 1.0
    if check is None or speed is None or best is None or speed <= least * best:
        return ""
    most = max(candidate.workers for candidate in candidates)
    return (
        f"one worker was faster: {check.reference} had {speed:,.1f} samples/s in one trial, for the losses. "
        f"To let it take part, set choose.gpus=1,{most}"
    )


def loss_sentence(check: LossCheck) -> str:
    """Return what the check of the losses found."""
    if check.comparison is None:
        return f"the losses were not compared: {check.reason}"
    why = f" ({check.reason})" if check.reason else ""
    if check.equal:
        return f"the losses equal those of {check.reference}{why}: {check.comparison}"
    return f"the losses DIFFER from those of {check.reference}{why}: {check.comparison}"


SAME = 0.02  # relative difference from which a change is worth a mention

MORE_AND_LESS = {
    Objective.THROUGHPUT: ("faster", "slower"),
    Objective.MEMORY: ("more memory", "less memory"),
    Objective.ENERGY: ("more energy", "less energy"),
    Objective.COST: ("more expensive", "cheaper"),
}
"""What a larger and a smaller value of a candidate is called."""

BETTER_BY = ("faster", "less memory", "less energy", "cheaper")
"""Changes for which another configuration may be preferred to the winner."""


def trade_offs(candidates: Sequence[Candidate], winner: Candidate) -> Iterator[str]:
    """Yield the candidates that no other one beats in everything, with what they cost and give beyond the noise."""
    measured = [(each, mean_metrics(each)) for each in candidates if each.completed]
    for candidate, values in measured:
        others = [other for each, other in measured if each is not candidate]
        if candidate is winner or any(other.dominates(values) for other in others):
            continue
        changes = ", ".join(_changes(candidate, winner, candidates))
        if any(better in changes for better in BETTER_BY):
            yield f"{label(candidate)}: {changes}"


def _changes(candidate: Candidate, winner: Candidate, candidates: Sequence[Candidate]) -> Iterator[str]:
    """Yield how a candidate differs from the winner: ``3 % slower``, ``40 % less memory``."""
    own, best = mean_metrics(candidate), mean_metrics(winner)
    for objective, (more, less) in MORE_AND_LESS.items():
        mine, theirs = own.value(objective), best.value(objective)
        margin = margin_between(winner, candidate, objective, candidates)
        if not mine or not theirs or margin is None:
            continue
        change = mine / theirs - 1
        if abs(change) < SAME:
            continue
        if not margin.is_noise:
            yield f"{100 * abs(change):.0f} % {more if change > 0 else less}"
        elif objective is Objective.THROUGHPUT:
            yield f"equal speed within the noise of ±{format_noise(margin)}"
