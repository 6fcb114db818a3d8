"""Tests of the house: facts have one home. The limits are ratchets: lower them when a number falls."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from distexp.config.keys import options_of
from distexp.strategies.communication import Sharding
from tests.helpers.runs import REPOSITORY

PACKAGE = REPOSITORY / "distexp"
STRATEGY_NAMES = frozenset([*options_of("strategy"), *Sharding, *(f"ZeRO-{stage}" for stage in range(4))])
OPTION_GROUPS = ("strategy=", "sharding=", "zero_stage=")
DECLARED = ("strategies", "config")
"""Packages of the strategies, and of the schema, which lists their options."""

LIBRARIES = {"torch", "transformers"}
"""Next to these names, ``deepspeed`` is a library."""

NAMED_STRATEGIES = {"forecast": 0, "choose": 0, "": 5}
"""Most places that compare the name of a strategy, a sharding or a stage: in a package, and in all but DECLARED."""


def named_strategies(path: Path) -> list[int]:
    """Return the lines of a file that compare the name of a strategy, a sharding or a ZeRO stage.

    They are comparisons, matches, keys of dictionaries, and elements of tuples, lists and sets.
    """
    return sorted({node.lineno for node in ast.walk(ast.parse(path.read_text())) if _names_strategy(node)})


def _names_strategy(node: ast.AST) -> bool:
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        compares_stage = any(getattr(side, "attr", getattr(side, "id", "")) == "zero_stage" for side in sides)
        return any(map(_is_name, sides)) or (
            compares_stage and any(isinstance(getattr(side, "value", None), int) for side in sides)
        )
    if isinstance(node, ast.MatchValue):
        return _is_name(node.value)
    return any(map(_is_name, _members(node)))


def _members(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the keys of a dictionary, or the elements of a container that does not list libraries."""
    if isinstance(node, ast.Dict):
        yield from (key for key in node.keys if key is not None)
    elif isinstance(node, ast.Tuple | ast.List | ast.Set):
        texts = {element.value for element in node.elts if isinstance(element, ast.Constant)}
        yield from () if texts & LIBRARIES else node.elts


def _is_name(node: ast.expr) -> bool:
    if isinstance(node, ast.Attribute):
        return isinstance(node.value, ast.Name) and node.value.id == Sharding.__name__
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        return False
    return node.value in STRATEGY_NAMES or (node.value.startswith(OPTION_GROUPS) and not node.value.endswith("="))


@pytest.mark.parametrize("package", NAMED_STRATEGIES)
def test_strategies_answer_for_themselves(package: str) -> None:
    files = [path for path in (PACKAGE / package).rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in DECLARED]
    found = [f"{path.relative_to(REPOSITORY)}:{line}" for path in files for line in named_strategies(path)]
    assert len(found) <= NAMED_STRATEGIES[package], "\n".join(found)


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ('config.strategy.name == "fsdp"', True),
        ("config.deepspeed.zero_stage == 3", True),
        ('name in ("single", "ddp")', True),
        ('{"ddp": 1.4}[name]', True),
        ("Sharding.NO_SHARD is sharding", True),
        ('print("strategy=single needs one worker")', False),
        ('("torch", "deepspeed")', False),
        ('config.train.compile == "blocks"', False),
    ],
)
def test_a_comparison_with_the_name_of_a_strategy_is_found(tmp_path: Path, text: str, is_found: bool) -> None:
    path = tmp_path / "code.py"
    path.write_text(text)
    assert bool(named_strategies(path)) is is_found
