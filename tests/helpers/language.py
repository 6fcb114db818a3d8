"""Checks of the project's language: ``python -m tests.helpers.language [PATH ...]`` lists what to rewrite.

Readers search for the terms they know, and many are not native speakers. ``BANNED`` lists what earlier versions
used instead of the field's words; ``docs/glossary.md`` lists the terms to use.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = ("distexp", "hydra_plugins", "conf", "tests", "benchmarks", "examples", "docs", "Makefile", "pyproject.toml")
SUFFIXES = (".py", ".yaml", ".yml", ".md", ".toml", ".html", ".js", ".css", ".jinja", ".sh", "")
GENERATED = ("docs/results/", "tests/helpers/language.py", "tests/test_language.py")

BRITISH_STEMS = r"ali|ili|oni|ani|eri|ori|imi|\Bari|asi|eni|iti|eli|gni|nti"

BANNED = {
    r"(?<![a-z])(tells?|told|telling)(?![a-z])": "report, log, print or write",
    r"(?<![a-z])(say|says|said|saying)(?![a-z])": "state, report, print, show or mean",
    r"\bin words\b|\bwords? (for|of|that|from)\b": "message, argument, option or override",
    r"(?<![a-z])beside(?![a-z])": "next to, or with",
    r"(?<![a-z])anew(?![a-z])": "again",
    r"(?<![a-z])(mend|mends|mended|mending|amiss)(?![a-z])": "fix, hint or wrong",
    r"(?<![a-z])(?<!segmentation )(?<!page )faults?(?![a-z])(?! toleran)": "error",
    r"(?<![a-z])(judge|judges|judged|judging)(?![a-z])": "check or validate",
    r"(?<![a-z\"])chance(?![a-z\"])": "randomness, RNG or random state",
    r"(?<![a-z])(begun|began)(?![a-z])": "started",
    r"\b(go|goes|going|gone|went) on\b": "resume or continue",
    r"(?<![a-z])(go|goes|went)_on(?![a-z])": "resume or continue",
    r"\bof (one's|your|their|his) own\b": "custom",
    r"\b(whoever|whatever|nobody|oftener|aloud|whence|whereof|thereof|hence|lest)\b": "a plain word",
    r"\bfor want of\b": "without",
    r"\bstands?\b(?!-in)(?! for\b)(?! alone\b)": "is",
    r"\bhas it\b(?! that)|\bhas it that\b": "name who reports it",
    r"\b(is|was|were|be|are) asked for\b|\basked for\b": "requested",
    r"\bto be had\b": "available",
    r"\bin (a|one) sentence\b|\ba sentence (for|of|each)\b": "message, or leave it out",
    r"\bwhere (there (is|are|was|were)|nobody|none|no)\b": "if",
    r", for (it|they|there|these|those|this|that|such|what)\b": "because",
    r"(?<![a-z])colou?rs?(?<!color)(?<!colors)(?![a-z])": "color",
    rf"(?:{BRITISH_STEMS})s(?:e|ed|es|er|ers|ing|ations?)\b": "-ize",
    r"(?<![a-z])(behaviour|favour|neighbour|centre|licence|artefact|labelled|analyse[ds]?)(?![a-z])": "American",
}
"""Patterns, ignoring case, with what to write instead. Parts of snake_case names count as words."""

PATTERNS = {re.compile(pattern, re.IGNORECASE): advice for pattern, advice in BANNED.items()}

ALLOWED = (
    re.compile(r"CANCELLED"),
    re.compile(r"nan_?to_?num", re.IGNORECASE),
    re.compile(r"DEFAULTS?"),
)

IMPERATIVES = """
accept accumulate add adjust align allocate allow append apply archive arrange ask assert assign attach
average bind bring broadcast build bundle cache calculate call cancel cap cast change check choose claim
classify clear clip clone close collate collect color combine compare compile complete compose compress
compute configure confirm connect consume continue convert copy count create crop cut decide decode default
define delete derive describe detach detect determine discard disconnect discover display distribute divide
download drain draw drop dump embed emit enable encode end ensure enter enumerate escape estimate evaluate
exchange exclude execute exit expand explain export extend extract fail fetch fill filter finalize find finish
fit flatten flip flush follow fork format forward free freeze gather generate get give group guess handle hash hide
hold identify ignore import include index infer initialize insert inspect install instantiate integrate
interpolate interrupt invert iterate join keep kill label launch leave let limit link list load locate lock
log look lower make map mark mask match materialize measure merge move multiply name narrow normalize note
number observe offer open order overwrite pack pad parse pass patch pick place plan poll pop predict prefix
prepare prevent preview print probe process produce profile prune publish pull push put quote raise rank read
rebuild receive record redirect reduce refuse register reject release reload remove rename render repeat
replace report request requeue require reserve reset reshape resize resolve restart restore restrict resume
retry return reuse reverse round route run sample save scale scan schedule score search seed select send
separate serialize serve set shard share shift shorten show shrink shuffle shut signal skip slice smooth
snapshot solve sort spawn split stack start state stop store stream strip submit subscribe substitute suggest
sum summarize suppress suspend swap switch synchronize take test tokenize total trace track train transform
translate traverse truncate try turn unpack update upload use validate verify visit wait walk warm warn watch
weigh widen wrap write yield zip
"""
"""Verbs that a function's docstring may start with. Add one if it is missing."""


