"""Own data: texts, conversations and image folders by one override, and files with wrong rows."""

from __future__ import annotations

import csv
import gzip
import json
import math
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pytest
import torch
from omegaconf import OmegaConf
from PIL import Image
from pyarrow import parquet
from torch.nn import functional
from torchvision import transforms
from transformers import AutoTokenizer

from distexp.cli.errors import data_overrides, explain_option
from distexp.config import Config, ConfigError
from distexp.config.custom_code import locate
from distexp.data.base import IGNORE, TaskData
from distexp.data.sources.formats import messages_error, read_turn, text_format
from distexp.data.sources.rows import find_files, is_held_out, open_rows
from distexp.distributed.context import Context
from distexp.resolve import resolve
from distexp.runs.record import RunRecord
from distexp.system.seeding import seed_everything
from distexp.training.build import load_data, model_factory, token_counts
from tests.helpers.datasets import save_sentencepiece
from tests.helpers.hand_written_loop import NativeLoop
from tests.helpers.runs import compose_cell, resolve_cell, run_distexp

WORDS = ("the", "a", "cat", "dog", "runs", "sleeps", "big", "small", "red", "tree", "house", "and", "then", "sees")
ONE_WORKER = ("strategy=single", "cluster.workers_per_node=1", "cluster.device=cpu", "train.micro_batch_size=1")
TEXT = ("model=gpt_tiny", "dataset.max_length=32", *ONE_WORKER)
IMAGES = ("model=resnet_tiny", "dataset.image_size=16", *ONE_WORKER)


def documents(count: int = 40) -> list[str]:
    """Return texts of 3 to 60 words."""
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(WORDS, rng.integers(3, 60))) for _ in range(count)]


def write_lines(path: Path, lines: list[Any]) -> Path:
    """Write a file of JSON Lines."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def conversation(text: str) -> dict[str, Any]:
    """Return a conversation with two answers."""
    turns = (("user", text[:9]), ("assistant", "one " + text[:5]), ("user", "and?"), ("assistant", "two"))
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def save_image(path: Path, mode: str = "RGB", size: tuple[int, int] = (20, 14)) -> None:
    """Save an image of a gradient."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.linear_gradient("L").resize(size).convert("RGB").convert(mode).save(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write one file or folder of each kind."""
    folder, texts = tmp_path_factory.mktemp("own"), documents()
    (folder / "notes.txt").write_text("\n\n".join(text.replace(" then", "\nthen") for text in texts))
    write_lines(folder / "my.jsonl", [{"id": number, "text": text} for number, text in enumerate(texts)])
    (folder / "list.json").write_text(json.dumps([{"body": text} for text in texts], indent=1))
    with (folder / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["n", "text"], *((n, f'{text}, "a"\nb') for n, text in enumerate(texts))])
    datasets.Dataset.from_dict({"text": texts}).to_parquet(folder / "my.parquet")
    datasets.DatasetDict(
        train=datasets.Dataset.from_dict({"text": texts}), validation=datasets.Dataset.from_dict({"text": texts[:5]})
    ).save_to_disk(folder / "saved")
    write_lines(folder / "qa.jsonl", [{"question": text[:20], "reply": text[20:30] or "x"} for text in texts])
    write_lines(folder / "chat.jsonl", [conversation(text) for text in texts])
    for number in range(24):
        mode, ending = [("RGB", "jpg"), ("L", "bmp"), ("RGBA", "png"), ("CMYK", "tif"), ("P", "gif")][number % 5]
        save_image(folder / "photos" / "abc"[number % 3] / f"{number}.{ending}", mode, (10 + number, 20))
    return folder


PATHS = ("dataset.path", "dataset.eval_path")


def resolve_data(*overrides: str) -> Config:
    """Return the resolved configuration of a command line.

    Simple paths are set without Hydra, which composes the same options again for each path.
    """
    pairs = [text.partition("=") for text in overrides]
    simple = [(key, path) for key, _, path in pairs if key in PATHS and re.fullmatch(r"[\w./-]+", path)]
    content, choices = compose_cell(*(text for text in overrides if tuple(text.split("=", 1)) not in simple))
    for key, path in simple:
        OmegaConf.update(content, key, path)
    return resolve(content, choices)


OVERRIDES = {
    "notes.txt": "dataset=text",
    "my.jsonl": "dataset=text",
    "list.json": "dataset=text dataset.column=body",
    "table.csv": "dataset=text",
    "my.parquet": "dataset=text",
    "saved": "dataset=text",
    "qa.jsonl": "dataset=chat dataset.prompt_column=question dataset.answer_column=reply",
    "chat.jsonl": "dataset=chat dataset.chat_template=zephyr",
    "photos": "dataset=image_folder model=resnet_tiny dataset.image_size=16",
}
"""Overrides for each kind of data, without the path."""

TRAINED = ("list.json", "saved", "qa.jsonl", "chat.jsonl", "photos")
"""Kinds of data that train. The samples of the other texts are compared with their documents."""


