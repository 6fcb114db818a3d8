"""The sentences under memory against throughput: the front, the stages and shardings, what offloading costs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from distexp.report.data.metrics import MEMORIES, SPEED
from distexp.report.data.overview import Overview
from distexp.report.data.repeats import RunGroup, is_within_noise
from distexp.report.data.setting_names import SEED
from distexp.report.data.settings import format_setting
from distexp.report.findings.base import Finding, capital, first_few, listed, mean_of
from distexp.report.findings.summary import memory_figure, pareto_fronts

OOM = ("oom_gpu", "oom_host")

SMALLEST = {
    "zero_stage": "Which ZeRO stage gave the lowest peak memory on each model?",
    "sharding": "Which sharding gave the lowest peak memory on each model?",
}
OFFLOADING = "How does the runtime change when offloading is enabled?"
PINNING = "What does pinned memory change?"


def tradeoff_findings(overview: Overview) -> Iterator[Finding]:
    """Under memory against throughput."""
    name = memory_figure(overview)
    if name is None:
        return
    yield from first_few(_fronts(overview, name))
    yield from _out_of_memory(overview)
    for setting in SMALLEST:
        yield from first_few(_smallest_of(overview, name, setting))
    yield from first_few(_offloads(overview, name, False, True, OFFLOADING))
    yield from first_few(_offloads(overview, name, False, "pinned", OFFLOADING))
    yield from first_few(_offloads(overview, name, True, "pinned", PINNING))


def _fronts(overview: Overview, name: str) -> Iterator[Finding]:
    fronts = pareto_fronts(overview, name)
    for front, measured in fronts:
        where = f"Of model={front[0].setting('model')}, " if len(fronts) > 1 else ""
        if len(front) == 1 < measured:
            text = f"{where}none of {measured} configurations is smaller or faster than {overview.describe(front[0])}."
            yield Finding(capital(text))
        elif measured > 1:
            yield Finding(capital(
                f"{where}{len(front)} of {measured} configurations lie on the front, where less memory costs speed: "
                f"from the smallest to the fastest {listed(overview.describe(group) for group in front)}."
            ))  # fmt: skip


def _out_of_memory(overview: Overview) -> Iterator[Finding]:
    dead = [group for group in overview.groups if _ran_out(group)]
    if dead:
        names = capital(listed(overview.describe(group) for group in dead))
        yield Finding(f"{names} ran out of memory; a red cross on the axis marks the peak that was reached.")


def _ran_out(group: RunGroup) -> bool:
    return not group.completed and group.rows[0].record.status in OOM


def _smallest_of(overview: Overview, name: str, setting: str) -> Iterator[Finding]:
    """Which value of a setting needs least, all else equal; out of memory counts as larger than all."""
    groups = [group for group in overview.groups if group.setting(setting) is not None]
    for alike in _alike(overview, groups, setting):
        done = sorted(
            (group for group in alike if group.completed and group.metric(name)),
            key=lambda group: mean_of(group, name),
        )
        dead = [f"{setting}={format_setting(group.setting(setting))}" for group in alike if _ran_out(group)]
        if done and len(done) + len(dead) > 1:
            yield Finding(_smallest_text(overview, name, setting, done, dead), SMALLEST[setting])


def _smallest_text(overview: Overview, name: str, setting: str, done: Sequence[RunGroup], dead: Sequence[str]) -> str:
    def said(group: RunGroup) -> str:
        return f"{setting}={format_setting(group.setting(setting))}"

    best, least = done[0], mean_of(done[0], name)
    text = f"{_where(overview, best, setting)}{said(best)} has the lowest {MEMORIES[name]}, {least:,.0f} MiB"
    if len(done) > 1:
        most = mean_of(done[-1], name)
        text += f", {1 - least / most:.1%} below {said(done[-1])} ({most:,.0f} MiB)"
        one, two = best.metric(name), done[1].metric(name)
        if one and two and is_within_noise(one, two):
            text += f"; {said(done[1])} is within the spread of it"
    if dead:
        text += f"; {', '.join(dead)} ran out of memory"
    return capital(text) + "."


def _offloads(overview: Overview, name: str, before: object, after: object, question: str) -> Iterator[Finding]:
    """What a way of offloading costs in time and saves in memory, all else equal."""
    for alike in _alike(overview, overview.groups, "offload"):
        plain = next((group for group in alike if group.setting("offload") == before), None)
        offloaded = next((group for group in alike if group.setting("offload") == after), None)
        if plain is None or offloaded is None:
            continue
        where = _where(overview, offloaded, "offload")
        text = f"{where}offload={format_setting(after)} against {format_setting(before)}: "
        if not (plain.completed and offloaded.completed):
            if plain.completed != offloaded.completed:
                one, other = (plain, offloaded) if offloaded.completed else (offloaded, plain)
                yield Finding(capital(
                    f"{text}{format_setting(other.setting('offload'))} completes where "
                    f"{format_setting(one.setting('offload'))} ended {one.status}."), question)  # fmt: skip
            continue
        yield Finding(capital(text + ", ".join(_costs(plain, offloaded, name))) + ".", question)


def _costs(plain: RunGroup, offloaded: RunGroup, name: str) -> Iterator[str]:
    one, other = plain.metric(SPEED), offloaded.metric(SPEED)
    if one and other and other.mean:
        ratio = one.mean / other.mean
        chance = " (within the spread)" if is_within_noise(one, other) else ""
        speeds = f"{one.mean:,.1f} against {other.mean:,.1f} samples/s"
        yield f"the same training takes {ratio:.2f}x the time ({speeds}){chance}"
    for memory in dict.fromkeys((name, "cpu_peak_mib")):
        if plain.metric(memory) and offloaded.metric(memory):
            before, after = mean_of(plain, memory), mean_of(offloaded, memory)
            yield f"{MEMORIES[memory]} goes from {before:,.0f} to {after:,.0f} MiB ({after / before - 1:+.1%})"


def _alike(overview: Overview, groups: Sequence[RunGroup], setting: str) -> list[list[RunGroup]]:
    """Groups that differ in one setting alone."""
    members: dict[str, list[RunGroup]] = {}
    for group in groups:
        key = json.dumps([group.setting(n) for n in overview.varied if n not in (setting, SEED)], default=str)
        members.setdefault(key, []).append(group)
    return [each for each in members.values() if len({format_setting(group.setting(setting)) for group in each}) > 1]


def _where(overview: Overview, group: RunGroup, without: str) -> str:
    """``with model=bloom_560m, workers=2, `` and nothing where nothing else varies."""
    skipped = {without, "strategy"} if without in ("zero_stage", "sharding") else {without}
    chosen = [f"{name}={format_setting(group.setting(name), 24)}" for name in overview.varied
              if name not in skipped and group.setting(name) is not None]  # fmt: skip
    return f"with {', '.join(chosen)}, " if chosen else ""
