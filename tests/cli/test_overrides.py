"""Quotes around the choices of config groups, which Hydra would read as numbers or booleans."""

from __future__ import annotations

import pytest

from distexp.config.keys import config_groups
from distexp.config.overrides import quote_choice


@pytest.mark.parametrize(
    ("typed", "quoted"),
    [
        ("zero_stage=1,2,3", "zero_stage='1','2','3'"),
        ("zero_stage=3", "zero_stage='3'"),
        ("zero_stage=range(1,4)", "zero_stage='1','2','3'"),
        ("zero_stage=choice(0,3)", "zero_stage='0','3'"),
        ("offload=true,false", "offload='true','false'"),
        ("offload=True", "offload='true'"),
        ("offload=pinned", "offload=pinned"),
        ("offload='false'", "offload='false'"),
        ("model='größe'", "model='größe'"),
        (r"model='ada\'s'", r"model='ada\'s'"),
        ("strategy=glob(*)", "strategy=glob(*)"),
        ("experiment=deepspeed/zero_stages", "experiment=deepspeed/zero_stages"),
        ("train.max_steps=1,2", "train.max_steps=1,2"),
    ],
)
def test_choices_are_quoted_for_hydra(typed: str, quoted: str) -> None:
    assert quote_choice(typed, config_groups()) == quoted
