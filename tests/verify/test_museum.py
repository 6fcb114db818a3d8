"""The museum: each bug is caught, and its cause is named."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.runs import REPOSITORY, run_distexp
from tests.verify.museum.catalog import IMAGE_BUGS, OWN_BUGS, TEXT_BUGS

CONF = Path(__file__).with_name("museum") / "conf"
MUSEUM = (
    *("--multirun", "--json", "--config-dir", str(CONF), "strategy=museum", "engine=museum"),
    *("trusted_packages=[tests]", "cluster.device=cpu"),
)
EXPECTED = {
    "bloom_tiny": {name: bug.cause for name, bug in TEXT_BUGS.items()} | OWN_BUGS,
    "resnet_tiny": {name: bug.cause for name, bug in IMAGE_BUGS.items()},
}
EXAMPLES = (
    *("not_reduced", "last_micro_batch_only", "other_betas", "clipped_before_reduction", "other_initial_weights"),
    *("resumed_without_states", "same_samples", "stale_evaluation", *IMAGE_BUGS),
)
"""A bug of each part of a training: gradients, micro-batches, update, clipping, start, resume, data, evaluation.

The one of the last phase shows that the strategy of the museum without a bug is equal in all others.
"""


def mark(name: str) -> pytest.MarkDecorator:
    """Return the mark of a bug."""
    return pytest.mark.slow if name in EXAMPLES else pytest.mark.release


CASES = [pytest.param(model, name, marks=mark(name)) for model, bugs in EXPECTED.items() for name in bugs]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function with the result of a bug of a model; one command verifies all that have the same mark."""

    @cache
    def of_group(model: str, examples: bool) -> Mapping[str, Mapping[str, Any]]:
        names = [name for name in ("none", *EXPECTED[model]) if (name in EXAMPLES) == examples]
        return verify_bugs(names, model, tmp_path_factory.mktemp("museum"))

    return lambda model, name: of_group(model, name in EXAMPLES)[name]


def verify_bugs(names: Sequence[str], model: str, folder: Path) -> dict[str, dict[str, Any]]:
    bugs = [f"strategy.options.bug={','.join(names)}", f"model={model}"]
    done = run_distexp("verify", *MUSEUM, *bugs, cwd=folder, env={"PYTHONPATH": str(REPOSITORY)})
    assert done.returncode == int(names != ["none"]), done.stdout[-2000:] + done.stderr[-2000:]
    return {result["label"].rpartition("=")[2]: result for result in json.loads(done.stdout)}


@pytest.mark.parametrize(("model", "name"), CASES)
def test_a_bug_is_caught_and_its_cause_is_named(results: Any, model: str, name: str) -> None:
    found = results(model, name)
    assert found["status"] == "different"
    assert found["cause"]["id"] == EXPECTED[model][name], found["cause"]["sentence"]


@pytest.mark.release
@pytest.mark.parametrize("model", EXPECTED)
def test_the_strategy_of_the_museum_without_a_bug_is_equal(results: Any, model: str) -> None:
    assert results(model, "none")["status"] == "equal"
