"""Values that are wrong regardless of all other values."""

from __future__ import annotations

import pytest

from distexp.config import ConfigError
from tests.helpers.runs import resolve_cell


@pytest.mark.parametrize("key", ["cluster.partition", "cluster.account", "cluster.name", "model.name"])
def test_a_text_with_a_line_break_is_refused(key: str) -> None:
    """A line break would start a shell line in the sbatch file."""
    with pytest.raises(ConfigError, match=rf"{key}='a\\ntouch b' contains a control character: leave it out"):
        resolve_cell("cluster=slurm", f'{key}="a\ntouch b"')


@pytest.mark.parametrize("key", ["cluster.timeout_min", "cluster.hang_timeout_min", "train.learning_rate"])
def test_infinite_numbers_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}=inf must be a finite number"):
        resolve_cell(f"{key}=inf")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.log_every=1000000000000000000", "has more than 12 digits: lower it"),
        ("ddp.bucket_cap_mb=1e99", r"ddp.bucket_cap_mb=1e\+99 must be above 0 and below 1e\+06"),
        ("cluster.hang_timeout_min=1e99", "cluster.hang_timeout_min=1e.99 must be above 0 and below 30000"),
        ("plan.timeout_s=1e99", r"plan.timeout_s=1e\+99 is too large: it must be below 1e\+06"),
        ("train.learning_rate=1e99", r"is too large: it must be below 3e\+38"),
        ("train.gradient_clipping=1e99", r"is too large: it must be below 3e\+38"),
        ("train.seed=4294967296", "train.seed=4294967296 must be from 0 to below"),
        ("model.keys=[path,nonsense]", "model.keys contains 'nonsense', which is not a key of model: leave it out"),
        ("dataset.keys=[[1]]", r"dataset.keys contains \[1\], which is not a key of dataset: leave it out"),
    ],
)
def test_values_that_no_run_can_have_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_cell(override)


def test_an_option_of_sbatch_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"cluster.sbatch.comment='x\\n#SBATCH --uid=0' contains a control character"):
        resolve_cell("cluster=slurm", '+cluster.sbatch.comment="x\n#SBATCH --uid=0"')
