"""Why a run is the fastest: whether this is sure, and which settings make it fast."""

from collections.abc import Iterator

from distexp.config.keys import strategy_groups
from distexp.report.data.answer import (
    differs,
    doubt_of,
    is_about_loss,
    is_scaling,
    speed_rankings,
    strategy_label,
    times,
    varied_settings,
)
from distexp.report.data.metrics import SPEED
from distexp.report.data.overview import Overview, Ranking
from distexp.report.data.repeats import RunGroup
from distexp.report.data.rows import format_noise, format_setting, is_strategy_option
from distexp.statistics.noise import difference_noise

MAX_EFFECTS = 2  # the largest ones


def reasons(overview: Overview) -> Iterator[str]:
    """Yield whether the fastest run is sure to be it, and which settings make it fast; nothing if that is unknown."""
    rankings = [] if is_scaling(overview) or is_about_loss(overview) else speed_rankings(overview)
    if len(rankings) != 1 or rankings[0].equal_to_best or doubt_of(overview, rankings[0].best.group):
        return
    best, following = rankings[0].ranked[:2]
    noise = difference_noise(best.value, following.value)
    if noise is not None and differs(best.group, following.group, SPEED):
        has_repeats = min(len(one.group.counted_rows) for one in (best, following)) > 1
        kind = "the noise between the repeats" if has_repeats else "the noise between the steps of a run"
        more = "" if has_repeats else ". Each is one run: repeats=3 shows how much equal runs differ"
        yield f"The difference is more than {kind}, {format_noise(noise, best.value.mean)}{more}."
    effects = sorted(_effects(overview, rankings[0]), reverse=True)
    if len(effects) > 1:
        found = "; ".join(text for _, text in effects[:MAX_EFFECTS])
        yield f"What makes it fast, with the other settings equal: {found}."


def _effects(overview: Overview, ranking: Ranking) -> Iterator[tuple[float, str]]:
    """Yield the effect of each setting alone on the speed of the best run: the largest ratio, and a text."""
    best = ranking.best
    options = [name for name in overview.varied if is_strategy_option(name) and name not in strategy_groups()]

    def read(group: RunGroup, names: list[str]) -> list[object]:
        return [strategy_label(group), *(group.setting(name) for name in names)]

    found: dict[str, list[tuple[float, RunGroup]]] = {}
    for other in ranking.ranked[1:]:
        names = varied_settings(overview)
        if best.group.setting("strategy") == other.group.setting("strategy"):  # Only then both have these options.
            names += options
        pairs = zip(["strategy", *names], read(best.group, names), read(other.group, names), strict=True)
        changed = [name for name, own, value in pairs if own != value]
        if len(changed) == 1 and differs(best.group, other.group, SPEED):
            found.setdefault(changed[0], []).append((best.value.mean / other.value.mean, other.group))
    for name, others in found.items():
        least, most, slowest = others[0][0], *others[-1]  # They are sorted by speed.
        if name == "strategy":
            span = times(most) if len(others) == 1 else f"{times(least)} to {times(most)}"
            rest = strategy_label(slowest) if len(others) == 1 else "other strategies"
            yield most, f"{strategy_label(best.group)} is {span} as fast as {rest}"
        else:
            value, slower = (format_setting(group.setting(name)) for group in (best.group, slowest))
            yield most, f"{name}={value} is {times(most)} as fast as {slower}"
