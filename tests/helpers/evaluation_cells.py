"""What evaluation is held to: questions learnt by heart, with references whose scores are known by hand."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Asked:
    """A name to ask for, the answer that is learnt, and the scores that it earns with the references."""

    name: str
    learnt: str
    references: tuple[str, ...]
    exact: bool
    f1: float


ASKED = (  # seven: neither 3 nor 6 workers share them evenly
    Asked("Ada", "blue whale", ("The Blue Whale!",), True, 1),
    Asked("Bo", "green tea", ("tea",), False, 2 / 3),
    Asked("Dina", "red kites", ("trains",), False, 0),
    Asked("Flora", "long walks", ("walks", "very long walks"), False, 4 / 5),
    Asked("Ida", "the sea", ("a sea",), True, 1),
    Asked("Kim", "bread and butter", ("bread",), False, 1 / 2),
    Asked("Louise", "old maps", ("new maps", "old maps"), True, 1),
)
EXACT_MATCH = 100 * sum(asked.exact for asked in ASKED) / len(ASKED)
F1 = 100 * sum(asked.f1 for asked in ASKED) / len(ASKED)
LEARNT = {f"{asked.name}-{index}": asked.learnt for index, asked in enumerate(ASKED)}
REPEATS = 48  # of each question in the training set

ANSWERS = (
    "model=gpt_tiny",
    "dataset=squad",
    "dataset.train_path=QUESTIONS/train.json",
    "dataset.eval_path=QUESTIONS/eval.json",
    "dataset.train_size=null",
    "dataset.eval_size=null",
    "dataset.max_length=40",
    "dataset.answer_tokens=8",
    "train.score_answers=true",
    "train.eval_batch_size=2",
    "train.max_steps=60",
    "train.learning_rate=0.006",
)
SWAPPED = (*ANSWERS, "dataset.eval_path=QUESTIONS/swapped.json")
IMAGES = (
    "model=resnet_tiny",
    "model._target_=image_model.build",
    "trusted_packages=[image_model]",
    "train.optimizer=adamw",
    "train.save_model=false",
    "train.eval_batch_size=4",
)


def evaluated(**strategies: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Cells whose evaluation is looked at: answers and images under each strategy."""
    kinds = {"answers": ANSWERS, "images": IMAGES}
    return {
        f"{kind}_{name}": (*overrides, *strategy)
        for name, strategy in strategies.items()
        for kind, overrides in kinds.items()
    }


def write_questions(folder: Path) -> None:
    """The files of ``ANSWERS``, and one with each question's references at the question before it."""
    folder.mkdir(parents=True)
    _write(folder / "train.json", [(asked.learnt,) for asked in ASKED], repeats=REPEATS)
    references = [asked.references for asked in ASKED]
    _write(folder / "eval.json", references)
    _write(folder / "swapped.json", [*references[1:], *references[:1]])


def _write(path: Path, answers: list[tuple[str, ...]], repeats: int = 1) -> None:
    paragraphs = []
    for index, (asked, texts) in enumerate(list(zip(ASKED, answers, strict=True)) * repeats):
        question = {
            "id": f"{asked.name}-{index}",
            "question": f"What does {asked.name} like?",
            "answers": [{"text": text, "answer_start": 0} for text in texts],
        }
        # Contexts of several lengths, so that the prompts of a batch end at different places.
        paragraphs.append({"context": "Well. " * (index % len(ASKED) % 5 + 1), "qas": [question]})
    path.write_text(json.dumps({"version": "1.1", "data": [{"title": "likes", "paragraphs": paragraphs}]}))
