"""Comparison of a recorded run with the reference: what differs, by how much, and what that is made of.

Bounds come from arithmetic. In fp32, the noise run is the reference with another order of summation, and a difference
counts if it is MARGIN times that of the noise run. In 16 bits, the noise run is the reference in fp32. Tiny differences
never count (FLOOR).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from pathlib import Path
from typing import Any

import torch

from distexp.system.files import read_json
from distexp.verify.arithmetic import (
    EPS,
    Tensors,
    Update,
    by_parameter,
    differs,
    distance,
    explain_gradients,
    explain_update,
    largest,
    relative,
)
from distexp.verify.diagnosis import Finding
from distexp.verify.phases import RunSettings

TENSORS = "tensors.pt"

MARGIN = {"fp32": 16.0, "bf16": 8.0, "fp16": 8.0}
"""A difference counts if it is so many times that of the noise run."""

FLOOR = {"fp32": 2e-5, "bf16": 6e-2, "fp16": 6e-2}
"""Relative difference of a gradient that never counts. That of a weight or a state, which sums several, is larger."""

LOSS_FLOOR = {"fp32": 2e-5, "bf16": 5e-3, "fp16": 5e-3}
NORM_BOUND = {"fp32": 2e-4, "bf16": 2e-2, "fp16": 2e-2}
UPDATE_BOUND = {"fp32": 1e-3, "bf16": 0.1, "fp16": 0.1}
"""Relative errors of a loss that never count, and bounds of a norm and an update, which are computed again."""

SUMMED = 5.0  # How much larger.

NEGLIGIBLE = 1e-4  # A gradient of less than this share of the largest one is compared with that share.


def rank_file(directory: Path, rank: int) -> Path:
    """Return the file in which a rank writes what it has seen. It is the last one of a run."""
    return directory / f"seen{rank}.json"


@dataclass(frozen=True)
class Recording:
    """Everything that a run has recorded."""

    settings: RunSettings
    initial: dict[str, Any]
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    exported: Tensors
    arithmetic: list[str]  # how torch computes, such as with TF32
    records_clipped: bool  # whether the gradients are recorded after they were clipped
    ranks: list[list[dict[str, Any]]]  # what each rank has seen in each step

    @classmethod
    def read(cls, directory: Path) -> "Recording":
        """Read a run directory. Raise OSError if the run has not ended."""
        settings, count = RunSettings.read(directory), len(list(directory.glob("seen*.json")))
        first = range(0, count, settings.copies)  # of those with the same rows
        ranks = [read_json(rank_file(directory, rank))["steps"] for rank in first]
        return cls(settings, ranks=ranks, **torch.load(directory / TENSORS, weights_only=True))


Error = tuple[float, float, int]  # relative error, bound, step


def error_share(error: Error) -> float:
    """Return an error as a multiple of its bound."""
    return error[0] / error[1]


@dataclass
class Comparison:
    """Comparison of one phase."""

    phase: str
    reference: Recording
    noise: Recording
    variant: Recording
    findings: list[Finding] = field(default_factory=list)
    errors: dict[str, dict[str, Error]] = field(default_factory=dict)  # by kind and name: the largest
    loss_noise: float = 0.0  # largest relative difference of a loss in the steps of the noise run so far

    def __post_init__(self) -> None:
        self.precision = self.variant.settings.precision
        self.margin, self.floor = MARGIN[self.precision], FLOOR[self.precision]

    def compare(self) -> None:
        """Compare everything, in the order in which one thing causes the next."""
        self._compare_samples()
        self._compare_ranks("start", 0, self.variant.initial)
        self._compare_tensors("initial", 0, [each.initial["weights"] for each in self._runs()])
        for number in range(min(len(self.reference.steps), len(self.variant.steps))):
            self._compare_step(number)
        self._compare_evaluations()
        last = self.variant.steps[-1]
        own = {**last["weights"], **last["buffers"]}
        if self.variant.settings.exports_trained:
            own = {name: own[name] for name in own if name in self.variant.exported or name in last["gradients"]}
        self._compare_tensors("exported", len(self.variant.steps), [own, own, self.variant.exported])

    def _runs(self) -> tuple[Recording, Recording, Recording]:
        return self.reference, self.noise, self.variant

    def add(self, kind: str, step: int, errors: Mapping[str, tuple[float, float]], **detail: Any) -> None:
        """Add errors with their bounds, by name. Those above their bounds are a finding."""
        known = self.errors.setdefault(kind, {})
        for name, each in errors.items():
            known[name] = max((*each, step), known.get(name, (0.0, 1.0, step)), key=error_share)
        wrong = {name: each for name, each in errors.items() if not each[0] <= each[1]}
        if wrong:
            worst = max(wrong, key=lambda name: wrong[name][0] / wrong[name][1])
            self.findings.append(Finding(kind, self.phase, step, list(wrong), worst, *wrong[worst], detail))

    def _compare_step(self, number: int) -> None:
        reference, noise, variant = (each.steps[number] for each in self._runs())
        step = number + 1
        self._compare_ranks("step", step, variant)
        if reference["loss"] is not None:
            expected, noisy, found = (each["loss"] for each in (reference, noise, variant))
            # The noise of one number may be small by coincidence, but the weights differ as before, or more.
            self.loss_noise = max(self.loss_noise, relative(noisy, expected))
            error = self._loss_error(expected, noisy, found, number, self.loss_noise)
            # Gradients show amplified rounding that a loss may hide.
            if self.precision == "fp32" and error[0] > error[1]:
                error = self._loss_error(expected, noisy, found, number, self._noise(number))
            self.add("loss", step, {"loss": error}, value=found, expected=expected)
        self._compare_gradients(number)
        # Clipped gradients do not have the norm that is reported.
        norm = reference["norm"] if self.variant.records_clipped else variant["true_norm"]
        reported = [seen[number]["norm"] for seen in self.variant.ranks]
        if variant["gradients"] and None not in reported:
            bound = NORM_BOUND[self.precision]
            errors = {f"rank {rank}": (relative(each, norm), bound) for rank, each in enumerate(reported)}
            self.add("norm", step, errors, reported=reported, true=norm, limit=self.variant.settings.clipping)
        self._compare_groups(number)
        followed = self._check_update(number, norm)
        for key in reference["states"]:
            tensors = [each["states"].get(key, {}) for each in (reference, noise, variant)]
            self._compare_tensors("state", step, tensors, state=key)
        # Equal initial weights, gradients and updates make equal weights. AdamW turns rounding errors of tiny gradients
        # into updates of full size, so no bound between 0 and the whole update holds for the weights themselves.
        weights = [
            {name: one for name, one in each["weights"].items() if name not in followed}
            for each in (reference, noise, variant)
        ]
        before = self.reference.initial if number == 0 else self.reference.steps[number - 1]
        changes = {name: each - before["weights"][name] for name, each in weights[0].items()}
        self._compare_tensors("weight", step, weights, scales=changes)

    def _noise(self, number: int) -> float:
        """Return the largest relative difference of a gradient in a step of the noise run.

        The difference of one number or tensor alone may be small by coincidence.
        """
        right, noisy = (each.steps[number]["gradients"] for each in (self.reference, self.noise))
        least = NEGLIGIBLE * max(map(largest, right.values()), default=0.0)
        errors = (distance(noisy[name], each) / max(largest(each), least, 1e-30) for name, each in right.items())
        return max(errors, default=0.0)

    def _drift(self, number: int) -> float:
        """Return how far the weights of a step are from the reference, as a multiple of the noise run; at least 1.

        Gradients and states then differ by as many times more. All weights follow from updates that are computed again.
        """
        if not number:
            return 1.0
        right, noisy, found = (each.steps[number - 1]["weights"] for each in self._runs())
        names = right.keys() & noisy.keys() & found.keys()
        sizes = [sum(distance(each[name], right[name], 2) ** 2 for name in names) for each in (noisy, found)]
        return max(1.0, (sizes[1] / sizes[0]) ** 0.5) if sizes[0] else 1.0

    def _loss_error(
        self, reference: float, noise: float, variant: float, updates: int, least: float
    ) -> tuple[float, float]:
        """Return the relative error of a loss after a number of updates, and its bound.

        The bound follows from the noise of the loss, or at least some other, and from how far the weights are apart.
        """
        noisy = self._drift(updates) * max(relative(noise, reference), least)
        return relative(variant, reference), max(LOSS_FLOOR[self.precision], self.margin * noisy)

    def _compare_tensors(
        self, kind: str, step: int, tensors: Iterable[Tensors], *, scales: Tensors | None = None, **detail: Any
    ) -> None:
        """Compare the tensors of reference, noise and variant by name.

        Differences are relative to the largest value of each scale, which by default is the reference.
        """
        reference, noise, variant = tensors
        missing = sorted(reference.keys() ^ variant.keys())
        self.add(kind, step, dict.fromkeys(missing, (1.0, EPS)), **detail, missing=True)
        sizes = {name: largest(each) for name, each in (reference if scales is None else scales).items()}
        least = NEGLIGIBLE * max(sizes.values(), default=0.0)
        floor = self.floor * (1.0 if kind == "gradient" else SUMMED)
        if kind == "gradient" and self.precision != "fp32":
            floor = max(floor, self.margin * self._noise(step - 1))
        updates = {"gradient": step - 1, "state": step - 1, "buffer": step}.get(kind, 0)
        margin = self.margin * self._drift(updates)
        errors = {}
        for name in filter(variant.__contains__, reference):  # in the order of the model
            scale = max(sizes.get(name, 0.0), least, 1e-30)
            rounding = 8 * EPS * largest(reference[name]) if scales is not None else 0.0
            noisy = margin * distance(noise.get(name, reference[name]), reference[name])
            bound = max(noisy, floor * scale + rounding) / scale
            errors[name] = (distance(variant[name], reference[name]) / scale, bound)
        self.add(kind, step, errors, **detail)

    def _compare_gradients(self, number: int) -> None:
        runs, before = self._runs(), len(self.findings)
        gradients = [each.steps[number]["gradients"] for each in runs]
        if self.variant.records_clipped:
            for position, run in enumerate(runs[:2]):
                factor = self._clip_factor(run.steps[number]["norm"])
                gradients[position] = {name: each * factor for name, each in gradients[position].items()}
        self._compare_tensors("gradient", number + 1, gradients)
        has_batch_norms = any(name.endswith("running_mean") for name in self.reference.initial["buffers"])
        for finding in self.findings[before:]:
            earlier = self.variant.steps[number - 1]["gradients"] if number else None
            batches = self.reference.ranks[0][number]["batches"]
            finding.detail |= explain_gradients(
                finding.names, gradients[2], gradients[0], self.reference.steps[number]["parts"], earlier
            )
            finding.detail |= {"targets": [each["targets"] for each in batches], "ranks": len(self.variant.ranks)}
            finding.detail |= {
                "has_batch_norms": has_batch_norms,
                "has_loss": runs[0].steps[number]["loss"] is not None,
            }
            limit = self.variant.settings.clipping
            if limit is not None and not self.variant.records_clipped:
                found, right = (each.steps[number]["true_norm"] for each in (self.variant, self.reference))
                finding.detail |= {"limit": limit, "is_clipped": found <= 1.001 * limit} if limit < right else {}

    def _clip_factor(self, norm: float) -> float:
        limit = self.variant.settings.clipping
        return min(1.0, limit / (norm + 1e-6)) if limit is not None else 1.0

    def _compare_ranks(self, when: str, step: int, snapshot: Mapping[str, Any]) -> None:
        for what, tensors in snapshot["differing"].items():
            errors = {name: (max(each), 1e-6) for name, each in tensors.items()}
            shown = dict(list(tensors.items())[:1])
            self.add("ranks", step, errors, what=what, when=when, differences=shown)

    def _compare_groups(self, number: int) -> None:
        """Compare the live hyperparameters of each parameter."""
        reference, variant = (by_parameter(each.steps[number]["groups"]) for each in (self.reference, self.variant))
        for key in ("lr", "weight_decay", "betas", "eps", "momentum"):
            pairs = {
                name: (values[key], variant[name][key])
                for name, values in reference.items()
                if key in values and key in variant.get(name, {})
            }
            errors = {name: (differs(*pair), 1e-6) for name, pair in pairs.items()}
            shown = next((pair for pair in pairs.values() if differs(*pair) > 1e-6), (0.0, 0.0))
            planned = [step["groups"][0].get("lr") for step in self.reference.steps] if key == "lr" else []
            self.add(key, number + 1, errors, expected=shown[0], value=shown[1], planned=planned)

    def _check_update(self, number: int, norm: float) -> set[str]:
        """Compute the update again from the gradients, states and hyperparameters of the variant itself.

        Return the parameters of which this is possible. It is not if an optimizer shows no group for a parameter.
        """
        variant = self.variant.steps[number]
        before = self.variant.initial if number == 0 else self.variant.steps[number - 1]
        if not variant["gradients"]:
            return set()
        limit = None if self.variant.records_clipped else self.variant.settings.clipping
        factor = 1.0 if limit is None else self._clip_factor(norm)
        groups, done = by_parameter(variant["groups"]), self.variant.initial["done"] + number
        right = by_parameter(self.reference.steps[number]["groups"])
        errors, updates = {}, {}
        for name, old in before["weights"].items():
            gradient, group = variant["gradients"].get(name), groups.get(name, {"has_formula": False})
            if gradient is not None and not group.get("has_formula", True):
                continue
            states = {key: each[name] for key, each in before["states"].items() if name in each}
            kind = {key: each for key, each in right.get(name, {}).items() if key == "decoupled_weight_decay"}
            update = Update(old, variant["weights"][name], gradient, factor, states, {**group, **kind}, done + 1)
            expected = update.expected()
            scale = max(largest(expected - old), 1e-30)
            rounding = 8 * EPS * largest(old) / scale
            errors[name] = (distance(update.new, expected) / scale, UPDATE_BOUND[self.precision] + rounding)
            if errors[name][0] > errors[name][1]:
                updates[name] = update
        context = {"norm": norm, "limit": limit, "clip_factor": factor, "parameters": len(errors)}
        if updates:
            old_factor = self._clip_factor(before.get("true_norm", norm)) if limit is not None else 1.0
            context |= explain_update(updates, old_factor, UPDATE_BOUND[self.precision])
            new = [variant["weights"][name] for name in variant["gradients"]]
            context["rounded"] = all(torch.equal(each, each.bfloat16().float()) for each in new)
        self.add("update", number + 1, errors, **context)
        return set(errors)

    def _compare_evaluations(self) -> None:
        for position, expected in enumerate(self.reference.evaluations):
            if position >= len(self.variant.evaluations):
                break
            noise, variant = self.noise.evaluations[position], self.variant.evaluations[position]
            step = expected["step"]
            self.add("mode", step, {"mode": (float(variant["in_training_mode"]), 0.5)})
            errors = {name: (max(each), 1e-6) for name, each in variant["differing"].items()}
            self.add("ranks", step, errors, what="buffers", when="evaluation", differences={})
            self._compare_tensors("buffer", step, [each["buffers"] for each in (expected, noise, variant)])
            least = self._evaluation_noise(position) if self.precision == "fp32" else 0.0
            errors = {"loss": self._loss_error(expected["loss"], noise["loss"], variant["loss"], step, least)}
            if variant["samples"] != expected["samples"]:
                errors["samples"] = (1.0, 0.5)
            self.add("evaluation", step, errors, value=variant["loss"], expected=expected["loss"])

    def _evaluation_noise(self, position: int) -> float:
        """Return the noise of an evaluation that its loss may hide: that of losses before it, and of its buffers.

        With batch norms, rounding may change gradients by far more than the evaluation, which uses the running
        statistics. Without buffers, it is that of the gradients.
        """
        right, noisy = (run.evaluations[position] for run in (self.reference, self.noise))
        pairs = [(noisy["buffers"][name], buffer) for name, buffer in right["buffers"].items()]
        if not pairs:
            return self._noise(right["step"] - 1)
        steps = zip(self.noise.steps, self.reference.steps[: right["step"]], strict=False)
        losses = [relative(noise["loss"], step["loss"]) for noise, step in steps if step["loss"] is not None]
        return max([*losses, *(distance(found, buffer) / max(largest(buffer), 1e-30) for found, buffer in pairs)])

    def _compare_samples(self) -> None:
        """Compare the samples and labels of each step, of all ranks together."""
        known = have_labels(self.reference) and have_labels(self.variant)
        expected, found = (rows_of_steps(each.ranks, has_labels=known) for each in (self.reference, self.variant))
        if len(found) != len(expected):
            detail = {"reason": "steps", "value": len(found), "expected": len(expected)}
            self.add("samples", len(found), {"samples": (1.0, 0.5)}, **detail)
        per_epoch = len(expected) // max(1, self.reference.settings.epochs)
        for number, (rows, right) in enumerate(zip(found, expected, strict=False)):
            detail = explain_rows(rows, right, self.variant.ranks, number)
            if detail.get("reason") == "other" and number >= per_epoch and rows == found[number - per_epoch]:
                detail["reason"] = "epoch"
            elif detail.get("reason") == "other" and rows in expected:
                detail |= {"reason": "order", "value": expected.index(rows) + 1}
            self.add("samples", number + 1, {"samples": (1.0 if detail else 0.0, 0.5)}, **detail)


def compare_resumed(compared: Comparison, second: Recording) -> None:
    """Compare a resumed run with the one that wrote its checkpoint: its start, and the steps after it."""
    first, before, done = compared.variant, len(compared.findings), int(second.initial["done"])
    found = replace(compared, reference=first, noise=first, variant=second)  # with the same findings and errors
    if not 0 < done < len(first.steps):
        found.add("resume", done, {"step": (1.0, 0.5)}, what="step", value=done)
        return
    saved = first.steps[done - 1]
    for what in ("weights", "buffers"):
        found._compare_tensors("resume", done, [saved[what], saved[what], second.initial[what]], what=what)
    for key, tensors in saved["states"].items():
        restored = second.initial["states"].get(key, {})
        found._compare_tensors("resume", done, [tensors, tensors, restored], what=f"state {key}")
    known = have_labels(first)
    right, rows = (rows_of_steps(each.ranks, has_labels=known) for each in (first, second))
    found.add("resume", done + 1, {"samples": (float(rows != right[done:]), 0.5)}, what="samples")
    after, own = first.steps[-1], second.steps[-1]
    rates = [each["groups"][0].get("lr") if each["groups"] else None for each in (own, after)]
    found.add("resume", done + 1, {"lr": (differs(*rates), 1e-6)}, what="lr", value=rates[0], expected=rates[1])
    found._compare_tensors(
        "resume", done + 1, [after["gradients"], after["gradients"], own["gradients"]], what="gradients"
    )
    found._check_update(len(second.steps) - 1, own["true_norm"])
    for finding in found.findings[before:]:
        if finding.kind == "update":
            finding.kind, finding.step, finding.detail["what"] = "resume", done + 1, "later"


Rows = Counter[tuple[str, str]]


def rows_of_steps(ranks: Sequence[Sequence[Mapping[str, Any]]], *, has_labels: bool) -> list[Rows]:
    """Return the hashes of inputs and labels of all samples of each step."""
    steps = ([batch for seen in step for batch in seen["batches"]] for step in zip(*ranks, strict=False))
    unknown = None if has_labels else repeat("")
    return [
        Counter(pair for each in step for pair in zip(each["inputs"], unknown or each["labels"], strict=False))
        for step in steps
    ]


def have_labels(recording: Recording) -> bool:
    """Return whether the labels of each sample are known."""
    return all(batch["labels"] for seen in recording.ranks for step in seen for batch in step["batches"])


def explain_rows(rows: Rows, right: Rows, ranks: Sequence[Sequence[Mapping[str, Any]]], number: int) -> dict[str, Any]:
    """Return how the samples of a step differ from the right ones; empty if they are the same."""
    if rows == right:
        return {}
    inputs, right_inputs = (Counter(row for row, _ in each.elements()) for each in (rows, right))
    if inputs == right_inputs:
        return {"reason": "labels", "value": (rows - right).total(), "expected": right.total()}
    own = [Counter(row for batch in seen[number]["batches"] for row in batch["inputs"]) for seen in ranks]
    if len(own) > 1 and all(each == own[0] for each in own):
        return {"reason": "same", "value": len(own)}
    shared = [
        row for row, count in inputs.items() if count > right_inputs[row] and sum(row in each for each in own) > 1
    ]
    if shared:
        return {"reason": "shared", "value": len(shared)}
    if inputs < right_inputs:
        return {"reason": "missing", "value": inputs.total(), "expected": right_inputs.total()}
    return {"reason": "other", "value": (inputs - right_inputs).total(), "expected": right_inputs.total()}
