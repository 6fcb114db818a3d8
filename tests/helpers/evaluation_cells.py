"""Cells that test the evaluation: memorized questions, whose scores were computed by hand."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Question:
    """A question about a person, the memorized answer, and its scores against the references."""

    name: str
    answer: str
    references: tuple[str, ...]
    exact: bool
    f1: float


QUESTIONS = (  # seven, which neither 3 nor 6 workers divide
    Question("Ada", "blue whale", ("The Blue Whale!",), True, 1),
    Question("Bo", "green tea", ("tea",), False, 2 / 3),
    Question("Dina", "red kites", ("trains",), False, 0),
    Question("Flora", "long walks", ("walks", "very long walks"), False, 4 / 5),
    Question("Ida", "the sea", ("a sea",), True, 1),
    Question("Kim", "bread and butter", ("bread",), False, 1 / 2),
    Question("Louise", "old maps", ("new maps", "old maps"), True, 1),
)
EXACT_MATCH = 100 * sum(question.exact for question in QUESTIONS) / len(QUESTIONS)
F1 = 100 * sum(question.f1 for question in QUESTIONS) / len(QUESTIONS)
MEMORIZED = {f"{question.name}-{index}": question.answer for index, question in enumerate(QUESTIONS)}
REPEATS = 240  # of each question in the training set, so that it is evaluated once

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
    "train.micro_batch_size=8",
    "train.global_batch_size=24",
)
SWAPPED = (*ANSWERS, "dataset.eval_path=QUESTIONS/swapped.json")
IMAGES = (
    "model=resnet_tiny",
    "model._target_=image_model.build",
    "trusted_packages=[image_model]",
    "train.optimizer=adamw",
    "train.save_model=false",
    "train.eval_batch_size=4",
    "train.max_steps=7",
)


def evaluation_cells(**strategies: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Return the cells whose evaluation is tested: answers and images with each strategy."""
    kinds = {"answers": ANSWERS, "images": IMAGES}
    return {
        f"{kind}_{name}": (*overrides, *strategy)
        for name, strategy in strategies.items()
        for kind, overrides in kinds.items()
    }


def write_questions(folder: Path) -> None:
    """Write the files of ``ANSWERS``, and ``swapped.json`` with each question's references at the previous question."""
    folder.mkdir(parents=True)
    _write(folder / "train.json", [(question.answer,) for question in QUESTIONS], repeats=REPEATS)
    references = [question.references for question in QUESTIONS]
    _write(folder / "eval.json", references)
    _write(folder / "swapped.json", [*references[1:], *references[:1]])


def _write(path: Path, answers: list[tuple[str, ...]], repeats: int = 1) -> None:
    paragraphs = []
    for index, (question, texts) in enumerate(list(zip(QUESTIONS, answers, strict=True)) * repeats):
        entry = {
            "id": f"{question.name}-{index}",
            "question": f"What does {question.name} like?",
            "answers": [{"text": text} for text in texts],
        }
        # Contexts of several lengths, so that the prompts of a batch have different lengths.
        paragraphs.append({"context": "Well. " * (index % len(QUESTIONS) % 5 + 1), "qas": [entry]})
    path.write_text(json.dumps({"version": "1.1", "data": [{"title": "likes", "paragraphs": paragraphs}]}))
