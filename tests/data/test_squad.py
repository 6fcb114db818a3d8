"""SQuAD: targets, cut contexts, and the sources of the data."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from distexp.config import ConfigError, DatasetConfig
from distexp.data import squad
from distexp.data import squad as qa
from distexp.data.base import IGNORE, TaskData
from distexp.data.squad import Example, QASamples, normalize_whitespace
from distexp.data.squad_json import find_small_file_error
from tests.helpers.datasets import TEXT_MODEL, save_sentencepiece
from tests.helpers.datasets import dataset as dataset_config


def read_questions(path: str | None) -> list[tuple[str, str, list[str]]]:
    """Read contexts, questions and answers without the code under test."""
    assert path is not None
    return [
        (paragraph["context"], entry["question"], [answer["text"] for answer in entry["answers"]])
        for article in json.loads(Path(path).read_text())["data"]
        for paragraph in article["paragraphs"]
        for entry in paragraph["qas"]
    ]


def write_small_squad(tmp_path: Path, **keys: Any) -> DatasetConfig:
    """Write two questions for training, the second with a long context, and one for evaluation."""

    def entry(question: str, *answers: str) -> dict[str, Any]:
        return {"id": question, "question": question, "answers": [{"text": text} for text in answers]}

    near = {"context": "Ada  lives\nin Oslo.", "qas": [entry("Where is  Ada?", "Oslo", "in Oslo")]}
    far = {"context": "word " * 300 + "Hugo lives in Lima.", "qas": [entry("Where is Hugo?", "Lima")]}
    for name, paragraphs in (("train", [near, far]), ("dev", [near])):
        content = {"data": [{"title": "People", "paragraphs": paragraphs}]}
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    paths = {"train_path": str(tmp_path / "train.json"), "eval_path": str(tmp_path / "dev.json")}
    return dataset_config("squad", **{"max_length": 64, **paths, **keys})


def test_a_text_has_single_spaces_with_a_tokenizer_that_adds_one(tmp_path: Path) -> None:
    """As that of Llama 2, which puts a space before each part."""
    save_sentencepiece(tmp_path, legacy=True)
    model = replace(TEXT_MODEL, tokenizer=str(tmp_path), vocab_size=None)
    data = squad.load(write_small_squad(tmp_path, max_length=128), model, 1)
    text = "Question: Where is Ada? Context: Ada lives in Oslo. Answer: Oslo"
    assert data.train[0]["input_ids"][:-1].tolist() == data.tokenizer.encode_batch([text])[0].tolist()


def decode_answer(data: TaskData, samples: Any, index: int) -> tuple[str, int]:
    """Return the text of a sample's targets, and the last target."""
    labels = samples[index]["labels"]
    targets = labels[labels != IGNORE].tolist()
    return data.tokenizer.decode(targets[:-1]), targets[-1]


def decode_prompt(data: TaskData, samples: Any, index: int) -> str:
    sample = samples[index]
    text = data.tokenizer.decode(sample["input_ids"][sample["labels"] == IGNORE].tolist())
    assert isinstance(text, str)
    return text


def test_targets_are_the_answer_and_its_end_token(squad_files: DatasetConfig) -> None:
    data = squad.load(replace(squad_files, max_length=4096), TEXT_MODEL, 0)
    assert data.notes == []
    for samples, path in ((data.train, squad_files.train_path), (data.evaluation, squad_files.eval_path)):
        expected = read_questions(path)
        assert len(samples) == len(expected)
        for index, (context, question, answers) in enumerate(expected):
            prompt = f"Question: {normalize_whitespace(question)} Context: {normalize_whitespace(context)} Answer:"
            assert decode_prompt(data, samples, index) == prompt
            assert decode_answer(data, samples, index) == (
                f" {normalize_whitespace(answers[0])}",
                data.tokenizer.eos_id,
            )


def test_padding_is_masked_and_has_no_targets(squad_files: DatasetConfig) -> None:
    data = squad.load(squad_files, TEXT_MODEL, 0)
    samples = [data.train[index] for index in (0, 7, 100)]
    batch = data.collate(samples)
    assert batch.inputs["input_ids"].shape == batch.labels.shape == (3, 512)
    for row, sample in enumerate(samples):
        length = len(sample["input_ids"])
        assert batch.inputs["input_ids"][row, :length].equal(sample["input_ids"])
        assert batch.labels[row, :length].equal(sample["labels"])
        assert (batch.labels[row, length:] == IGNORE).all()
        assert batch.inputs["attention_mask"][row].tolist() == [1] * length + [0] * (512 - length)
    assert batch.num_samples == 3
    assert batch.num_targets == sum(int((sample["labels"] != IGNORE).sum()) for sample in samples)
    assert batch.num_tokens == sum(len(sample["input_ids"]) for sample in samples)


