"""The answer of a report: which run is best, by how much, whether this is sure, and how to repeat it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from distexp.config.overrides import copyable_command, format_count
from distexp.report.data.metrics import COST, MEMORIES, METRICS_BY_NAME, SPEED
from distexp.report.data.overview import (
    Overview,
    Ranking,
    explain_slow_baseline,
    group_by_task,
    memory_metric,
    rank_by_metric,
)
from distexp.report.data.repeats import RunGroup, ratio_text
from distexp.report.data.rows import (
    WORKERS,
    Row,
    format_noise,
    format_settings,
    global_batch,
    is_strategy_option,
    name_runs,
    run_label,
)
from distexp.report.data.scaling_series import ScalingSeries
from distexp.runs.record import config_dir_options
from distexp.statistics.noise import difference_noise

MAX_TASKS = 4
MAX_NAMED_SETTINGS = 2  # next to the strategy, in a short name
MICRO_BATCH, FOLLOWING = "micro_batch_size", ("gradient_accumulation_steps",)  # The second follows from the first.
SAME = 0.005  # relative difference that is none, if the noise is unknown
SEVERAL = 10.0  # ratio from which no decimals are shown
LOSS = "eval_loss"
OPTIMIZATION = frozenset(
    {"learning_rate", "weight_decay", "betas", "eps", "momentum", "gradient_clipping", "schedule", "step_size", "gamma"}
    | {"warmup_steps"}
)
"""Settings that change what is learned. The time of a step does not depend on them."""


@dataclass(frozen=True)
class Tile:
    """A number at the top of the page."""

    name: str
    value: str
    detail: str
    style: str = ""  # bad: in red


def are_trials(rows: Sequence[Row]) -> bool:
    """Return whether all runs are trials of ``distexp choose``. It compares them itself, and notes the winner."""
    return all(row.record.config.get("command") == "choose" for row in rows)


def strategy_label(group: RunGroup) -> str:
    """Return the strategy with its main option, as ``deepspeed ZeRO-3``; of an old record its name only."""
    traits = group.rows[0].record.strategy
    return str(group.setting("strategy")) if traits is None else traits.label


def short_name(overview: Overview, group: RunGroup) -> str:
    """Return ``deepspeed ZeRO-3, offload=true`` for titles and labels; ``run 3`` if this needs too many settings."""
    names = varied_settings(overview)
    has_several = len({strategy_label(one) for one in overview.groups}) > 1

    def named(one: RunGroup) -> list[str]:
        """Return the settings in the name of a run: those that are not off, and of many without degrees of 1."""
        chosen = [name for name in names if one.setting(name) is not False]
        return chosen if len(names) <= MAX_NAMED_SETTINGS else [name for name in chosen if not _has_one_part(name, one)]

    first_words = {strategy_label(one).partition(" ")[0] for one in overview.groups}

    def name(one: RunGroup) -> str:
        """Return what distinguishes a run, without the name that all share."""
        label = strategy_label(one) if has_several else ""
        shortened = label.partition(" ")[2] if len(first_words) == 1 else ""
        return ", ".join(filter(None, [shortened or label, format_settings(one.settings, named(one))]))

    text = name(group) if len(named(group)) <= MAX_NAMED_SETTINGS else ""
    is_unique = text and sum(name(one) == text for one in overview.groups) == 1
    return text if is_unique else run_label(group.label)


def varied_settings(overview: Overview) -> list[str]:
    """Return the settings that vary, without the strategy with its options, and without those that follow."""
    names = [name for name in overview.varied if name != "strategy" and not is_strategy_option(name)]
    if MICRO_BATCH in names and len({global_batch(one.settings) for one in overview.groups}) == 1:
        return [name for name in names if name not in FOLLOWING]
    return names


def _has_one_part(name: str, group: RunGroup) -> bool:
    return name.startswith("parallel.") and group.setting(name) == 1


def differs(one: RunGroup, other: RunGroup, metric: str) -> bool:
    """Return whether a metric of two runs differs beyond the noise; of unknown noise, by more than ``SAME``."""
    values = [value.mean for group in (one, other) if (value := group.metric(metric))]
    is_clear = len(values) == 2 and abs(values[0] - values[1]) > SAME * max(map(abs, values))
    return one is not other and is_clear and not ratio_text(one, other, metric, "")


def recommended(overview: Overview) -> Iterator[RunGroup]:
    """Yield the run to take of each task: the fastest one, or of those that are equally fast the one with least memory.

    If only the optimization varies, it is the run with the lowest evaluation loss. Nothing is recommended of a single
    run, of one training on several sizes, or if these numbers decide nothing.
    """
    if is_scaling(overview):
        return
    if is_about_loss(overview):
        for ranking in rank_by_metric(overview, LOSS, largest=False):
            if len(ranking.ranked) > 1 and differs(ranking.best.group, ranking.ranked[1].group, LOSS):
                yield ranking.best.group
        return
    memory = memory_metric(overview)
    for ranking in speed_rankings(overview):
        if overview.exceeds_workers(ranking.best.group):
            continue
        best, equal = ranking.best.group, [one.group for one in ranking.equal_to_best]
        sizes = {id(group): size.mean for group in (best, *equal) if memory and (size := group.metric(memory))}
        smallest = min((best, *equal), key=lambda group: sizes.get(id(group), math.inf))
        others = [group for group in (best, *equal) if group is not smallest]
        if not equal or (memory and all(differs(smallest, other, memory) for other in others)):
            yield smallest


def is_scaling(overview: Overview) -> bool:
    """Return whether all completed runs are one training on several sizes."""
    completed = [group for group in overview.groups if group.completed]
    return any(series.has_several_sizes and len(series.points) == len(completed) for series in overview.series)


def is_about_loss(overview: Overview) -> bool:
    """Return whether only settings of the optimization vary, and losses of an evaluation can compare them."""
    has_losses = sum(group.metric(LOSS) is not None for group in overview.groups) > 1
    return has_losses and bool(overview.varied) and OPTIMIZATION.issuperset(overview.varied)


def describe_scaling(series: Sequence[ScalingSeries]) -> str:
    """Return how the speed grows with the workers; empty if noise decides, or the baseline was slow."""
    known = [one for one in series if one.has_several_sizes and not one.is_disturbed and one.is_trusted]
    if not known:
        return ""
    best, worst = (choose(known, key=lambda one: one.points[-1].efficiency) for choose in (max, min))
    first, last, other = best.baseline, best.points[-1], worst.points[-1]
    if best is not worst:
        if last.workers != other.workers or _is_equal_efficiency(best, worst):
            return ""
        ends = f"{best.name} keeps {last.efficiency:.0%} of the ideal speed, {worst.name} {other.efficiency:.0%}"
        return f"On {last.workers} workers {ends}"
    if not differs(first.group, last.group, SPEED):
        return ""
    result = (
        f"are {times(last.speedup)} as fast as" if best.kind == "strong" else f"do {times(last.speedup)} the work of"
    )
    return f"{last.workers} workers {result} {first.workers}, which is {last.efficiency:.0%} of the ideal"


def speed_rankings(overview: Overview) -> list[Ranking]:
    """Return the rankings that compare at least two runs."""
    rankings = [] if are_trials(overview.rows) else list(rank_by_metric(overview, SPEED, largest=True))
    return [ranking for ranking in rankings if len(ranking.ranked) > 1][:MAX_TASKS]


def headline(overview: Overview) -> Iterator[str]:
    """Yield for each task which run to take, by how much it is better, or why this is not decided."""
    if is_scaling(overview):
        yield from (f"{text}." for text in [describe_scaling(overview.series)] if text)
        return
    if is_about_loss(overview):
        yield from _describe_losses(overview)
        return
    rankings, taken = speed_rankings(overview), {group.task: group for group in recommended(overview)}
    for ranking in rankings:
        sentence = _compare(overview, ranking, taken.get(ranking.task))
        is_named = len(rankings) < 2 or f"model={ranking.task.split()[0]}" in sentence
        yield sentence if is_named else f"{ranking.task}: {sentence}"
    disturbed = [group.label for group in overview.groups if group.disturbance]
    if disturbed and len(overview.groups) == 1:
        yield "Another program slowed this run down, so its speed is not known."
    elif disturbed and not are_trials(overview.rows):
        start = "Not ranked" if rankings else "Fastest: not decided"
        yield f"{start}: {name_runs(disturbed)}, which another program slowed down."
    completed = [group for group in overview.groups if group.completed]
    if len(overview.groups) == 1 and completed:
        yield from _describe_only(overview, completed[0])
    if not completed:
        yield "No run completed."


def _describe_losses(overview: Overview) -> Iterator[str]:
    taken = [id(group) for group in recommended(overview)]
    for ranking in rank_by_metric(overview, LOSS, largest=False):
        if len(ranking.ranked) > 1:
            best, following = ([short_name(overview, one.group), f"{one.value.mean:.4f}"] for one in ranking.ranked[:2])
            start = f"Take {best[0]}: it" if id(ranking.best.group) in taken else f"Not decided: {best[0]}"
            yield f"{start} has the lowest evaluation loss, {best[1]}. The next, {following[0]}, has {following[1]}."


def _describe_only(overview: Overview, group: RunGroup) -> Iterator[str]:
    memory = memory_metric(overview)
    speed, size = group.metric(SPEED), group.metric(memory) if memory else None
    shown = [f"{speed.mean:,.1f} samples/s"] if speed and not group.disturbance else []
    shown += [f"{size.mean:,.0f} MiB {MEMORIES[memory]}"] if size and memory else []
    workers = format_count(int(group.setting(WORKERS) or 1), "worker")
    if shown:
        yield f"{strategy_label(group)} on {workers}: {' and '.join(shown)}."


def _compare(overview: Overview, ranking: Ranking, taken: RunGroup | None) -> str:
    best, equal, following = ranking.best, ranking.equal_to_best, ranking.ranked[1]
    if doubt := doubt_of(overview, best.group):
        return f"Not decided: {doubt}."
    if equal:
        noise = max(difference_noise(best.value, other.value) or 0.0 for other in equal)
        labels = name_runs(one.group.label for one in (best, *equal))
        same = f"{labels} are equally fast within the noise of {format_noise(noise, best.value.mean)}"
        if taken is None:
            return f"Not decided: {same}."
        return f"Take {short_name(overview, taken)}: {same}, and it needs the least memory of them."
    start = f"Take {short_name(overview, best.group)}"
    if not differs(best.group, following.group, SPEED):
        return f"{start}: it is about as fast as {short_name(overview, following.group)}."
    ratio, memory = times(best.value.mean / following.value.mean), _memory(overview, best.group, following.group)
    return f"{start}: it is {ratio} as fast as the next, {short_name(overview, following.group)}{memory}."


def doubt_of(overview: Overview, best: RunGroup) -> str:
    """Return why the speed of the fastest run proves nothing: the baseline was slowed down. Empty if it does."""
    if overview.baseline is None or not overview.exceeds_workers(best):
        return ""
    label = run_label(overview.baseline.label)
    return f"{short_name(overview, best)} is faster than its workers explain, so do not trust the baseline, {label}"


def _memory(overview: Overview, best: RunGroup, following: RunGroup) -> str:
    memory = memory_metric(overview)
    ranking = next((one for one in _rankings(overview, memory) if one.task == best.task), None)
    if memory is None or ranking is None:
        return ""
    if ranking.best.group is best:
        return ", and needs the least memory" if _is_decided(ranking, memory) else ""
    change = _change(best, following, memory)
    return "" if change is None else f", and needs {times(1 + change)} as much memory"


def _rankings(overview: Overview, metric: str | None) -> list[Ranking]:
    return [] if metric is None else list(rank_by_metric(overview, metric, largest=metric == SPEED))


def _is_decided(ranking: Ranking, metric: str) -> bool:
    """Return whether the first run of a ranking differs from all others."""
    return all(differs(ranking.best.group, one.group, metric) for one in ranking.ranked[1:])


def times(ratio: float) -> str:
    """Return a ratio as ``1.25x``, ``0.53x`` or ``12x``."""
    return f"{ratio:.2f}x" if ratio < SEVERAL else f"{ratio:,.0f}x"


def describe_tradeoff(overview: Overview, cost: str, noun: str) -> str:
    """Return what a smaller run saves and loses against the fastest one; empty if noise decides.

    It is the run whose saved part of the cost exceeds its lost part of the speed most; the smallest run if none does.
    ``noun`` is what the cost is, as ``memory``. Runs of several tasks are not compared.
    """
    speeds, costs = _rankings(overview, SPEED), _rankings(overview, cost)
    is_compared = not (are_trials(overview.rows) or is_about_loss(overview))
    if not is_compared or len(speeds) != 1 or len(costs) != 1 or len(speeds[0].ranked) < 2:
        return ""
    fast, cheap = speeds[0].best.group, costs[0].best.group
    best = max(overview.groups, key=lambda group: _gain(group, fast, cost))
    cheap = best if _gain(best, fast, cost) > 0 else cheap
    if doubt_of(overview, fast):
        return ""
    name, other = short_name(overview, cheap), short_name(overview, fast)
    if cheap is fast:
        is_sure = _is_decided(speeds[0], SPEED) and _is_decided(costs[0], cost)
        return f"{name} is the fastest and needs the least {noun}" if is_sure else ""
    saved, lost = (_change(cheap, fast, metric) for metric in (cost, SPEED))
    if saved is None and lost is None:
        return ""
    if saved is None:
        return f"{other} is {times(1 / (1 + (lost or 0)))} as fast as {name}, and their {noun} is about equal"
    saves = f"{name} halves the {noun} of {other}" if -0.55 <= saved <= -0.45 else (
        f"{name} needs {-saved:.0%} less {noun} than {other}"
    )  # fmt: skip
    return f"{saves} at about equal speed" if lost is None else f"{saves} and loses {-lost:.0%} of the speed"


def _gain(group: RunGroup, fast: RunGroup, cost: str) -> float:
    """Return the saved part of the cost without the lost part of the speed; 0 for a run that saves nothing."""
    saved, lost = (_change(group, fast, metric) for metric in (cost, SPEED))
    return (lost or 0.0) - saved if saved is not None and group.completed and group.metric(SPEED) else 0.0


def _change(group: RunGroup, reference: RunGroup, metric: str) -> float | None:
    """Return the relative change of a metric; None if it may not be ranked."""
    one, other = group.metric(metric), reference.metric(metric)
    return one.mean / other.mean - 1 if one and other and differs(group, reference, metric) else None


def repeat_command(overview: Overview) -> str:
    """Return the command of the recommended run, the only one, or that on the most workers; empty if there is none."""
    taken = list(recommended(overview)) or [group for group in overview.groups if group.completed]
    if is_scaling(overview):
        taken = [overview.series[0].points[-1].group]
    return typed_command(taken[0].counted_rows[0]) if len(taken) == 1 else ""


def typed_command(row: Row) -> str:
    """Return the command that repeats a run."""
    options = config_dir_options(row.path.parent) if row.path else []
    return copyable_command([*row.record.run.overrides, *options])


def build_tiles(overview: Overview) -> Iterator[Tile]:
    """Yield the tiles that these runs have numbers for: fastest, smallest and cheapest, then what was scaled.

    If only the optimization varies, the lowest evaluation loss is the only one.
    """
    if is_about_loss(overview):
        yield from _best_tile(overview, LOSS, "lowest evaluation loss", "", "")
        return
    memory = memory_metric(overview)
    if not are_trials(overview.rows):  # The winner of a search is in choose.json.
        yield from _best_tile(overview, SPEED, "fastest", "", "samples/s")
        if memory:
            yield from _best_tile(overview, memory, "smallest", f": {MEMORIES[memory]}", "MiB")
        workers = "GPU" if any(group.setting("device") != "cpu" for group in overview.groups) else "worker"
        yield from _best_tile(overview, COST, "cheapest", f": {workers} time for 1,000 samples", "s")
    scaled = [series for series in overview.series if series.has_several_sizes and not series.is_disturbed]
    yield from _efficiency_tiles(scaled)


def _best_tile(overview: Overview, name: str, title: str, what: str, unit: str) -> Iterator[Tile]:
    """Yield the best run with its margin; nothing for several tasks, which are not comparable."""
    rankings, metric = _rankings(overview, name), METRICS_BY_NAME[name]
    unknown = [group.label for group in overview.groups if group.disturbance and group.completed]
    is_compared = len(group_by_task([group for group in overview.groups if group.completed])) == 1
    if is_compared and name == SPEED and unknown and sum(len(one.ranked) for one in rankings) < 2:
        if len(overview.groups) == 1:
            yield Tile(what.removeprefix(": ") or "speed", "not known", "another program slowed the run down")
        else:
            yield Tile(title + what, "not decided", f"the speed of {name_runs(unknown)} is not known")
        return
    if len(rankings) != 1:
        return
    best, equal, others = rankings[0].best, rankings[0].equal_to_best, rankings[0].ranked[1:]
    if name in (SPEED, COST) and (doubt := doubt_of(overview, best.group)):
        yield Tile(title + what, "not decided", doubt)
        return
    shown = f"{metric.format_value(best.value.mean)} {unit}".strip()
    if not others:
        if len(overview.groups) == 1:
            yield Tile(what.removeprefix(": ") or "speed", shown, "")
        return
    if equal:
        noise = max(difference_noise(best.value, other.value) or 0.0 for other in equal)
        labels = name_runs([best.group.label, *(other.group.label for other in equal)])
        yield Tile(title + what, "not decided", f"{labels} {rankings[0].why_equal(noise)}, {shown}")
        return
    following = run_label(others[0].group.label)
    ratio = times(others[0].value.mean / best.value.mean) if best.value.mean else ""
    verb = "has" if name == LOSS else "needs"
    margin = f"the next, {following}, {verb} {ratio}" if ratio else f"the next is {following}"
    if name == SPEED and others[0].value.mean:
        margin = f"{times(best.value.mean / others[0].value.mean)} as fast as the next, {following}"
    if not differs(best.group, others[0].group, name):
        margin = f"about equal to {following}"
    label, name = run_label(best.group.label), short_name(overview, best.group)
    described = overview.describe(best.group)
    described = run_label(best.group.label, name) if described == label != name else described
    yield Tile(title + what, shown, f"{described}; {margin}")


def _efficiency_tiles(scaled: Sequence[ScalingSeries]) -> Iterator[Tile]:
    trusted = [series for series in scaled if series.is_trusted]
    if trusted:
        best = max(trusted, key=lambda series: series.points[-1].efficiency)
        last = best.points[-1]
        parts = [f"{last.workers} workers", best.name]
        if best.noise is not None:
            parts.append(f"noise {format_noise(best.noise, 1)}")
            equal = [point for point in trusted if point is not best and _is_equal_efficiency(best, point)]
            parts.append(f"{len(equal)} more equal within the noise" if equal else "")
        yield Tile("efficiency at the most workers", f"{last.efficiency:.0%}", ", ".join(filter(None, parts)))
    if doubtful := next((series for series in scaled if not series.is_trusted), None):
        highest, group = max(point.efficiency for point in doubtful.points), doubtful.baseline.group
        detail = f"{highest:.0%} relative to run {group.label}. {explain_slow_baseline(group)}"
        yield Tile("efficiency", "do not trust the baseline", detail, "bad")


def _is_equal_efficiency(best: ScalingSeries, other: ScalingSeries) -> bool:
    if best.noise is None or other.noise is None:
        return False
    one, two = best.points[-1].efficiency, other.points[-1].efficiency
    return abs(one - two) <= math.hypot(one * best.noise, two * other.noise)
