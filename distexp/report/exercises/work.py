"""What each worker of a scaling exercise had to do, and how much of its time that took: strong and weak scaling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from distexp.report.exercises.cells import built_parameters, efficiency
from distexp.report.exercises.filling import Table
from distexp.report.repeats import Group

CONSTANT_WITHIN = 0.1  # relative; whole layers and whole samples allow for no more at small sizes

HEADER = (
    "Nodes x GPUs", "Total Params", "Params per GPU", "Samples per GPU", "Work per GPU", "Work in all",
    "Efficiency (%)",
)  # fmt: skip


def work_table(groups: Sequence[Group]) -> Iterator[Table]:
    """Parameters, samples and work of a worker; nothing where fewer than two trainings completed."""
    done = sorted((group for group in groups if group.completed and _samples(group)), key=_world)
    if len(done) < 2:
        return
    base, measure = done[0], efficiency("")
    rows, works = [], []
    for group in done:
        nodes, workers = int(group.setting("nodes")), int(group.setting("workers"))
        total, samples = built_parameters(group)[0], _samples(group)
        works.append((total * samples / workers, total * samples))
        values = measure.read(group, base)
        efficient = f"{values[0]:.1f}" if values else "-"
        rows.append((
            f"{nodes} x {workers // nodes}", f"{total:,}", f"{total / _sharers(group):,.0f}",
            f"{samples / workers:,.1f}", *(f"{now / then:.2f}x" for now, then in zip(works[-1], works[0], strict=True)),
            efficient,
        ))  # fmt: skip
    yield Table("What each GPU has to do", HEADER, tuple(rows), " ".join(_kind(works)))


def _world(group: Group) -> tuple[int, int]:
    return int(group.setting("workers")), int(group.setting("nodes"))


def _samples(group: Group) -> float:
    """Samples that the whole training sees, 0 where that is not known."""
    size, epochs = group.setting("dataset.train_size"), group.setting("num_epochs")
    metrics = group.counted[0].record.metrics
    if size and not group.setting("max_steps"):
        return float(size * epochs)
    batch = group.setting("micro_batch_size") * group.setting("gradient_accumulation_steps") * group.setting("workers")
    return float((metrics.total_steps or 0) * batch)


def _sharers(group: Group) -> int:
    """Over how many workers one copy of the parameters is spread, between two uses."""
    built = group.counted[0].record.built
    if built is None or (built.strategy == "deepspeed" and built.zero_stage != 3):
        return 1
    return built.mesh[1] if built.strategy in ("fsdp", "deepspeed") else 1


def _kind(works: Sequence[tuple[float, float]]) -> Iterator[str]:
    """What was kept constant; work is parameters x samples."""
    yield "Work is parameters x samples, against the first row; efficiency is ideal time over real time for that work."
    each, whole = (_variation([work[n] for work in works]) for n in (0, 1))
    if each <= CONSTANT_WITHIN:
        yield f"The work of a GPU is constant within {each:.1%}: this is weak scaling."
    elif whole <= CONSTANT_WITHIN:
        yield f"The whole work is constant within {whole:.1%}: this is strong scaling."
    else:
        yield "Neither the work of a GPU nor the whole work is constant: this is neither weak nor strong scaling."


def _variation(values: Sequence[float]) -> float:
    return (max(values) - min(values)) / max(values)