def test_longest_pads_to_the_longest_of_a_batch(squad_files: DatasetConfig) -> None:
    data = squad.load(replace(squad_files, padding="longest", max_length=4096), TEXT_MODEL, 0)
    samples = [data.train[index] for index in (0, 7, 9)]
    longest = max(len(sample["input_ids"]) for sample in samples)
    assert longest < 4096
    assert data.collate(samples).labels.shape == (3, longest)


def test_a_padding_sample_does_not_count(tmp_path: Path) -> None:
    data = squad.load(write_small_squad(tmp_path), TEXT_MODEL, 0)
    sample = data.train[0]
    padding = {**sample, "labels": torch.full_like(sample["labels"], IGNORE)}
    alone, filled = data.collate([sample]), data.collate([sample, padding])
    assert (filled.num_samples, filled.num_targets, filled.num_tokens) == (1, alone.num_targets, alone.num_tokens)


@pytest.mark.parametrize("max_length", [128, 512])
def test_cutting_keeps_question_and_answer_and_is_reported(squad_files: DatasetConfig, max_length: int) -> None:
    whole = squad.load(replace(squad_files, max_length=4096), TEXT_MODEL, 0)
    data = squad.load(replace(squad_files, max_length=max_length), TEXT_MODEL, 0)
    cut = lost = 0
    for index, (context, question, answers) in enumerate(read_questions(squad_files.train_path)):
        answer, prompt = normalize_whitespace(answers[0]), decode_prompt(data, data.train, index)
        assert decode_answer(data, data.train, index) == (f" {answer}", data.tokenizer.eos_id)
        head, tail = f"Question: {normalize_whitespace(question)} Context:", " Answer:"
        assert prompt.startswith(head)
        assert prompt.endswith(tail)
        length = len(data.train[index]["input_ids"])
        if len(whole.train[index]["input_ids"]) > max_length:
            assert length == max_length
            kept = prompt.removeprefix(head).removesuffix(tail).rstrip("\ufffd")
            assert f" {normalize_whitespace(context)}".startswith(kept)
            cut += 1
            lost += answer not in kept
        else:
            assert data.train[index]["input_ids"].equal(whole.train[index]["input_ids"])
    assert cut > lost > 0
    (note,) = (note for note in data.notes if "the end of their context was cut" in note)
    assert note.startswith(f"{cut} of 269 training and ")
    assert f" evaluation examples are longer than dataset.max_length={max_length} tokens: the end of" in note
    reported = int(note.partition("was cut; ")[2].split()[0])
    assert lost <= reported
    assert note.endswith("of these contexts no longer contain the answer. Raise dataset.max_length to keep it")


def test_unusable_examples_are_left_out_and_reported(tmp_path: Path) -> None:
    config = write_small_squad(tmp_path)
    content = json.loads((tmp_path / "train.json").read_text())
    content["data"][0]["paragraphs"][1]["qas"][0]["question"] = "Where is Hugo " * 30
    content["data"][0]["paragraphs"][1]["qas"].append({"id": "none", "question": "Why?", "answers": []})
    (tmp_path / "train.json").write_text(json.dumps(content))
    data = squad.load(config, TEXT_MODEL, 0)
    assert len(data.train) == 1
    assert data.notes == [
        "1 of 3 training examples were left out: question and answer alone exceed dataset.max_length=64 tokens",
        "1 of 3 training examples were left out: they have no answer",
    ]


def test_questions_of_an_evaluation_that_are_too_long_are_counted(tmp_path: Path) -> None:
    config = write_small_squad(tmp_path)
    assert config.eval_path is not None
    content = json.loads(Path(config.eval_path).read_text())
    before = len(squad.load(config, TEXT_MODEL, 0).evaluation)
    questions = content["data"][0]["paragraphs"][0]["qas"]
    questions.append({**questions[0], "id": "long", "question": "Where is Ada " * 30})
    Path(config.eval_path).write_text(json.dumps(content))
    data = squad.load(config, TEXT_MODEL, 0)
    assert isinstance(data.evaluation, QASamples)
    assert isinstance(data.train, QASamples)
    assert (len(data.evaluation), data.evaluation.too_long, data.train.too_long) == (before, 1, 0)


STRANGE_TEXTS = ("مرحبا بالعالم \u202eabc", "a\n\nb\r\nc\u2028d", "a\x00b", "👩\u200d👩\u200d👧 ok")