@pytest.mark.slow
def test_each_kind_of_data_trains_by_one_override(files: Path, tmp_path: Path) -> None:
    cells = [[*OVERRIDES[name].split(), f"dataset.path={files / name}"] for name in TRAINED]
    cells += [["dataset=squad_sample", "dataset.targets=all"]]
    sweep = f"sweep.cells={json.dumps(cells, separators=(',', ':'))}"
    words = (
        "model=gpt_tiny",
        *ONE_WORKER[:-1],
        "train.micro_batch_size=2",
        "train.max_steps=2",
        "hydra.sweep.dir=runs",
    )
    done = run_distexp("--multirun", *words, sweep, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [RunRecord.read(tmp_path / "runs" / str(number) / "record.json") for number in range(len(cells))]
    assert [record.status for record in records] == ["completed"] * len(cells)
    assert all(math.isfinite(record.metrics.eval_losses[-1]) for record in records)


@pytest.mark.parametrize("name", OVERRIDES)
def test_a_path_as_dataset_names_the_line_to_type(name: str, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    message = explain_option("dataset", name, [])
    if name == "photos":
        done = run_distexp(f"dataset={name}", *ONE_WORKER, cwd=files)
        assert (done.returncode, done.stderr) == (2, f"distexp: {message}\n")
    _, _, line = message.partition("is data and not an option: write ")
    line, _, other = line.partition(", or ")
    assert ("another model of images" in other) == (name == "photos")
    typed = [word.replace(f"={name}", f"={files / name}") for word in shlex.split(line)]
    assert set(OVERRIDES[name].split()) - {"dataset.image_size=16"} <= set(typed)
    assert resolve_data(*typed, *ONE_WORKER).dataset.path == str(files / name)


TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"id": 1, "Body": "a b"}, "dataset=text dataset.column=Body"),
        ({"id": "12", "Body": "a b c"}, "dataset=text dataset.column=Body"),
        ({"1.50": "a b"}, "dataset=text dataset.column='1.50'"),  # Hydra reads 1.50 as a number.
        ({"null": "a b"}, "dataset=text dataset.column='null'"),
        ({"id": 1, "dialog": TURNS}, "dataset=chat dataset.messages_column=dialog"),
        ({"words": ["a", "b"], "tags": ["O", "B"]}, "model.task=token_classification dataset.tokens_column=words"),
        ({"prompt": TURNS[:1], "completion": TURNS[1:]}, None),
        ({"a": 1, "text": 2}, None),
    ],
)
def test_the_line_for_own_data_has_columns_with_the_right_values(
    row: dict[str, Any], expected: str | None, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "my.jsonl", [dict.fromkeys(row), row] * 10)
    if expected is None:
        with pytest.raises(ConfigError, match="no column has texts or messages: write rows with a column text"):
            data_overrides(str(path))
    else:
        assert {*expected.split(), f"dataset.path={path}"} <= {*shlex.split(data_overrides(str(path)) or "")}


def load(*overrides: str) -> TaskData:
    """Return the data of a command line, as a worker loads it."""
    config = resolve_data(*overrides)
    data: TaskData = locate(config.dataset._target_)(config.dataset, config.model, config.train.seed)
    return data


@pytest.mark.parametrize("name", ["my.jsonl", "table.csv", "my.parquet", "notes.txt"])
def test_pieces_of_documents_lose_no_token(name: str, files: Path) -> None:
    data = load(*TEXT, "dataset=text", f"dataset.path={files / name}")
    texts = documents()
    if name == "table.csv":
        texts = [f'{text}, "a"\nb' for text in texts]
    elif name == "notes.txt":
        texts = [text.replace(" then", "\nthen") for text in texts]
    for is_eval, samples in enumerate((data.train, data.evaluation)):
        tokens = np.concatenate([samples[index]["input_ids"].numpy() for index in range(len(samples))])
        expected = [text for index, text in enumerate(texts) if is_held_out(index, 0.1) == bool(is_eval)]
        found = np.split(tokens, np.flatnonzero(tokens == data.tokenizer.eos_id) + 1)
        assert [data.tokenizer.decode(part.tolist()) for part in found[:-1]] == expected
        lengths, targets = token_counts(samples)
        assert lengths is not None
        assert (lengths.min() >= 2, lengths.max()) == (True, 32)
        assert np.array_equal(targets, lengths - 1)


def test_damaged_files_of_the_cache_change_no_sample(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTEXP_CACHE", str(tmp_path))

    def tokens() -> list[list[int]]:
        data = load(*TEXT, "dataset=text", f"dataset.path={files / 'my.jsonl'}")
        both = (data.train, data.evaluation)
        return [samples[index]["input_ids"].tolist() for samples in both for index in range(len(samples))]

    whole = tokens()
    for pattern in ("*/tokens", "*/ends.npy", "byte-*.json"):
        for path in tmp_path.glob(pattern):
            os.truncate(path, path.stat().st_size // 2)
        assert tokens() == whole


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.03, 0.03014, 0.99996])
def test_the_share_is_exact_spread_and_does_not_depend_on_the_number_of_rows(share: float) -> None:
    held_out = [index for index in range(100_000) if is_held_out(index, share)]
    assert abs(len(held_out) - 100_000 * share) <= 1
    assert held_out[0] == 0
    assert max(np.diff(held_out)) <= 2 / share
    assert len(set(np.diff(held_out))) > 1, "the places are not regular"


@pytest.mark.parametrize("packing", [True, False])
def test_losses_of_own_texts_are_those_of_a_hand_written_loop(packing: bool, files: Path, tmp_path: Path) -> None:
    words = (f"dataset.path={files / 'my.jsonl'}", f"dataset.eval_path={files / 'my.parquet'}")
    texts = documents()

    def encode(tokenizer: Any) -> list[tuple[list[int], list[int]]]:
        ids = [[*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id] for text in texts]
        pieces = [each[start : start + 32] for each in ids for start in range(0, len(each), 32)]
        return [(piece, piece) for piece in pieces]

    compare_losses(("dataset=text", *words, f"dataset.packing={packing}"), encode, tmp_path)


