"""Tests of the house: facts have one home. The limits are ratchets: lower them when a number falls."""

from __future__ import annotations

import ast
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
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


MIN_MEAN_LINES_OF_FILE = 180
MAX_FILES_IN_FOLDER = 14
MAX_LINES_OF_FILE = 420
MAX_LINES_OF_FUNCTION = 60
MAX_IMPORT_SHARE = 0.072
MAX_SINGLE_IMPORTERS = 40


def test_files_are_few_and_of_a_readable_size() -> None:
    lengths = {name: len(source.splitlines()) for name, source in modules().items()}
    assert statistics.mean(lengths.values()) >= MIN_MEAN_LINES_OF_FILE
    assert {name: length for name, length in lengths.items() if length > MAX_LINES_OF_FILE} == {}
    folders = Counter(path.parent for path in files().values())
    assert {str(folder): count for folder, count in folders.items() if count > MAX_FILES_IN_FOLDER} == {}


def test_imports_are_a_small_share_of_the_lines() -> None:
    lines = sum(len(source.splitlines()) for source in modules().values())
    nodes = (node for module in modules() for node in ast.walk(tree(module)))
    imported = sum(1 + node.end_lineno - node.lineno for node in nodes if isinstance(node, ast.Import | ast.ImportFrom))
    assert imported / lines <= MAX_IMPORT_SHARE


def test_few_modules_have_a_single_importer() -> None:
    importers = defaultdict(set)
    for module, found in imports().items():
        for imported in found:
            importers[imported].add(module)
    entries = ("__init__.py", "__main__.py")
    single = [name for name, found in importers.items() if len(found) == 1 and files()[name].name not in entries]
    assert len(single) <= MAX_SINGLE_IMPORTERS, sorted(single)


def test_functions_are_short() -> None:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    found = [node for module in modules() for node in ast.walk(tree(module)) if isinstance(node, kinds)]
    lengths = sorted(1 + node.end_lineno - node.lineno for node in found)
    assert statistics.median(lengths) <= 9
    assert lengths[int(0.9 * len(lengths))] <= 25
    assert lengths[-1] <= MAX_LINES_OF_FUNCTION


@cache
def files() -> dict[str, Path]:
    """Return the file of each module of the package."""
    paths = (REPOSITORY / "distexp").rglob("*.py")
    return {
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__"): path for path in paths
    }


@cache
def modules() -> dict[str, str]:
    """Return the source of each module of the package."""
    return {name: path.read_text() for name, path in files().items()}


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(modules()[module])


@cache
def imports() -> dict[str, set[str]]:
    """Return the modules that each module imports, also inside of functions and for annotations."""
    return {
        name: {found for node in ast.walk(tree(name)) for found in imported_by(node)} - {name} for name in modules()
    }


def imported_by(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names if alias.name in modules()}
    if isinstance(node, ast.ImportFrom) and node.module:
        names = {f"{node.module}.{alias.name}" for alias in node.names} & modules().keys()
        return names or ({node.module} & modules().keys())
    return set()