@pytest.mark.parametrize("text", STRANGE_TEXTS, ids=["right to left", "line breaks", "null character", "emoji"])
def test_strange_texts_are_kept(text: str, tmp_path: Path) -> None:
    config = write_small_squad(tmp_path)
    content = json.loads((tmp_path / "train.json").read_text())
    content["data"][0]["paragraphs"][0]["qas"][0]["answers"] = [{"text": text}]
    (tmp_path / "train.json").write_text(json.dumps(content))
    data = squad.load(config, TEXT_MODEL, 0)
    assert decode_answer(data, data.train, 0)[0].strip() == normalize_whitespace(text)


@pytest.mark.parametrize("key", ["question", "context"])
def test_an_empty_text_is_accepted_and_half_a_character_is_named(key: str, tmp_path: Path) -> None:
    config = write_small_squad(tmp_path)
    content = json.loads((tmp_path / "train.json").read_text())
    paragraph = content["data"][0]["paragraphs"][0]
    owner = paragraph if key == "context" else paragraph["qas"][0]
    for text in ("", "x\ud800y"):
        owner[key] = text
        (tmp_path / "train.json").write_text(json.dumps(content))
        if not text:
            assert len(squad.load(config, TEXT_MODEL, 0).train) == 2
            continue
        with pytest.raises(ConfigError, match=r"question Where is  Ada\? contains half of a character, '\\ud800'"):
            squad.load(config, TEXT_MODEL, 0)


def test_data_without_usable_examples_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none of 2 training examples is usable with dataset.max_length=2"):
        squad.load(write_small_squad(tmp_path, max_length=2), TEXT_MODEL, 0)


def test_evaluation_has_references_and_prompts(squad_files: DatasetConfig) -> None:
    data = squad.load(squad_files, TEXT_MODEL, 0)
    assert isinstance(data.evaluation, QASamples)
    for index, (_, _, answers) in enumerate(read_questions(squad_files.eval_path)):
        assert data.evaluation.references[index] == tuple(normalize_whitespace(answer) for answer in answers)
        prompt = data.tokenizer.decode(data.evaluation.prompt(index).tolist())
        assert prompt == decode_prompt(data, data.evaluation, index)
    assert len(set(data.evaluation.ids)) == len(data.evaluation)


def test_sizes_take_the_first_examples_and_keep_the_tokenizer(squad_files: DatasetConfig) -> None:
    everything = squad.load(squad_files, TEXT_MODEL, 0)
    few = squad.load(replace(squad_files, train_size=5, eval_size=3), TEXT_MODEL, 0)
    assert (len(few.train), len(few.evaluation)) == (5, 3)
    assert few.tokenizer.fingerprint == everything.tokenizer.fingerprint
    assert few.train[4]["input_ids"].equal(everything.train[4]["input_ids"])
    with pytest.raises(IndexError):
        few.train[5]


@pytest.mark.parametrize(("kind", "name", "available"), [("train", "training", 2), ("eval", "evaluation", 1)])
def test_a_size_larger_than_the_data_is_refused(tmp_path: Path, kind: str, name: str, available: int) -> None:
    config = write_small_squad(tmp_path, **{f"{kind}_size": 9})
    path = getattr(config, f"{kind}_path")
    with pytest.raises(ConfigError) as refused:
        squad.load(config, TEXT_MODEL, 0)
    assert str(refused.value) == (
        f"{path} has {available} {name} examples, fewer than dataset.{kind}_size=9: set at most {available}, or null "
        "for all"
    )
    assert find_small_file_error(path, kind, 9) == str(refused.value), "before a run"


def test_cached_texts_are_not_tokenized_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTEXP_CACHE", str(tmp_path / "cache"))
    first = squad.load(write_small_squad(tmp_path), TEXT_MODEL, 0)
    monkeypatch.setattr(qa, "_ExampleEncoder", None)
    again = squad.load(write_small_squad(tmp_path), TEXT_MODEL, 0)
    assert again.train[1]["input_ids"].equal(first.train[1]["input_ids"])
    assert again.notes == first.notes
    with pytest.raises(TypeError):
        squad.load(write_small_squad(tmp_path, max_length=65), TEXT_MODEL, 0)


def make_dataset_dict(config: DatasetConfig) -> datasets.DatasetDict:
    """Convert official files to the format of the hub."""

    def rows(path: str | None) -> datasets.Dataset:
        return datasets.Dataset.from_list([
            {"id": str(index), "title": "", "context": context, "question": question,
             "answers": {"text": answers, "answer_start": [context.index(answer) for answer in answers]}}
            for index, (context, question, answers) in enumerate(read_questions(path))
        ])  # fmt: skip

    return datasets.DatasetDict({"train": rows(config.train_path), "validation": rows(config.eval_path)})


