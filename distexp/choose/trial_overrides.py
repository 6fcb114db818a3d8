"""The overrides that make a short trial of a training."""

from __future__ import annotations

from distexp.config import Config

EXCLUDED_STEPS = 3
"""First steps of a trial that are not measured: compilation, and the recording of CUDA graphs."""

SHORTEST_LIMIT_MIN = 10.0
"""Least time limit of a trial. The first one may download and tokenize the data."""


def trial_overrides(config: Config, steps: int, budget_min: float) -> list[str]:
    """Return what makes a training a trial: few steps, each logged, no evaluation, and no other output.

    The model, the global batch, the seed and the order of the data stay the same.

    Args:
        config: Resolved configuration of the candidate.
        steps: Number of measured steps.
        budget_min: Budget of the search in minutes.
    """
    total, train = steps + EXCLUDED_STEPS, config.train
    limit = max(budget_min, SHORTEST_LIMIT_MIN)
    found = [
        f"train.max_steps={total}",
        f"train.num_epochs={total}",  # A small data set has fewer steps in an epoch.
        f"train.measure_after_step={EXCLUDED_STEPS}",
        "train.log_every=1",
        "train.checkpoint_every=null",
        "train.resume=null",
        "train.save_model=false",
        "train.evaluate=false",
        "train.score_answers=false",
        "train.profile_steps=0",
        "profile=false",
        "tracker=none",
        "preflight.enabled=false",
        f"cluster.timeout_min={min(limit, config.cluster.timeout_min or limit):g}",
    ]
    samples = train.global_batch_size
    if samples is not None and "eval_size" in config.dataset.keys:
        found.append(f"dataset.eval_size={min(samples, config.dataset.eval_size or samples)}")
    return found