def test_losses_of_answers_are_those_of_a_hand_written_loop(files: Path, tmp_path: Path) -> None:
    path = files / "qa.jsonl"
    pairs = [(row["question"], row["reply"]) for row in map(json.loads, path.read_text().splitlines())]

    def encode(tokenizer: Any) -> list[tuple[list[int], list[int]]]:
        found = []
        for question, reply in pairs:
            prompt = tokenizer(question + "\n" * (not question.endswith(" ")), add_special_tokens=False).input_ids
            answer = [*tokenizer(reply, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
            found.append((prompt + answer, [IGNORE] * len(prompt) + answer))
        return found

    words = (*OVERRIDES["qa.jsonl"].split(), f"dataset.path={path}", f"dataset.eval_path={path}")
    compare_losses(words, encode, tmp_path)


def compare_losses(
    overrides: tuple[str, ...], encode: Callable[[Any], list[tuple[list[int], list[int]]]], tmp_path: Path
) -> None:
    """Train a few steps on all samples, and compare the losses with those of a loop that does not use the loaders."""
    common = (*TEXT[:-1], *overrides, "train.optimizer=sgd", "train.learning_rate=0.1", "train.warmup_steps=0")
    common += ("train.schedule=constant", "train.weight_decay=0", "train.momentum=0", "train.log_every=1")
    place = {"rank": 0, "world_size": 1, "local_rank": 0, "workers_per_node": 1, "nodes": 1}
    context = Context(**place, device=torch.device("cpu"), run_dir=tmp_path)
    rows = len(load_data(resolve_data(*common, "train.micro_batch_size=1"), context).train)
    config = resolve_data(*common, f"train.micro_batch_size={rows}", "train.num_epochs=4")
    native = NativeLoop(config, data := load_data(config, context), context)
    native.train_epoch()
    data.tokenizer.save(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    samples = encode(tokenizer)
    longest = max(len(ids) for ids, _ in samples)
    ids = torch.tensor([ids + [tokenizer.pad_token_id] * (longest - len(ids)) for ids, _ in samples])
    labels = torch.tensor([labels + [IGNORE] * (longest - len(labels)) for _, labels in samples])
    mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in samples])
    seed_everything(config.train.seed)
    model = model_factory(config, data)()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(4):
        logits = model(input_ids=ids, attention_mask=mask)
        logits = logits if isinstance(logits, torch.Tensor) else logits.logits
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert native.losses == pytest.approx(losses, rel=1e-6)


def test_answers_of_a_conversation_are_the_targets_by_the_template_of_the_tokenizer(
    files: Path, tmp_path: Path
) -> None:
    words = (*TEXT[:1], *TEXT[2:], "dataset=chat", f"dataset.path={files / 'chat.jsonl'}", "dataset.max_length=128")
    zephyr = load(*words, "dataset.chat_template=zephyr")
    zephyr.tokenizer.save(tmp_path)
    with pytest.raises(ConfigError, match=r"no chat template: set dataset.chat_template=zephyr, or model.tokenizer"):
        load(*words, f"model.tokenizer={tmp_path}", "model.vocab_size=null")
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["chat_template"] = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    data = load(*words, f"model.tokenizer={tmp_path}", "model.vocab_size=null")
    whole = load(*words, f"model.tokenizer={tmp_path}", "model.vocab_size=null", "dataset.targets=all")
    sample, text = data.train[0], documents()[1]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.decode(sample["input_ids"]) == tokenizer.apply_chat_template(
        conversation(text)["messages"], tokenize=False
    )
    targets = tokenizer.decode(sample["labels"][sample["labels"] != IGNORE])
    assert targets == f"one {text[:5]}</s>two</s>"
    for samples in (data.train, whole.train):
        counts = [int((samples[index]["labels"][1:] != IGNORE).sum()) for index in range(len(samples))]
        assert token_counts(samples)[1].tolist() == counts  # type: ignore[union-attr]
    assert torch.equal(whole.train[0]["labels"], whole.train[0]["input_ids"])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": settings["pad_token"]}))
    other = load(*words, f"model.tokenizer={tmp_path}", "model.vocab_size=null").train[0]
    assert other["input_ids"][-1] == AutoTokenizer.from_pretrained(tmp_path).pad_token_id != sample["input_ids"][-1]


@pytest.mark.parametrize("legacy", [False, True])
def test_conversations_have_the_tokens_of_the_whole_text(legacy: bool, tmp_path: Path) -> None:
    """Tokenizers of SentencePiece put a space before a text. Tokenized one by one, each turn would start with one."""
    save_sentencepiece(tmp_path, legacy=legacy)
    write_lines(tmp_path / "chat.jsonl", [conversation("a bad")] * 8)
    words = (*TEXT[:1], *TEXT[2:], "dataset=chat", f"dataset.path={tmp_path / 'chat.jsonl'}", "dataset.max_length=128")
    words += (f"model.tokenizer={tmp_path}", "model.vocab_size=null", "dataset.chat_template=zephyr")
    answers, every = load(*words).train[0], load(*words, "dataset.targets=all").train[0]
    tokenizer, messages = AutoTokenizer.from_pretrained(tmp_path), conversation("a bad")["messages"]
    text = "".join(f"<|{message['role']}|>\n{message['content']}</s>\n" for message in messages)
    assert answers["input_ids"].tolist() == every["input_ids"].tolist() == tokenizer(text).input_ids
    targets = tokenizer.convert_ids_to_tokens(answers["labels"][answers["labels"] != IGNORE])
    end = ["</s>", *["▁"] * legacy, "\n"]
    assert targets == ["o", "n", "e", "▁a", "▁b", "a", "d", *end, "t", "w", "o", *end]


def test_what_starts_the_first_turn_is_no_target_if_the_assistant_has_it(files: Path, tmp_path: Path) -> None:
    """As in ShareGPT. Some templates add a system message, as that of Qwen 2.5."""
    words = (*TEXT[:1], *TEXT[2:], "dataset=chat", f"dataset.path={files / 'chat.jsonl'}", "dataset.max_length=128")
    load(*words, "dataset.chat_template=zephyr").tokenizer.save(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["chat_template"] = (
        "{% if messages[0].role != 'system' %}[system] be nice{% endif %}"
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    turns = [{"role": "assistant", "content": "xylophone"}, *conversation("a red tree")["messages"]]
    path = write_lines(tmp_path / "first.jsonl", [{"messages": turns}] * 8)
    words = (*words, f"dataset.path={path}", f"model.tokenizer={tmp_path}", "model.vocab_size=null")
    data = load(*words)
    labels = data.train[0]["labels"]
    found = AutoTokenizer.from_pretrained(tmp_path).decode(labels[labels != IGNORE])
    assert found == "xylophone</s>one a red</s>two</s>"


def test_a_message_with_keys_that_are_null_has_those_of_the_other_format() -> None:
    """As in Parquet, where all rows have the same keys."""
    for old in ({"role": "user", "content": "a"}, {"from": "human", "value": "a"}):
        message = dict.fromkeys(("role", "content", "from", "value")) | old
        assert read_turn(message) == {"role": "user", "content": "a"}
        answer = {"role": "assistant", "content": "b"}
        assert messages_error({"messages": [message, answer]}, ("messages",)) is None


def test_conversations_of_sharegpt_are_those_with_roles(files: Path, tmp_path: Path) -> None:
    words = (*TEXT, "dataset=chat", "dataset.chat_template=zephyr")
    renamed = (files / "chat.jsonl").read_text().replace('"messages"', '"conversations"')
    for old, new in {"role": "from", "content": "value", "user": "human", "assistant": "gpt"}.items():
        renamed = renamed.replace(f'"{old}"', f'"{new}"')
    (tmp_path / "sharegpt.jsonl").write_text(renamed)
    found = load(*words, f"dataset.path={tmp_path / 'sharegpt.jsonl'}", "dataset.messages_column=conversations")
    expected = load(*words, f"dataset.path={files / 'chat.jsonl'}")
    with pytest.raises(ConfigError, match=r"no column messages: set dataset.messages_column=conversations$"):
        load(*words, f"dataset.path={tmp_path / 'sharegpt.jsonl'}")
    assert len(found.train) == len(expected.train) > 1
    for index in range(len(found.train)):
        assert torch.equal(found.train[index]["input_ids"], expected.train[index]["input_ids"])
        assert torch.equal(found.train[index]["labels"], expected.train[index]["labels"])


def test_rows_without_text_and_long_rows_are_counted(tmp_path: Path) -> None:
    short = {"prompt": "a", "answer": "b"}
    lines = [short, short, {"prompt": "x", "answer": " "}, {"prompt": "long " * 90, "answer": "never"}, short]
    path = write_lines(tmp_path / "qa.jsonl", [*lines, {"prompt": "a", "answer": "long " * 90}])
    data = load(*TEXT, "dataset=chat", f"dataset.path={path}")
    limit = "dataset.max_length=32 tokens"
    assert data.notes == [
        "left out, because they have no text: 1 of 5 training rows",
        f"left out, because their answers start after {limit}: 1 of 5 training rows",
        f"cut, because they are longer than {limit}: 2 of 5 training rows; they have lost their end",
    ]
    assert token_counts(data.train)[0].tolist() == [4, 4, 32]  # type: ignore[union-attr]


def test_sizes_count_samples_and_more_than_all_are_refused(files: Path) -> None:
    words = (*TEXT, "dataset=text", f"dataset.path={files / 'my.jsonl'}")
    every = load(*words)
    some = load(*words, "dataset.train_size=7", "dataset.eval_size=2")
    assert (len(some.train), len(some.evaluation)) == (7, 2)
    assert all(torch.equal(some.train[index]["input_ids"], every.train[index]["input_ids"]) for index in range(7))
    with pytest.raises(ConfigError, match=rf"train_size=9999 is more than the {len(every.train)} training samples"):
        load(*words, "dataset.train_size=9999")


def test_the_evaluation_set_is_a_split_a_path_or_a_share(files: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", [{"text": "train words"}] * 20)
    write_lines(tmp_path / "dev.jsonl", [{"text": "dev words"}] * 3)
    sizes = {
        f"dataset.path={files / 'saved'}": 5,
        f"dataset.path={tmp_path}": 3,
        f"dataset.path={tmp_path}/*.jsonl": 3,
        f"dataset.path={tmp_path / 'train.jsonl'} dataset.eval_path={tmp_path / 'dev.jsonl'}": 3,
        f"dataset.path={tmp_path} dataset.eval_share=0.25": 5,
    }
    for words, count in sizes.items():
        config = resolve_data(*TEXT, "dataset=text", *words.split())
        _, evaluation = open_rows(config.dataset, text_format)
        assert len(list(evaluation)) == count, words
    with pytest.raises(ConfigError, match=r"dataset.eval_path and dataset.eval_share both choose the evaluation set"):
        resolve_data(
            *TEXT, "dataset=text", f"dataset.path={tmp_path}", f"dataset.eval_path={tmp_path}", "dataset.eval_share=0.1"
        )


GOOD = '{"text": "some words"}\n'
ROLES = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'

BROKEN: dict[str, tuple[str | bytes, str]] = {
    "json.jsonl": (2 * GOOD + '{"text": "a\n' + GOOD, r"json.jsonl, row 3: it is not JSON .*; 1 of 4 rows is wrong"),
    "list.jsonl": (GOOD + "[1]\n", r"row 2: it is a list and not an object with columns; 1 of 2"),
    "absent.jsonl": (GOOD + '{"other": "a"}\n', r"absent.jsonl, row 2: text is missing; 1 of 2 rows"),
    "column.jsonl": ('{"body": "a", "id": 1}\n', r"has no column text: set dataset.column to one of body, id"),
    "messages.jsonl": (ROLES, r"messages.jsonl has no column text, but messages: use dataset=chat"),
    "null.jsonl": (GOOD + 2 * '{"text": null}\n', r"row 2: text is null and not a text; 2 of 3 rows are wrong"),
    "number.jsonl": (GOOD + '{"text": 5}\n' + GOOD, r"row 2: text is the number 5 and not a text; 1 of 3"),
    "number.json": ('[{"text": "a"}, {"text": 5}]', r"number.json, row 2: text is the number 5"),
    "bytes.jsonl": (GOOD + '{"text": "na\udcefve"}\n', r"bytes.jsonl, row 2: it is not UTF-8; 1 of 2"),
    "bytes.txt": ("one\n\nna\udcefve\n", r"bytes.txt, line 3: it is not UTF-8; 1 of 3"),
    "bytes.csv": ("id,text\n1,a\n2,na\udcefve\n", r"bytes.csv, row 2: it is not UTF-8; 1 of 2"),
    "utf16.csv": ("text,id\na,1\n".encode("utf-16"), r"utf16.csv, row 1: it is not UTF-8"),
    "true.jsonl": ('{"true": "a"}\n', r"set dataset.column to one of true, with quotes as in .dataset.column='true'."),
    "commas.tsv": ("body, new, final\tid\nwords\t1\n", r"set dataset.column to one of body, new, final, id"),
    "quoted.csv": ('"a, b, c";id\nwords;1\n', r"set dataset.column to one of a, b, c, id"),
    "one.jsonl": (GOOD, r"one.jsonl has 1 row, and all are held out for evaluation: add rows, or set dataset.eval"),
    "half.jsonl": (GOOD + '{"text": "\\ud83d"}\n', r"row 2: text contains half of a character; 1 of 2"),
    "quote.csv": ('id,text\n1,a\n2,"b\n3,c\n', r"quote.csv, row 2: a quote in line 3 is not closed"),
    "inside.csv": ('id,text\n1,"a\n2,b\n3,"c" d\n4,e\n', r"inside.csv, row 1: a quote in line 2 is not closed"),
    "fields.csv": ("id,text\n1,a\n2,b,c\n3\n", r"row 2: it has 3 fields, but the header has 2; 2 of 3 rows"),
    "twice.csv": ("text,text\na,b\n", r"twice.csv, row 1: the header has text twice; 1 of 1 rows is wrong"),
    "deep.jsonl": (
        GOOD + '{"text": ' + 50_000 * "[" + "\n",
        r"row 2: it is not JSON \(maximum recursion depth .*; 1 of 2",
    ),
    "deep.json": (50_000 * "[", r"deep.json, row 1: the list is not JSON \(maximum recursion depth"),
    "no.jsonl.gz": (GOOD, r"no.jsonl.gz cannot be read \(Not a gzipped file .*\): restore the file"),
    "cut.jsonl.gz": (gzip.compress(400 * GOOD.encode())[:60], r"cut.jsonl.gz cannot be read \(.*\): restore the file"),
    "empty.jsonl": ("", r"empty.jsonl is empty: add rows to it, or remove it"),
    "blank.txt": ("\n \n", r"blank.txt has no row with a value"),
    "no.parquet": ("x", r"no.parquet cannot be read \(.*\): restore the file"),
    "data.dat": ("x", r"data.dat is not a data file: use files that end in .txt"),
    "answer.jsonl": (
        '{"prompt": "a", "answer": "b"}\n{"prompt": "a"}\n',
        r"answer.jsonl, row 2: answer is missing; 1 of 2 rows is wrong",
    ),
    "role.jsonl": (
        ROLES + '{"messages": [{"content": "a"}]}\n',
        r"role.jsonl, row 2: messages\[0\].role is missing; 1 of 2 rows",
    ),
    "human.jsonl": (
        ROLES + ROLES.replace("user", "human"),
        r"row 2: messages\[0\].role is 'human' and not one of system, developer, user, assistant, tool",
    ),
    "bot.jsonl": (
        ROLES + '{"messages": [{"from": "human", "value": "a"}, {"from": "bot", "value": "b"}]}\n',
        r"row 2: messages\[1\].from is 'bot' and not one of system, developer, user, assistant, tool, human, gpt",
    ),
    "alone.jsonl": (
        ROLES + '{"messages": [{"role": "user", "content": "a"}]}\n',
        r"alone.jsonl, row 2: messages has no message of the assistant",
    ),
}


def test_advice_names_no_column_that_has_another_use(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n')
    with pytest.raises(ConfigError, match="has no column answer, but only text: add it, or use other data"):
        resolve_cell("model=gpt_tiny", "dataset=chat", f"dataset.path={path}", "dataset.prompt_column=text")


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("is_large", [False, True])
def test_a_wrong_row_is_named_and_all_are_counted(
    name: str, is_large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small file is checked before a run starts, and any other by the worker."""
    content, message = BROKEN[name]
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogateescape"))
    kind = "chat" if name in ("answer.jsonl", "role.jsonl", "human.jsonl", "bot.jsonl", "alone.jsonl") else "text"
    words = (*TEXT, f"dataset={kind}", f"dataset.path={path}", "dataset.chat_template=zephyr")
    words = words if kind == "chat" else words[:-1]
    if is_large:
        monkeypatch.setattr("distexp.resolve.section_checks.rows.find_errors", lambda *_: iter(()))
        message = message.replace("1 of 3", "1 of 2") if name == "bytes.txt" else message.replace(" with a value", "")
    with pytest.raises(ConfigError, match=message):
        load(*words)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([*1500 * ["a"], None, "b", None], r"my.parquet, row 1501: text is null and not a text; 2 of 1503 rows are"),
        ([b"a"], r"my.parquet, row 1: text is binary data and not a text; 1 of 1 rows is wrong"),
    ],
)
def test_wrong_rows_of_parquet_are_refused_before_a_run_starts(
    texts: list[Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "my.parquet"
    parquet.write_table(pyarrow.table({"text": texts, "other": [None] * len(texts)}), path)
    words = (*TEXT, "dataset=text", f"dataset.path={path}")
    with pytest.raises(ConfigError, match=message):
        resolve_data(*words)
    parquet.write_table(pyarrow.table({"text": ["a", None, *500 * ["b"]]}), path)
    monkeypatch.setattr("distexp.data.sources.rows.CHECKED_BYTES", 1)
    with pytest.raises(ConfigError, match=r"row 2: text is null and not a text; 1 of the first 100 rows is wrong"):
        resolve_data(*words)


def test_a_column_that_occurs_twice_in_a_parquet_file_is_refused(tmp_path: Path) -> None:
    texts = pyarrow.array(["a", "b"])
    parquet.write_table(pyarrow.Table.from_arrays([texts, texts], names=["text", "text"]), tmp_path / "my.parquet")
    with pytest.raises(ConfigError, match=r"my.parquet has 2 columns text: rename all but one of them"):
        resolve_data(*TEXT, "dataset=text", f"dataset.path={tmp_path / 'my.parquet'}")


@pytest.mark.skipif(not hasattr(datasets, "Json"), reason="older versions of datasets have no JSON columns")
def test_messages_that_only_the_library_datasets_decodes_are_not_refused(tmp_path: Path) -> None:
    features = datasets.Features({"messages": datasets.List(datasets.Json())})
    rows = {"messages": 20 * [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "my.parquet")
    resolve_data(*TEXT, "dataset=chat", f"dataset.path={tmp_path / 'my.parquet'}", "dataset.chat_template=zephyr")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("dataset=text",), "dataset=text needs data: set dataset.path to a file, a folder, a pattern or a hub id"),
        (("dataset=text", "dataset.path=nowhere.jsonl"), "dataset.path=nowhere.jsonl does not exist"),
        (("dataset=text", "dataset.path=no/*.csv"), r"dataset.path=no/\*.csv does not exist"),
        (
            ("dataset=image_folder", "model=resnet_tiny"),
            "dataset=image_folder needs data: set dataset.path to a folder",
        ),
    ],
)
def test_data_that_does_not_exist_is_refused_but_rendered_for_a_cluster(
    overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_cell(*overrides, *ONE_WORKER)
    resolve_cell(*overrides, "cluster=slurm", "cluster.dry_run=true", "strategy=ddp")


def test_links_are_followed_once_and_hidden_files_are_left_out(tmp_path: Path) -> None:
    for name in ("data/a.txt", "data/.hidden/b.txt", "elsewhere/c.txt", "data/folder.txt/d.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("words")
    (tmp_path / "data/link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/again").symlink_to(tmp_path / "elsewhere")
    names = [str(path.relative_to(tmp_path / "data")) for path in find_files(str(tmp_path / "data"))["train"]]
    assert names == ["a.txt", "folder.txt/d.txt", "link/c.txt"]
    (tmp_path / "data/up").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match=r"data/up is a link to the folder above it, .*: remove the link"):
        find_files(str(tmp_path / "data"))
    (tmp_path / "data/up").unlink()
    (tmp_path / "data/nothing.txt").symlink_to("/nowhere")
    with pytest.raises(ConfigError, match=r"nothing.txt is a link to nothing: restore its file, or remove it"):
        find_files(str(tmp_path / "data"))


@pytest.mark.parametrize("pattern", ["", "/*/*.md"])
def test_folders_of_splits_and_files_that_describe_data(pattern: str, tmp_path: Path) -> None:
    for name in ("train/a.md", "test/b.md", "train/README_first.md", "train/README.md", "LICENSE.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("one\n\ntwo")
    data = load(*TEXT, "dataset=text", f"dataset.path={tmp_path}{pattern}", "dataset.max_length=16")
    described = f"left out, because they describe the data: 2 files of {tmp_path}, as LICENSE.txt"
    assert (len(data.train), len(data.evaluation)) == (6 if pattern else 4, 2)
    assert (described in data.notes) is not bool(pattern)


def test_files_that_are_not_read_have_a_note_or_are_named_in_the_error(tmp_path: Path) -> None:
    for name in ("a/b.jsonl.xz", "a/c.TXT.ZST", "a/c.tar.gz", "a/d.docx", "a/.hidden", "a/README"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    hint = "(.xz, .zst, .tar.gz cannot be read: decompress such files, or write them as .gz)"
    for path in (tmp_path, tmp_path / "a" / "b.jsonl.xz"):
        with pytest.raises(ConfigError, match=r"data file \(.*\.xz.* cannot be read: decompress .* \.gz\): use files"):
            load(*TEXT, "dataset=text", f"dataset.path={path}")
    (tmp_path / "e.txt").write_text("one\n\ntwo")
    data = load(*TEXT, "dataset=text", f"dataset.path={tmp_path}", "dataset.max_length=16")
    assert data.notes == [
        f"left out, because they describe the data: 1 file of {tmp_path}, as a/README",
        f"left out, because they are no data files {hint}: 4 files of {tmp_path}, as a/b.jsonl.xz",
    ]


@pytest.mark.parametrize("pattern", ["", "/*.parquet"])
def test_parquet_files_without_rows_are_left_out_with_a_note(pattern: str, tmp_path: Path) -> None:
    whole = pyarrow.table({"text": ["one", "two", "three"]})
    parts = {"train-0.parquet": [whole[:0]], "train-1.parquet": [whole[:0], whole], "test-0.parquet": [whole]}
    for name, groups in parts.items():
        with parquet.ParquetWriter(tmp_path / name, whole.schema) as writer:
            for group in groups:  # An empty row group may come before others.
                writer.write_table(group)
    words = (*TEXT, "dataset=text", f"dataset.path={tmp_path}{pattern}")
    data = load(*words)
    assert (len(data.train), len(data.evaluation)) == (3, 3)
    assert data.notes == [f"left out, because they have no row: 1 file of {tmp_path}{pattern}, as train-0.parquet"]
    (tmp_path / "train-1.parquet").unlink()
    with pytest.raises(ConfigError, match=r"train-0\.parquet has no row: add rows, or use other data"):
        load(*words)


def test_only_the_columns_that_are_needed_are_read_from_a_parquet_file(tmp_path: Path) -> None:
    # The library datasets has no type for a map.
    notes = pyarrow.array([[("source", "web")]] * 30, type=pyarrow.map_(pyarrow.string(), pyarrow.string()))
    parquet.write_table(pyarrow.table({"notes": notes, "text": ["one two"] * 30}), tmp_path / "my.parquet")
    data = load(*TEXT, "dataset=text", f"dataset.path={tmp_path / 'my.parquet'}")
    assert (len(data.train), len(data.evaluation)) == (27, 3)


def test_a_split_without_rows_is_no_evaluation_set(tmp_path: Path) -> None:
    table = pyarrow.table({"text": ["one"] * 30})
    parquet.write_table(table, tmp_path / "train-0.parquet")
    parquet.write_table(table[:0], tmp_path / "test-0.parquet")
    words = (*TEXT, "dataset=text", f"dataset.path={tmp_path}")
    data = load(*words)
    assert (len(data.train), len(data.evaluation)) == (27, 3)
    assert data.notes == [f"left out, because they have no row: 1 file of {tmp_path}, as test-0.parquet"]
    with pytest.raises(ConfigError, match=r"test-0\.parquet has no row: add rows, or use other data"):
        load(*words, "dataset.eval_split=test")


def test_messages_without_a_template_are_refused_before_a_run_starts(files: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no chat template: set dataset.chat_template=zephyr"):
        resolve_data(*TEXT, "dataset=chat", f"dataset.path={files / 'chat.jsonl'}")


def test_images_of_any_shape_and_mode_keep_their_proportions(files: Path) -> None:
    data = load(*IMAGES, "dataset=image_folder", f"dataset.path={files / 'photos'}")
    assert (len(data.train), len(data.evaluation), data.num_classes) == (21, 3, 3)
    assert data.class_names == ("a", "b", "c"), "a saved model has them"
    reference = transforms.Compose([transforms.Resize(16), transforms.CenterCrop(16)])
    for index in range(len(data.evaluation)):
        name, sample = data.evaluation.files[index], data.evaluation[index]  # type: ignore[attr-defined]
        assert "abc"[int(sample["labels"])] == name[0]
        expected = np.asarray(reference(Image.open(files / "photos" / name).convert("RGB")))
        assert np.array_equal(sample["images"].permute(1, 2, 0).numpy(), expected)


@pytest.mark.parametrize(
    ("training", "evaluation"),
    [
        *(("train", name) for name in ("val", "valid", "validation", "test", "testing", "evaluation")),
        *(("training", "testing"), ("Training", "Testing"), ("Train", "Val"), ("TRAIN", "Test")),
    ],
)
def test_the_usual_layouts_of_class_folders_are_read(training: str, evaluation: str, tmp_path: Path) -> None:
    for label in "xyz":
        for number in range(3):
            save_image(tmp_path / training / label / "images" / f"{number}.png")
    save_image(tmp_path / evaluation / "z" / "0.JPG")
    save_image(tmp_path / "unlabeled" / "z" / "0.png")
    (tmp_path / training / "README.txt").write_text("")
    data = load(*IMAGES, "dataset=image_folder", f"dataset.path={tmp_path}")
    assert (len(data.train), len(data.evaluation), data.num_classes) == (9, 1, 3)
    assert int(data.evaluation[0]["labels"]) == 2
    assert data.notes == [
        f"left out, because they are no images in class folders: 1 file of {tmp_path}/{training}, as README.txt",
        f"left out, because they are not the chosen splits: 1 folder of {tmp_path}, as unlabeled",
        f"{tmp_path}/{evaluation} has no images of 2 of 3 classes, as x",
    ]


@pytest.mark.parametrize("classes", [("Bus", "Train"), ("negative_test", "positive_test")])
def test_classes_may_have_names_of_splits(classes: tuple[str, ...], tmp_path: Path) -> None:
    for label in classes:
        for number in range(3):
            save_image(tmp_path / label / f"{number}.png")
    data = load(*IMAGES, "dataset=image_folder", f"dataset.path={tmp_path}")
    assert data.class_names == classes


def test_classes_of_named_splits_may_have_names_of_splits(tmp_path: Path) -> None:
    for name in ("train/bullet_train", "train/test_tube", "val/bullet_train", "val/test_tube"):
        save_image(tmp_path / name / "0.png")
    for typed in (
        (f"dataset.path={tmp_path}",),
        (f"dataset.path={tmp_path / 'train'}", f"dataset.eval_path={tmp_path / 'val'}"),
    ):
        assert load(*IMAGES, "dataset=image_folder", *typed).class_names == ("bullet_train", "test_tube")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("1.png", "2.png"), "has no class folders with images: use FOLDER/CLASS"),
        (("a/1.png", "b/notes.txt"), "1 of 2 class folders of .* have no image, as b"),
        (
            ("train/a/1.png", "train/b/1.png", "val/a/1.png", "val/c/1.png"),
            "val has 1 of 2 class folders that .*/train does not have, as c",
        ),
        (("train/a/1.png", "train/b/1.png", "val/1.png"), r"val has no .*, or set dataset.eval_share=0.1 to"),
        (("train/a/1.png", "train/b/1.png", "test/a/x.txt"), r"test has no .*, or set dataset.eval_share=0.1 to"),
        (
            ("dev/a/1.png", "dev/b/1.png", "test/a/1.png"),
            "the folders dev, test of .*, or set dataset.path=.*/dev dataset.eval_path=.*/test$",
        ),
        (("a/1.png", "a/2.png"), "has only the class folder a, but two or more are needed"),
        (("Test/a/1.png", "Test/b/1.png"), "the folders Test of .* would be the classes, but .* are those of splits"),
        (
            ("extra/1.png", "test/1.png", "train/1.png"),
            "the folders extra, test, train of .* use .* FOLDER/train/CLASS",
        ),
        (("bullet_train/a/1.png", "test/1.png", "train/1.png"), r"bullet_train, test, train of .*/val/CLASS/\*.jpg$"),
        (("test_set/a/1.png", "training_set/a/1.png"), "test_set, training_set of .*: use .* FOLDER/train/CLASS"),
        (("a/1.png", "b/1.png", "b/broken.jpg"), r"b/broken.jpg is not an image .*; 1 of \d images are broken"),
        (("wnids.txt",), "use dataset=tinyimagenet dataset.root="),
    ],
)
def test_wrong_image_folders_are_refused(names: tuple[str, ...], message: str, tmp_path: Path) -> None:
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        save_image(path) if path.suffix == ".png" else path.write_bytes(b"\xff\xd8\xff\xe0")
    with pytest.raises(ConfigError, match=message):
        resolve_data(*IMAGES, "dataset=image_folder", f"dataset.path={tmp_path}")


def test_the_keys_for_unusual_image_folders_are_used(tmp_path: Path) -> None:
    for name in (
        "dev/a/1.png",
        "dev/b/1.png",
        "test/a/1.png",
        "new/train/a/1.png",
        "new/train/b/1.png",
        "new/val/1.png",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        save_image(tmp_path / name)
    for typed in (
        (f"dataset.path={tmp_path / 'dev'}", f"dataset.eval_path={tmp_path / 'test'}"),
        (f"dataset.path={tmp_path / 'new'}", "dataset.eval_share=0.1"),
    ):
        assert load(*IMAGES, "dataset=image_folder", *typed).class_names == ("a", "b")


def test_keys_that_a_message_about_image_folders_names_can_be_typed(tmp_path: Path) -> None:
    root = tmp_path / "my photos, new"
    for name in ("train_images/a/1.png", "train_images/b/1.png", "test_images/a/1.png"):
        (root / name).parent.mkdir(parents=True)
        save_image(root / name)
    typed = *IMAGES, "dataset=image_folder", f"dataset.path='{root}'"
    with pytest.raises(ConfigError) as caught:
        resolve_cell(*typed)
    advice = shlex.split(caught.value.errors[0].partition(", or set ")[2])
    assert load(*IMAGES, "dataset=image_folder", *advice).class_names == ("a", "b")
    (root / "wnids.txt").touch()
    with pytest.raises(ConfigError) as caught:
        resolve_cell(*typed)
    advice = shlex.split(caught.value.errors[0].partition(": use ")[2])
    assert advice == ["dataset=tinyimagenet", f"dataset.root='{root}'"]


def test_all_tokens_of_squad_can_be_targets() -> None:
    words = ("model=gpt_tiny", *ONE_WORKER, "dataset=squad_sample")
    answer, whole = load(*words), load(*words, "dataset.targets=all")
    assert torch.equal(whole.train[3]["labels"], answer.train[3]["input_ids"])
    assert torch.equal(whole.train[3]["input_ids"], answer.train[3]["input_ids"])
    assert token_counts(whole.train)[1].tolist() == (answer.train.lengths - 1).tolist()  # type: ignore[attr-defined, union-attr]
    assert np.array_equal(whole.evaluation.prompt(0), answer.evaluation.prompt(0))  # type: ignore[attr-defined]


@pytest.mark.parametrize(("overrides", "length"), [((), 128), (("model=bloom_tiny",), 512), (("scale=tiny",), 64)])
def test_the_length_of_texts_is_that_of_the_model(overrides: tuple[str, ...], length: int, files: Path) -> None:
    path = f"dataset.path={files / 'my.jsonl'}"
    config = resolve_data(*overrides, *(ONE_WORKER if overrides else TEXT[:1] + ONE_WORKER), "dataset=text", path)
    assert config.dataset.max_length == length


def test_the_length_of_texts_is_that_of_a_model_folder(files: Path, tmp_path: Path) -> None:
    path, model = (
        f"dataset.path={files / 'my.jsonl'}",
        ("model=hf", f"model.name={tmp_path}", "model.init=random", "model.tokenizer=byte"),
    )
    # RoBERTa counts from the row after that of the padding.
    roberta = {"model_type": "roberta", "is_decoder": True, "max_position_embeddings": 67}
    for architecture, length in (
        ({"model_type": "opt", "max_position_embeddings": 96}, 96),
        ({"model_type": "opt", "max_position_embeddings": 4096}, 512),
        (roberta, 65),
        ({**roberta, "pad_token_id": 2}, 64),
        ({**roberta, "model_type": "prophetnet", "pad_token_id": 2}, 63),
        ({"model_type": "mpt", "max_seq_len": 64}, 64),
    ):
        (tmp_path / "config.json").write_text(json.dumps(architecture))
        assert resolve_cell(*model, *ONE_WORKER[:-1], "dataset=text", path).dataset.max_length == length


def test_a_bar_separates_columns_too(tmp_path: Path) -> None:
    (tmp_path / "bars.csv").write_text("id|text\n" + "1|some words, and more\n" * 30)
    data = load(*ONE_WORKER, "model=gpt_tiny", "dataset=text", f"dataset.path={tmp_path / 'bars.csv'}")
    assert len(data.train) + len(data.evaluation) == 30