def test_files_saved_folders_and_the_hub_give_the_same_samples(
    squad_files: DatasetConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from_files = squad.load(squad_files, TEXT_MODEL, 0)
    splits = make_dataset_dict(squad_files)
    splits.save_to_disk(str(tmp_path / "saved"))
    requested: list[str] = []
    monkeypatch.setattr(datasets, "load_dataset", lambda name: requested.append(name) or splits)
    for path in (str(tmp_path / "saved"), "rajpurkar/squad"):
        data = squad.load(replace(squad_files, train_path=None, eval_path=None, path=path), TEXT_MODEL, 0)
        for mine, theirs in ((data.train, from_files.train), (data.evaluation, from_files.evaluation)):
            assert len(mine) == len(theirs)
            for index in range(len(mine)):
                assert mine[index]["input_ids"].equal(theirs[index]["input_ids"])
                assert mine[index]["labels"].equal(theirs[index]["labels"])
    assert requested == ["rajpurkar/squad"]


def test_files_take_precedence_over_the_hub(tmp_path: Path) -> None:
    assert len(squad.load(write_small_squad(tmp_path, path="rajpurkar/squad"), TEXT_MODEL, 0).train) == 2


@pytest.mark.parametrize("given", ["train_path", "eval_path"])
def test_one_file_alone_is_refused(tmp_path: Path, given: str) -> None:
    absent = {"train_path": "eval_path", "eval_path": "train_path"}[given]
    message = f"dataset.{given}=.*json is set, but dataset.{absent} is null: set both, or neither"
    with pytest.raises(ConfigError, match=message):
        squad.load(write_small_squad(tmp_path, **{absent: None}), TEXT_MODEL, 0)


FORMAT = "train.json is not in the format of SQuAD v1.1: "


def paragraph(content: str) -> str:
    return f'{{"data": [{{"paragraphs": [{{{content}}}]}}]}}'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"train.json cannot be read \(No such file or directory\): correct the path"),
        ("{", r"train.json is not JSON \(Expecting .*\): use a file of the form \{\"data\": \[\{\"paragraphs\""),
        ("question,answer", r"train.json is not JSON \(Expecting value: line 1 column 1 \(char 0\)\)"),
        ('{"id": 1}\n{"id": 2}', r"train.json is not JSON \(Extra data: line 2"),
        (b"\xff\xfe\x00", r"train.json is not JSON"),
        ("[" * 100_000, r"train.json is not JSON"),
        ("1" * 5_000, r"train.json is not JSON"),
        ("{}", FORMAT + r"the file has no key 'data'\. Use the form \{\"data\": \[\{\"paragraphs\""),
        ("[1]", FORMAT + "the file is a list and not an object"),
        ('{"data": {"paragraphs": []}}', FORMAT + "data is an object and not a list"),
        ('{"data": [{"title": "x"}]}', FORMAT + r"data\[0\] has no key 'paragraphs'"),
        (
            paragraph('"context": 3, "qas": []'),
            FORMAT + r"data\[0\].paragraphs\[0\].context is a number and not a text",
        ),
        (paragraph('"context": "a", "qas": [[]]'), FORMAT + r".*qas\[0\] is a list and not an object"),
        (paragraph('"context": "a", "qas": [{"answers": [null]}]'), FORMAT + r".*has no key 'id'"),
        (
            paragraph('"context": "a", "qas": [{"id": 1, "question": "b", "answers": ["c"]}]'),
            FORMAT + r".*qas\[0\].answers\[0\] is a text and not an object",
        ),
    ],
)
def test_files_of_another_format_are_refused(tmp_path: Path, content: str | bytes | None, message: str) -> None:
    config = write_small_squad(tmp_path)
    path = tmp_path / "train.json"
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigError, match=message) as caught:
        squad.load(config, TEXT_MODEL, 0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("key", "error"), [("answer_strat", "answer_strat"), ("answer_start", ""), ("note", "")])
def test_a_misspelled_position_is_an_error_before_a_run(key: str, error: str, tmp_path: Path) -> None:
    path = tmp_path / "typed.json"
    answers = f'"answers": [{{"text": "a", "{key}": 0}}]'
    path.write_text(paragraph(f'"context": "a", "qas": [{{"id": 1, "question": "b", {answers}}}]'))
    found = find_small_file_error(str(path), "train", None) or ""
    assert (f"answers[0] has the key {error!r}, which is probably 'answer_start'" in found) == bool(error)
    assert bool(found) == bool(error)