@dataclass(frozen=True)
class Problem:
    """One place to rewrite."""

    path: Path
    line: int
    text: str
    advice: str

    def __str__(self) -> str:
        path = self.path.relative_to(REPOSITORY) if self.path.is_relative_to(REPOSITORY) else self.path
        return f"{path}:{self.line}: {self.text!r}: {self.advice}"


def source_files(paths: Iterable[Path] = ()) -> Iterator[Path]:
    """Yield the text files below some paths, or those of the whole project."""
    roots = [Path(path).resolve() for path in paths] or [
        *(REPOSITORY / name for name in SOURCES if (REPOSITORY / name).exists()),
        *REPOSITORY.glob("*.md"),
    ]
    for root in roots:
        found = sorted(root.rglob("*")) if root.is_dir() else [root]
        for path in found:
            name = path.as_posix().removeprefix(REPOSITORY.as_posix() + "/")
            skipped = (name.startswith(GENERATED) and not name.endswith(".md")) or name in GENERATED
            if path.is_file() and path.suffix in SUFFIXES and not skipped and "__pycache__" not in name:
                yield path


def banned_words(path: Path) -> Iterator[Problem]:
    """Yield each banned pattern of a file."""
    lines = path.read_text(errors="replace").splitlines()
    text = "\n".join(line if len(line) <= 2000 else "" for line in lines)  # without packed data
    if path.name == "CHANGELOG.md":
        text = re.sub(r"`[^`\n]*`", "", text)  # old names
    for pattern, advice in PATTERNS.items():
        for match in pattern.finditer(text):
            if not any(allowed.fullmatch(match[0]) for allowed in ALLOWED):
                yield Problem(path, text.count("\n", 0, match.start()) + 1, match[0], advice)


def noun_docstrings(path: Path) -> Iterator[Problem]:
    """Yield the functions whose docstrings do not start with an imperative verb; properties and tests are exempt."""
    verbs = frozenset(IMPERATIVES.split())
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        decorators = {ast.unparse(decorator).split(".")[-1] for decorator in node.decorator_list}
        text = ast.get_docstring(node)
        if text is None or decorators & {"property", "cached_property", "setter"} or node.name.startswith("test_"):
            continue
        first = re.split(r"\W", text.strip(), maxsplit=1)[0]
        if first.lower() not in verbs:
            yield Problem(path, node.lineno, text.splitlines()[0][:60], "start with an imperative verb")


@dataclass(frozen=True)
class Prose:
    """Size of the sentences of a page."""

    sentences: int
    words: int
    marks: int

    @property
    def words_per_sentence(self) -> float:
        """Mean length of a sentence."""
        return self.words / max(self.sentences, 1)

    @property
    def marks_per_100(self) -> float:
        """Commas, colons and semicolons in 100 sentences."""
        return 100 * self.marks / max(self.sentences, 1)


def measure_prose(text: str) -> Prose:
    """Measure the sentences of a Markdown page; code, tables, headings, links' addresses and HTML do not count."""
    text = re.sub(r"(?ms)^( *)(```|~~~).*?^\1\2", "", text)
    lines = [line for line in text.splitlines() if not re.match(r"^(    |\t|\||#|<|---|\s*\||!\[)", line)]
    prose = "\n".join(re.sub(r"^\s*([-*]|\d+\.)\s+", "\n", line) for line in lines)
    prose = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "CODE", prose))
    sentences = [
        sentence
        for block in re.split(r"\n\s*\n", prose)
        for sentence in re.split(r"(?<=[.!?])\s+", block.strip())
        if len(sentence.split()) > 1
    ]
    words = sum(len(sentence.split()) for sentence in sentences)
    marks = sum(len(re.findall(r";|,(?!\d)|:(?=\s|$)", sentence)) for sentence in sentences)
    return Prose(len(sentences), words, marks)


def find_problems(paths: Iterable[Path] = ()) -> Iterator[Problem]:
    """Yield everything to rewrite below some paths."""
    for path in source_files(paths):
        yield from banned_words(path)
        if path.suffix == ".py":
            yield from noun_docstrings(path)


def main() -> int:
    """Print the problems of the given paths, or of the whole project."""
    problems = list(find_problems([Path(argument) for argument in sys.argv[1:]]))
    print(*problems, f"{len(problems)} places to rewrite", sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
