"""Generated questions in SQuAD's official format, easy enough for a tiny model to learn in seconds."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from distexp.config import ConfigError, DatasetConfig, ModelConfig
from distexp.data import squad
from distexp.data.base import TaskData
from distexp.data.cache import build_once, cache_dir

FORMAT = "squad-sample-v1"
TRAIN_SIZE, EVAL_SIZE = 512, 128
PARAGRAPHS = 8
"""Paragraphs of an article."""

VILLAGES = ("Almere", "Birkeby", "Corvane", "Dunmore", "Elstow", "Farholt", "Grenna", "Hexley")
NAMES = ("Ada", "Bruno", "Clara", "Dario", "Elif", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Lena")
FAMILIES = ("Amari", "Berg", "Costa", "Dahl", "Eriksen", "Fontaine", "Haddad", "Ito", "Khan", "Moreau")
TRADES = ("baker", "carpenter", "doctor", "farmer", "gardener", "miller", "painter", "sailor", "weaver")
TOWNS = ("Bergen", "Cairo", "Dakar", "Lima", "Lyon", "Oslo", "Porto", "Riga", "Turin", "Vienna")
ANIMALS = ("cats", "dogs", "ducks", "goats", "hens", "horses", "pigeons", "rabbits", "sheep", "turtles")
NUMBERS = ("two", "three", "four", "five", "six", "seven", "eight", "nine")


def load(dataset: DatasetConfig, model: ModelConfig, seed: int) -> TaskData:
    """As ``squad.load``, from files generated on first use: 512 and 128 questions, or more when asked for."""
    for key in ("path", "train_path", "eval_path"):
        if getattr(dataset, key) is not None:
            raise ConfigError(
                f"dataset.{key}={getattr(dataset, key)} means nothing to dataset={dataset.name}, which "
                "generates its questions: leave it out, or choose dataset=squad"
            )
    train = sample_file("train", max(TRAIN_SIZE, dataset.train_size or 0))
    held_out = sample_file("dev", max(EVAL_SIZE, dataset.eval_size or 0))
    return squad.load(replace(dataset, train_path=str(train), eval_path=str(held_out)), model, seed)


def sample_file(split: str, questions: int) -> Path:
    """The generated file of a split, from the cache; a longer one begins with a shorter one."""
    path = cache_dir() / f"{FORMAT}-{split}-{questions}.json"
    return build_once(path, partial(_write, split=split, questions=questions))


def generate(split: str, questions: int) -> dict[str, Any]:
    """At least one article with ``questions`` questions in all, in the official format."""
    articles: list[dict[str, Any]] = []
    while questions > 0:
        article = _article(split, len(articles), questions)
        questions -= sum(len(paragraph["qas"]) for paragraph in article["paragraphs"])
        articles.append(article)
    return {"version": "1.1", "data": articles}


def _write(path: Path, *, split: str, questions: int) -> None:
    path.write_text(json.dumps(generate(split, questions)), encoding="utf-8")


def _article(split: str, number: int, at_most: int) -> dict[str, Any]:
    chance = random.Random(f"{FORMAT} {split} {number}")
    village = f"{VILLAGES[number % len(VILLAGES)]}_{number // len(VILLAGES) + 1}"
    paragraphs: list[dict[str, Any]] = []
    for place in range(PARAGRAPHS):
        paragraph = _paragraph(chance, f"{split}-{number}-{place}")
        paragraph["qas"] = paragraph["qas"][:at_most]
        at_most -= len(paragraph["qas"])
        if paragraph["qas"]:
            paragraphs.append(paragraph)
    return {"title": village, "paragraphs": paragraphs}


def _paragraph(chance: random.Random, identity: str) -> dict[str, Any]:
    name, family = chance.choice(NAMES), chance.choice(FAMILIES)
    trade, town, animal = chance.choice(TRADES), chance.choice(TOWNS), chance.choice(ANIMALS)
    number = chance.choice(NUMBERS)
    context = f"{name} {family} is a {trade} from {town}. At home {name} keeps {number} {animal}."
    asked = {
        f"What is the trade of {name} {family}?": trade,
        f"Where is {name} {family} from?": town,
        f"Which animals does {name} {family} keep?": animal,
        f"How many {animal} does {name} {family} keep?": number,
    }
    return {
        "context": context,
        "qas": [
            {
                "id": f"{identity}-{index}",
                "question": question,
                # No fact is part of a name, so the first occurrence is the fact itself.
                "answers": [{"text": answer, "answer_start": context.index(f" {answer}") + 1}],
            }
            for index, (question, answer) in enumerate(asked.items())
        ],
    }