def test_a_folder_that_is_not_a_data_set_is_refused(tmp_path: Path) -> None:
    config = dataset_config("squad", path=str(tmp_path), max_length=64)
    with pytest.raises(ConfigError, match=r"is not a folder written by datasets.save_to_disk"):
        squad.load(config, TEXT_MODEL, 0)


def test_a_data_set_without_splits_or_columns_is_refused(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"id": ["1"], "question": ["Why?"], "context": ["So."]})
    rows.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict(train=rows, validation=rows).save_to_disk(str(tmp_path / "two"))
    for folder, message in (
        ("one", "must have the splits train and validation"),
        ("two", "lacks the columns answers"),
    ):
        with pytest.raises(ConfigError, match=message):
            squad.load(dataset_config("squad", path=str(tmp_path / folder), max_length=64), TEXT_MODEL, 0)


def test_an_unreachable_hub_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(name: str) -> None:
        raise ConnectionError(f"Couldn't reach '{name}' on the Hub\nand more lines")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    monkeypatch.setattr(squad, "offline_if_unreachable", lambda path: None)
    message = r"dataset.path=rajpurkar/squad is neither a local folder.*Couldn't reach.*dataset=squad_sample"
    with pytest.raises(ConfigError, match=message) as caught:
        squad.load(dataset_config("squad", path="rajpurkar/squad", max_length=64), TEXT_MODEL, 0)
    assert "\n" not in str(caught.value)


def test_data_without_a_question_is_refused(tmp_path: Path) -> None:
    config = write_small_squad(tmp_path)
    (tmp_path / "train.json").write_text('{"data": []}')
    with pytest.raises(ConfigError, match=r"train.json has no training examples: use data with at least one question$"):
        squad.load(config, TEXT_MODEL, 0)


def test_data_without_a_source_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"dataset.path is null: set a hub id"):
        squad.load(dataset_config("squad", max_length=64), TEXT_MODEL, 0)


def test_a_length_above_the_positions_of_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"dataset.max_length=64 exceeds model.seq_length=32.*raise the second"):
        squad.load(write_small_squad(tmp_path), replace(TEXT_MODEL, seq_length=32), 0)
    with pytest.raises(ConfigError, match=r"dataset.max_length is null"):
        squad.load(write_small_squad(tmp_path, max_length=None), TEXT_MODEL, 0)
    data = squad.load(write_small_squad(tmp_path, max_length=None), replace(TEXT_MODEL, seq_length=80), 0)
    assert data.collate([data.train[0]]).labels.shape == (1, 80)


def test_a_repeated_context_is_in_the_corpus_once() -> None:
    examples = [Example(str(index), f"Why {index}?", "So it is.", ("So",)) for index in range(50)]
    assert len([text for text in qa.tokenizer_corpus(examples) if text == " So it is."]) == 1


def break_positions(path: str, start: Any) -> None:
    """Give every answer of a file its true position, and that of the last question another one."""
    content = json.loads(Path(path).read_text())
    for paragraph in content["data"][0]["paragraphs"]:
        for entry in paragraph["qas"]:
            for answer in entry["answers"]:
                answer["answer_start"] = paragraph["context"].index(answer["text"])
    answer["answer_start"] = start
    Path(path).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("start", "found"),
    [
        (3, "at answer_start=3 the context has 'd wo' instead of 'Lima'"),
        (-1, "at answer_start=-1 the context has '' instead of 'Lima'"),
        (99999, "at answer_start=99999 the context has '' instead of 'Lima'"),
        ("1514", "answer_start='1514' is not a number"),
    ],
)
def test_a_wrong_position_of_an_answer_is_refused(start: Any, found: str, tmp_path: Path) -> None:
    config = write_small_squad(tmp_path)
    assert config.train_path is not None
    break_positions(config.train_path, start)
    with pytest.raises(ConfigError) as refused:
        squad.load(config, TEXT_MODEL, 0)
    assert f"{config.train_path}: 1 of 2 training examples have a wrong answer_start" in str(refused.value)
    assert f"The first is question Where is Hugo?: {found}." in str(refused.value)
    assert find_small_file_error(config.train_path, "train", 2) == str(refused.value), "before a run"
    assert find_small_file_error(config.train_path, "train", 1) is None
    used = replace(config, train_size=1)
    assert len(squad.load(used, TEXT_MODEL, 0).train) == 1, "only the examples that are used are checked"


def test_right_positions_are_accepted(tmp_path: Path) -> None:
    config = write_small_squad(tmp_path)
    assert config.train_path is not None
    break_positions(config.train_path, start=1514)
    assert len(squad.load(config, TEXT_MODEL, 0).train) == 2
