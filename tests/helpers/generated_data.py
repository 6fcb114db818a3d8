"""Generated data in the official formats of SQuAD v1.1 and TinyImageNet.

It has the oddities of the real data: repeated contexts, unicode, several answers, grayscale images.

The numbers of samples are those of the real subsets, so the same tests hold for both.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SYLLABLES = ("ba", "ce", "di", "fo", "gu", "la", "me", "po", "ru", "te", "vi", "wo", "ka", "él", "šo", "ña", "er", "st")
ODDITIES = ("—", "“quoted”", "東京", "½", "naïve", "ćevapi", "[æpə]", "1,300", "(a)\n(b)", "two  spaces")
TRAIN_QUESTIONS, DEV_QUESTIONS = 269, 810
TRAIN_LENGTHS, DEV_LENGTHS = (60, 800), (20, 600)
"""Minimum and maximum length of a context; most contexts are short."""

CLASSES = 200
TRAIN_IMAGES_PER_CLASS, VAL_IMAGES_PER_CLASS = 10, 2
IMAGE_SIZE = 32


def write_squad(folder: Path) -> None:
    """Write train-v1.1.json and dev-v1.1.json, with one and three answers a question."""
    folder.mkdir(parents=True)
    for split, questions, lengths, answers in (
        ("train", TRAIN_QUESTIONS, TRAIN_LENGTHS, 1),
        ("dev", DEV_QUESTIONS, DEV_LENGTHS, 3),
    ):
        article = _article(random.Random(split), split, questions, lengths, answers)
        content = {"version": "1.1", "data": [article]}
        (folder / f"{split}-v1.1.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _article(rng: random.Random, split: str, questions: int, lengths: tuple[int, int], answers: int) -> dict[str, Any]:
    vocabulary = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 4))) for _ in range(600)]
    paragraphs: list[dict[str, Any]] = []
    while questions:
        if paragraphs and rng.random() < 0.1:
            context = paragraphs[-1]["context"]  # the same context again
        else:
            length = lengths[0] + int((lengths[1] - lengths[0]) * rng.random() ** 3)
            context = " ".join(_words(rng, vocabulary, length))
        count = min(questions, rng.randint(1, 5 * answers))
        questions -= count
        prefix = f"{split}-{len(paragraphs)}"
        entries = [_question(rng, vocabulary, context, f"{prefix}-{number}", answers) for number in range(count)]
        paragraphs.append({"context": context, "qas": entries})
    return {"title": split, "paragraphs": paragraphs}


def _words(rng: random.Random, vocabulary: list[str], count: int) -> list[str]:
    """Draw words; one in 15 is an oddity, and frequent words are drawn more often."""
    weights = [1 / (rank + 1) for rank in range(len(vocabulary))]
    drawn = rng.choices(vocabulary, weights, k=count)
    return [rng.choice(ODDITIES) if rng.random() < 1 / 15 else text for text in drawn]


def _question(rng: random.Random, vocabulary: list[str], context: str, identity: str, answers: int) -> dict[str, Any]:
    question = " ".join(["What", *_words(rng, vocabulary, rng.randint(6, 12))])
    return {
        "id": identity,
        "question": rng.choice(["", " "]) + question + rng.choice(["?", " ?", "? "]),
        "answers": [_answer(rng, context) for _ in range(answers)],
    }


def _answer(rng: random.Random, context: str) -> dict[str, Any]:
    """Choose an answer of one to four neighboring words."""
    starts = [0, *(index + 1 for index, letter in enumerate(context) if letter == " ")]
    first = rng.randrange(len(starts))
    start = starts[first]
    ends = [*(other - 1 for other in starts[first + 1 :]), len(context)]
    text = context[start : ends[min(rng.randrange(4), len(ends) - 1)]]
    return {"answer_start": start, "text": text} if text.strip() else _answer(rng, context)


def write_tinyimagenet(root: Path) -> None:
    """Write train, val and wnids.txt. Some images are grayscale."""
    rng = np.random.default_rng(0)
    wnids = [f"n{1_440_000 + 101 * number:08d}" for number in range(CLASSES)]
    root.mkdir(parents=True)
    (root / "wnids.txt").write_text("\n".join(rng.permutation(wnids)) + "\n")
    for wnid in wnids:
        folder = root / "train" / wnid / "images"
        folder.mkdir(parents=True)
        for number in range(TRAIN_IMAGES_PER_CLASS):
            _save_image(rng, folder / f"{wnid}_{number * 7}.JPEG", grayscale=number == 3)
    images = root / "val" / "images"
    images.mkdir(parents=True)
    lines = []
    for number, wnid in enumerate(rng.permutation(wnids * VAL_IMAGES_PER_CLASS)):
        _save_image(rng, images / f"val_{number}.JPEG", grayscale=number % 40 == 0)
        lines.append(f"val_{number}.JPEG\t{wnid}\t0\t0\t{number % 31}\t31\n")
    (root / "val" / "val_annotations.txt").write_text("".join(lines))


def _save_image(rng: np.random.Generator, path: Path, *, grayscale: bool) -> None:
    """Save a smooth random image, because noise would make a large JPEG."""
    coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
    image = coarse.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BICUBIC)
    (image.convert("L") if grayscale else image).save(path, quality=80)
