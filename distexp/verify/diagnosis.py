"""The likely cause of a difference, from what differs first and what it is made of."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

from distexp.verify.arithmetic import MULTIPLE, WRONG_FORMULAS


@dataclass
class Finding:
    """Something that differs in a step of a phase. The kinds are those of ``KINDS``."""

    kind: str
    phase: str
    step: int  # from 1; 0: before the first step
    names: list[str]  # what differs: parameters, or ranks
    worst: str  # the name with the largest error, relative to its bound
    error: float  # relative error of that name
    bound: float  # its bound
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Cause:
    """A likely cause."""

    id: str  # a short name for programs
    sentence: str


KINDS = (
    *("samples", "initial", "gradient", "loss", "norm", "lr", "weight_decay", "betas", "eps", "momentum"),
    *("mode", "ranks", "update", "state", "weight", "buffer", "evaluation", "exported", "resume"),
)
"""Kinds of findings in the order in which one causes the next, in the same step."""

CLOSE = {"fp32": 2e-3, "bf16": 3e-2, "fp16": 3e-2}
"""By how much a factor may differ from the one that it is taken for."""

AMPLIFIED = (
    ", or batch norms amplified rounding: of nearly equal values, as in images of one color, or of a ReLU or a maximum "
    "that is a function. In large models this happens with most seeds, so verify the strategy with model=resnet_tiny "
    "dataset=tinyimagenet_sample train.seed=7"
)
"""Another cause of gradients that differ if a model has batch norms. The noise run may not have such a change."""


def first_finding(findings: Sequence[Finding]) -> Finding:
    """Return the finding that causes the others: that of the first step, and of the first kind in it."""

    def order(finding: Finding) -> tuple[int, bool, int]:
        is_late = finding.kind in ("mode", "buffer", "evaluation", "exported")
        return finding.step, is_late or finding.detail.get("when") == "evaluation", KINDS.index(finding.kind)

    return min(findings, key=order)


def diagnose(findings: Sequence[Finding], workers: int, accumulation: int, precision: str) -> Cause:
    """Return the cause of the findings of the first phase that differs."""
    return Explanation(findings, workers, accumulation, CLOSE[precision]).cause(first_finding(findings))


@dataclass(frozen=True)
class Explanation:
    """Rules that name the cause of a finding."""

    findings: Sequence[Finding]  # all of the phase
    workers: int
    accumulation: int
    close: float

    def cause(self, first: Finding) -> Cause:
        """Return the cause of a finding."""
        detail = first.detail
        rule = {
            "samples": self._samples,
            "gradient": self._gradient,
            "norm": self._norm,
            "lr": self._learning_rate,
            "weight_decay": self._weight_decay,
            "ranks": self._ranks,
            "update": self._update,
            "resume": self._resume,
        }.get(first.kind)
        if rule is not None:
            return rule(first)
        if detail.get("missing") and first.kind == "initial":
            return Cause("untied", f"{describe_names(first.names, [])}: only one of the models registers it as a "
                         "parameter, so tied weights are untied, or a parameter is not registered")  # fmt: skip
        if first.kind in ("betas", "eps", "momentum"):
            found = f"the {first.kind} of the optimizer is {detail['value']} instead of {detail['expected']}"
            return Cause("hyperparameter", f"{found}: it is not that of the configuration")
        values = f": {detail['value']:.6g} instead of {detail['expected']:.6g}" if "expected" in detail else ""
        if values and self.workers > 1 and self._is(detail["value"], self.workers * detail["expected"]):
            values += f", so it is summed over the {self.workers} workers"
        texts = {
            "initial": f"the initial weights are not those of the seed, first {first.worst}: weights are not loaded, "
            "broadcast or cast as in single",
            "loss": f"the logged loss differs{values}, but gradients and weights do not: only the reported mean over "
            "ranks or micro-batches is wrong",
            "state": f"the optimizer state {detail.get('state')} of {self._where(first)} differs, though gradients and "
            "hyperparameters are equal",
            "weight": f"the weights of {self._where(first)} differ, though gradients and hyperparameters are equal",
            "buffer": f"the buffers differ in an evaluation, first {first.worst}: running statistics are not those of "
            "rank 0's micro-batches",
            "evaluation": f"the evaluation differs{values}, though the weights are equal: its mode, the division "
            "of its samples over the ranks, or the mean over unequal batches is wrong",
            "mode": "the evaluation leaves the model in training mode, in which dropout is active, and batch norms use "
            "the batch",
            "exported": f"the exported weights differ from those that were trained, first {first.worst}",
        }
        return Cause(first.kind, texts[first.kind])

    def _is(self, value: float, expected: float) -> bool:
        return abs(value - expected) <= self.close * max(abs(expected), 1e-9)

    def _where(self, finding: Finding) -> str:
        return describe_names(finding.names, finding.detail.get("order", []), finding.detail.get("parameters"))

    def _samples(self, first: Finding) -> Cause:
        detail, step = first.detail, first.step
        texts = {
            "same": f"all {detail.get('value')} ranks train on the same samples: the sampler does not shard them",
            "shared": f"ranks train on {detail.get('value')} equal samples in step {step}: their shares overlap",
            "labels": f"{detail.get('value')} of {detail.get('expected')} samples of step {step} have other labels: "
            "masking, shifting or padding differs",
            "missing": f"step {step} has {detail.get('value')} samples instead of {detail.get('expected')}: some are "
            "dropped",
            "steps": f"the training has {detail.get('value')} steps instead of {detail.get('expected')}: the last "
            "incomplete batch is dropped, or samples are repeated",
            "epoch": f"step {step} has the samples of the epoch before: the sampler has no new order in each epoch "
            "(set_epoch)",
            "order": f"step {step} has the samples of step {detail.get('value')} of single: the order differs",
            "other": f"{detail.get('value')} of {detail.get('expected')} samples of step {step} are others: the seed, "
            "order or padding of the sampler differ",
        }
        reason = detail["reason"]
        order = [each.detail["reason"] for each in self.findings if each.kind == "samples"]
        if reason in ("other", "order") and "steps" in order:
            detail |= next(each.detail for each in self.findings if each.detail.get("reason") == "steps")
            return self._samples(first)
        return Cause(f"samples_{reason}", texts[reason])

    def _gradient(self, first: Finding) -> Cause:
        detail, where = first.detail, self._where(first)
        if detail.get("missing") or "scale" not in detail:
            return Cause("gradient_missing", f"{where}: only one of both trainings has a gradient, so a parameter is "
                         "frozen, unused, or left out")  # fmt: skip
        return self._known_gradient(first, where) or self._other_gradient(first, where)

    def _known_gradient(self, first: Finding, where: str) -> Cause | None:
        """Return the cause of gradients that are made of those of single; None if they are not."""
        detail = first.detail
        small = detail.get("residual", 1.0) < 10 * self.close
        if detail.get("is_clipped"):
            return Cause("clipped_early", f"the gradients of {where} are clipped to the norm {detail['limit']:g} "
                         "before they are reduced or measured: each rank clips its own gradients")  # fmt: skip
        if small and abs(detail.get("previous", 0.0)) > 0.05:
            if max(map(abs, detail["parts"])) < 0.05:
                return Cause("stale", f"the gradients of {where} are those of the step before: the update does not "
                             "wait for the reduction, or is one step late")  # fmt: skip
            return Cause("not_cleared", f"the gradients of {where} contain {detail['previous']:.2f} times those of "
                         "the step before: they are not cleared after the update")  # fmt: skip
        if detail.get("rounded") and self.close == CLOSE["fp32"]:
            return Cause("rounded", f"the gradients of {where} are rounded to 16 bits: they are reduced in bf16")
        if detail["scale_residual"] < self.close:
            return self._factor(first, where)
        return self._combination(first, where) if small and detail.get("parts") else None

    def _other_gradient(self, first: Finding, where: str) -> Cause:
        """Return the cause of gradients that are no sum of those of the micro-batches."""
        detail = first.detail
        if detail["zeros"]:
            share = f"{detail['zeros']:.1%} of the gradients of {where} are 0, and the others are right"
            return Cause("gradient_lost", f"{share}: those of some rows, tokens or of a shard are lost")
        scales = sorted(detail.get("scales", {}).items(), key=lambda each: -abs(each[1] - 1))  # the most wrong first
        if detail["are_multiples"] and abs(scales[0][1] - 1) > max(MULTIPLE, self.close):
            few = ", ".join(f"{name} {scale:.2f}" for name, scale in scales[:3])
            return Cause("scaled_differently", f"the gradients of {where} are scaled by different factors: {few}")
        found = f"the gradients of {where} are no multiples of those of single (relative error {first.error:.1e})"
        amplified = AMPLIFIED if detail.get("has_batch_norms") else ""
        if self._has("loss", first.step):
            return Cause("forward", f"{found}: the loss differs too, so the forward pass has other positions, masks, "
                         f"buffers, targets or products{amplified}")  # fmt: skip
        passes = "the loss is equal, so the backward" if detail.get("has_loss", True) else "the forward, backward"
        text = f"{found}: {passes} or reduction is {'' if amplified else 'probably '}wrong{amplified}"
        return Cause("gradient_other", text)

    def _has(self, kind: str, step: int) -> bool:
        return any(each.kind == kind and each.step == step for each in self.findings)

    def _factor(self, first: Finding, where: str) -> Cause | None:
        factor, workers, steps = first.detail["scale"], self.workers, self.accumulation
        if self._is(factor, 1.0):  # Rounding of gradients does not change the loss of the same step.
            rounded = f"the gradients of {where} differ by {first.error:.1e} from those of single, as by rounding"
            text = f"{rounded}: they are computed, added or reduced with fewer bits"
            if first.step > 1:  # Fewer bits would already change the first step.
                text += ", or rounding changed a ReLU that verify keeps. Step 1 agrees: use another seed (train.seed=7)"
            elif first.detail.get("has_batch_norms"):
                text += AMPLIFIED
            return None if self._has("loss", first.step) else Cause("rounded", text)
        since = f" in step {first.step}, not before" if first.step > 1 else ""
        found = f"the gradients of {where} are {factor:.4g} times those of single{since}"
        targets = sum(first.detail["targets"])
        known = (
            ("summed", workers, f"summed over the {workers} workers, not averaged"),
            ("averaged_twice", 1 / workers, f"divided by the {workers} workers once too often"),
            ("accumulation_summed", steps, f"the sum of {steps} micro-batches that is not rescaled"),
            ("accumulation_twice", 1 / steps, f"divided by the {steps} micro-batches once too often"),
            ("summed_twice", workers * steps, f"summed over {workers} workers and {steps} micro-batches, not averaged"),
            ("divided_by_all", 1 / workers / steps, f"divided by {workers} workers x {steps} micro-batches too often"),
            ("not_normalized", targets, f"not divided by the {targets} targets of the step"),
            ("gradient_lost", 0, "they are cleared before the update, or lost in the reduction"),
        )
        for name, value, text in known:
            if value != 1 and self._is(factor, value):
                return Cause(name, f"{found}: {text}")
        return Cause("scaled", f"{found}: a constant factor, such as a loss scale, a weight of the loss or a divisor")

    def _combination(self, first: Finding, where: str) -> Cause | None:
        """Return the cause of gradients that are a sum with wrong factors of those of the micro-batches."""
        detail = first.detail
        parts, targets, ranks = detail["parts"], detail["targets"], detail["ranks"]
        known = [position for position, count in enumerate(targets) if count]
        most = max(abs(parts[position]) for position in known)
        is_zero = {position: abs(parts[position]) < 0.02 * most for position in known}
        by_rank = {rank: [p for p in known if p % ranks == rank] for rank in range(ranks)}
        by_micro = {micro: [p for p in known if p // ranks == micro] for micro in range(len(parts) // ranks)}
        lost = [rank for rank, own in by_rank.items() if own and all(is_zero[p] for p in own)]
        left = [rank for rank, own in by_rank.items() if own and rank not in lost]
        if lost and len(left) == 1 and self._has("ranks", first.step):
            return Cause(
                "not_reduced", f"the gradients of {where} are those of rank {left[0]}: they are not synchronized"
            )
        if lost:
            who = "within a group of ranks only" if self._has("ranks", first.step) else "without them"
            return Cause("ranks_lost", f"the gradients of {where} lack those of rank {_list(lost)}, reduced {who}")
        lost = [micro for micro, own in by_micro.items() if own and all(is_zero[p] for p in own)]
        if lost:
            return Cause("micro_batches_lost", f"the gradients of {where} lack those of the micro-batches "
                         f"{_list([micro + 1 for micro in lost])} of {len(by_micro)}: accumulation overwrites or "
                         f"clears them{', or each micro-batch is clipped' if 'limit' in detail else ''}")  # fmt: skip
        if any(is_zero.values()):
            return Cause("partly_reduced", f"the gradients of {where} lack those of other ranks in some "
                         "micro-batches: only a part of the accumulated gradients is synchronized")  # fmt: skip
        return self._mean_of_means(parts, targets, ranks, known, where)

    def _mean_of_means(
        self, parts: Sequence[float], targets: Sequence[int], ranks: int, known: Sequence[int], where: str
    ) -> Cause | None:
        if all(abs(parts[p] - parts[known[0]]) < 0.02 for p in known):
            return None
        divisors = {
            "of each micro-batch": targets,
            "of each rank": [sum(targets[p % ranks :: ranks]) for p in range(len(parts))],
            "of each accumulation step": [sum(targets[p - p % ranks :][:ranks]) for p in range(len(parts))],
        }
        for name, counts in divisors.items():
            ratios = [parts[p] * counts[p] for p in known]
            mean = sum(ratios) / len(ratios)
            if mean and all(abs(ratio / mean - 1) < 0.02 + self.close for ratio in ratios):
                return Cause("mean_of_means", f"the loss is the mean {name}, and then the mean of these means: with "
                             f"different numbers of targets ({_list([targets[p] for p in known][:6])}), targets do "
                             "not have equal weight")  # fmt: skip
        shown = ", ".join(f"{parts[p]:.2f}" for p in known[:8])
        return Cause("micro_batch_weights", f"the gradients of {where} count the micro-batches {shown} times, not once")

    def _norm(self, first: Finding) -> Cause:
        reported, true = first.detail["reported"], max(first.detail["true"], 1e-30)
        values = _list([f"{value:.6g}" for value in dict.fromkeys(reported)])
        shown = f"the gradient norm is {true:.6g}, but {values} is reported"
        if max(reported) - min(reported) > 1e-4 * true:
            return Cause("norm_local", f"{shown}, another one on each rank: each has the norm of its part")
        ratio, workers = reported[0] / true, self.workers
        known = {
            "norm_clipped": ((first.detail["limit"] or -1.0) / true, "it is the norm after clipping"),
            "norm_repeated": (sqrt(workers), f"the squares of all {workers} ranks are added, though they are replicas"),
            "norm_averaged": (1 / sqrt(workers), "squares are averaged over the ranks, not added"),
            "norm_summed": (float(workers), f"it is {workers} times too large: norms of the ranks are added"),
            "norm_divided": (1 / workers, f"it is {workers} times too small"),
        }
        for name, (value, text) in known.items():
            if self._is(ratio, value):
                return Cause(name, f"{shown}: {text}")
        if ratio < 1:
            return Cause("norm_partial", f"{shown}: it leaves out a part of the gradients, as a shard")
        if ratio < sqrt(workers):
            return Cause("norm_repeated", f"{shown}: a part of the gradients counts several times, as replicas")
        return Cause("norm_other", f"{shown}: {ratio:.4g} times the norm of the gradients")

    def _learning_rate(self, first: Finding) -> Cause:
        rates = [each for each in self.findings if each.kind == "lr"]
        planned, workers = first.detail["planned"], self.workers
        value, expected = first.detail["value"], first.detail["expected"]
        shown = f"the learning rate of step {first.step} is {value:.6g} instead of {expected:.6g}"

        def follows(index: Any) -> bool:
            places = [(index(each.step - 1), each.detail["value"]) for each in rates]
            known = [(place, rate) for place, rate in places if 0 <= place < len(planned)]
            return bool(known) and all(abs(planned[place] - rate) < 1e-6 * max(planned) for place, rate in known)

        if follows(lambda step: step * workers):
            return Cause("schedule_per_rank", f"{shown}: the schedule advances {workers} times, once for each rank")
        if self.accumulation > 1 and follows(lambda step: step * self.accumulation):
            return Cause("schedule_per_micro_batch", f"{shown}: the schedule advances with each micro-batch")
        if follows(lambda step: step + 1) or follows(lambda step: step - 1):
            return Cause("schedule_shifted", f"{shown}: the schedule is one step off")
        if expected and self._is(value / expected, workers):
            return Cause("rate_scaled", f"{shown}: it is multiplied by the {workers} workers")
        return Cause("learning_rate", f"{shown}: the optimizer does not follow the schedule")

    def _weight_decay(self, first: Finding) -> Cause:
        value, expected = first.detail["value"], first.detail["expected"]
        right = f" instead of {expected:g}" if expected else ", but norms and biases should have none"
        return Cause("weight_decay", f"{describe_names(first.names, [])}: the weight decay is {value:g}{right}")

    def _ranks(self, first: Finding) -> Cause:
        detail = first.detail
        differences: Sequence[float] = next(iter(detail["differences"].values()), ())
        others = [rank for rank, value in enumerate(differences) if value > 0]
        who = f"rank {_list(others)}" if others else "a rank"
        texts = {
            "start": ("initial_ranks", f"{who} starts with other {detail['what']} than rank 0, first {first.worst}: "
                      "they are not broadcast, or the seed differs"),
            "evaluation": ("buffers_of_ranks", f"the ranks evaluate with different buffers, first {first.worst}: they "
                           "are not broadcast from rank 0"),
            "gradients": ("not_reduced", f"the gradients of {describe_names(first.names, [])} differ between the "
                          "ranks: they are not synchronized"),
        }  # fmt: skip
        diverged = (
            f"after step {first.step} {who} has other {detail['what']}, first {first.worst}, though the gradients are "
            "equal: it skips the update, or makes another one"
        )
        return Cause(*texts.get(detail["when"], texts.get(detail["what"], ("rank_diverges", diverged))))

    def _update(self, first: Finding) -> Cause:
        detail, where = first.detail, self._where(first)
        # Weights may have 16 bits from the start. Then rounding loses some updates, but not all.
        is_rounded = detail["rounded"] and not (detail["skipped"] and len(first.names) == detail["parameters"])
        known = {
            "weights_rounded": (is_rounded, f"the updated weights of {where} are rounded to 16 bits"),
            "update_skipped": (detail["skipped"], f"the update changes {where} by nothing: the step is skipped, or the "
                               "optimizer has other parameters than the model"),
            "partly_updated": (detail["unchanged"], f"{detail['unchanged']:.0%} of the values of {where} stay as they "
                               "were, and the others are right: the update of a shard is lost"),
            detail["formula"]: (WRONG_FORMULAS.get(detail["formula"]), f"the update of {where} is wrong: "
                                f"{WRONG_FORMULAS.get(detail['formula'])}"),
        }  # fmt: skip
        causes = (Cause(name, text) for name, (holds, text) in known.items() if holds)
        return next(causes, None) or self._scaled_update(detail, where)

    def _scaled_update(self, detail: Mapping[str, Any], where: str) -> Cause:
        limit, norm, factor = detail["limit"], detail["norm"], detail["clip_factor"]
        own, decay = detail.get("gradient_factor"), detail.get("weight_factor", 0.0)
        if own is None:
            own = 1.0 if detail["formula"] == "not_clipped" else detail["ratio"] * factor
        elif detail["residual"] <= 10 * self.close and abs(decay) > 1e-3:
            return Cause("weight_decay", f"the update of {where} contains {decay:.3g} times the weights: weight decay")
        elif detail["residual"] > 10 * self.close and factor < 1:
            return Cause("clip_not_global", f"the update of {where} is no multiple of the gradients: parameters are "
                         "clipped one by one or in groups, or the update is of another formula")  # fmt: skip
        if factor < 1 and (self._is(own, 1.0) or (own > 0 and "gradient_factor" in detail)):
            return self._clipping(own, norm, limit)
        text = f"the update of {where} is {detail['ratio']:.4g} times what follows from gradients, states and rate"
        if self._is(detail["ratio"], 2.0):
            return Cause("updated_twice", f"{text}: the optimizer makes its step twice")
        return Cause("update", f"{text}: a wrong formula or a wrong factor")

    def _clipping(self, factor: float, norm: float, limit: float) -> Cause:
        """Return the cause of gradients that were clipped by a wrong factor."""
        if self._is(factor, 1.0):
            return Cause("not_clipped", f"the gradients are not clipped: their norm is {norm:.4g}, and the limit "
                         f"{limit:g}")  # fmt: skip
        used = limit / factor
        return Cause("clip_norm", f"the gradients are clipped by a norm of {used:.4g}, but it is {norm:.4g} "
                     f"({used / norm:.3g} times): that of a shard, or of scaled gradients")  # fmt: skip

    def _resume(self, first: Finding) -> Cause:
        what = first.detail.get("what", "")
        texts = {
            "step": "the second run starts from the beginning: the checkpoint is not loaded, or its step is lost",
            "weights": f"the weights after a checkpoint are not those before it, first {first.worst}",
            "buffers": f"the buffers after a checkpoint are not those before it, first {first.worst}",
            "samples": "the resumed run trains on other samples: the position in the data is not restored",
            "lr": "the resumed run has another learning rate: the schedule is not restored",
            "gradients": "the resumed run has other gradients from equal weights and samples: random state or buffers "
            "are not restored",
            "later": "the resumed run makes another update from equal gradients: its optimizer is not fully restored",
        }
        state = f"the optimizer {what} after a checkpoint is not that before it, first {first.worst}"
        return Cause(f"resume_{what if what in texts else 'state'}", texts.get(what, state))


KINDS_OF_PARAMETERS = {"norms": r"norm|ln_|\bln", "embeddings": r"emb|wte|wpe|tokens|positions", "biases": r"bias$"}
"""Kinds of parameters, with what their names contain."""


def describe_names(names: Sequence[str], order: Sequence[str], total: int | None = None) -> str:
    """Return what some parameters have in common."""
    total = total or len(order)
    if total and len(names) == total:
        return f"all {total} parameters"
    if len(names) == 1:
        return names[0]
    blocks = {match[0] if (match := re.match(r".*?\.\d+(?=\.)", name)) else "" for name in names}
    if len(blocks) == 1 and (block := blocks.pop()):
        return f"block {block} ({len(names)} parameters)"
    for kind, pattern in KINDS_OF_PARAMETERS.items():
        if all(re.search(pattern, name) for name in names):
            return f"the {kind} ({len(names)} parameters)"
    return f"{len(names)}{f' of {total}' if total else ''} parameters, first {names[0]}"


def _list(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values))
