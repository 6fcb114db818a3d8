"""Generated questions in the format of SQuAD, which a tiny model learns in seconds."""

import json
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from distexp.config import ConfigError, DatasetConfig, ModelConfig
from distexp.config.model_checks import SQUAD_SAMPLE_EVAL, SQUAD_SAMPLE_TRAIN
from distexp.data import squad
from distexp.data.base import TaskData
from distexp.system.cache_dir import build_once, cache_dir

FORMAT = "squad-sample-v1"
PARAGRAPHS = 8

VILLAGES = ("Almere", "Birkeby", "Corvane", "Dunmore", "Elstow", "Farholt", "Grenna", "Hexley")
NAMES = ("Ada", "Bruno", "Clara", "Dario", "Elif", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Lena")
FAMILIES = ("Amari", "Berg", "Costa", "Dahl", "Eriksen", "Fontaine", "Haddad", "Ito", "Khan", "Moreau")
TRADES = ("baker", "carpenter", "doctor", "farmer", "gardener", "miller", "painter", "sailor", "weaver")
TOWNS = ("Bergen", "Cairo", "Dakar", "Lima", "Lyon", "Oslo", "Porto", "Riga", "Turin", "Vienna")
ANIMALS = ("cats", "dogs", "ducks", "goats", "hens", "horses", "pigeons", "rabbits", "sheep", "turtles")
NUMBERS = ("two", "three", "four", "five", "six", "seven", "eight", "nine")


def load(dataset: DatasetConfig, model: ModelConfig, seed: int) -> TaskData:
    """Load questions that are generated on first use: as many as in ``model_checks``, or as ``dataset`` requests.

    Raise ConfigError if a path is set.
    """
    for key in ("path", "train_path", "eval_path"):
        if getattr(dataset, key) is not None:
            raise ConfigError(
                f"dataset.{key}={getattr(dataset, key)} has no effect with dataset={dataset.name}, because its "
                f"questions are generated: remove dataset.{key}, or use dataset=squad"
            )
    train = sample_file("train", max(SQUAD_SAMPLE_TRAIN, dataset.train_size or 0))
    held_out = sample_file("dev", max(SQUAD_SAMPLE_EVAL, dataset.eval_size or 0))
    return squad.load(replace(dataset, train_path=str(train), eval_path=str(held_out)), model, seed)


def sample_file(split: str, questions: int) -> Path:
    """Return the file of a split, generated on first use. A larger file starts with the questions of a smaller one."""
    path = cache_dir() / f"{FORMAT}-{split}-{questions}.json"
    return build_once(path, partial(_write, split=split, questions=questions))


def generate(split: str, questions: int) -> dict[str, Any]:
    """Generate articles with a total of ``questions`` questions."""
    articles: list[dict[str, Any]] = []
    while questions > 0:
        article = _make_article(split, len(articles), questions)
        questions -= sum(len(paragraph["qas"]) for paragraph in article["paragraphs"])
        articles.append(article)
    return {"version": "1.1", "data": articles}


def _write(path: Path, *, split: str, questions: int) -> None:
    path.write_text(json.dumps(generate(split, questions)), encoding="utf-8")


def _make_article(split: str, number: int, max_questions: int) -> dict[str, Any]:
    rng = random.Random(f"{FORMAT} {split} {number}")
    village = f"{VILLAGES[number % len(VILLAGES)]}_{number // len(VILLAGES) + 1}"
    paragraphs: list[dict[str, Any]] = []
    for index in range(PARAGRAPHS):
        paragraph = _make_paragraph(rng, f"{split}-{number}-{index}")
        paragraph["qas"] = paragraph["qas"][:max_questions]
        max_questions -= len(paragraph["qas"])
        if paragraph["qas"]:
            paragraphs.append(paragraph)
    return {"title": village, "paragraphs": paragraphs}


def _make_paragraph(rng: random.Random, identity: str) -> dict[str, Any]:
    name, family = rng.choice(NAMES), rng.choice(FAMILIES)
    trade, town, animal = rng.choice(TRADES), rng.choice(TOWNS), rng.choice(ANIMALS)
    number = rng.choice(NUMBERS)
    context = f"{name} {family} is a {trade} from {town}. At home {name} keeps {number} {animal}."
    answers = {
        f"What is the trade of {name} {family}?": trade,
        f"Where is {name} {family} from?": town,
        f"Which animals does {name} {family} keep?": animal,
        f"How many {animal} does {name} {family} keep?": number,
    }
    qas = []
    for index, (question, answer) in enumerate(answers.items()):
        # No answer is part of a name, so its first occurrence is the answer itself.
        found = {"text": answer, "answer_start": context.index(f" {answer}") + 1}
        qas.append({"id": f"{identity}-{index}", "question": question, "answers": [found]})
    return {"context": context, "qas": qas}
