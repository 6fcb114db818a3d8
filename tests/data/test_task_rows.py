"""Own rows for masked LMs, seq2seq models and classifiers: samples, batches and refused rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from distexp.config import ConfigError
from distexp.data.base import IGNORE, TaskData
from distexp.data.sources.documents import load_chat, load_text
from distexp.data.tokenization import HuggingFaceTokenizer, train_byte_tokenizer
from tests.helpers.datasets import save_sentencepiece
from tests.helpers.runs import resolve_cell

SENTENCE = ("Ada", "bakes", "bread", "in", "Oslo", "every", "morning")
LENGTH = 24


def load(folder: Path, task: str, rows: Sequence[dict[str, Any]], *overrides: str) -> TaskData:
    """Write rows to a file, and load them for a task; every fourth one is for evaluation."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    kind = "chat" if task == "seq2seq_lm" else "text"
    model = folder / "config.json"
    model.write_text(json.dumps({"model_type": "bert", "architectures": ["BertForMaskedLM"]}))
    config = resolve_cell(
        *("model=hf", f"model.name={folder}", f"model.task={task}", "model.tokenizer=byte", "train.warmup_steps=0"),
        *(f"dataset={kind}", f"dataset.path={file}", "dataset.eval_share=0.25", f"dataset.max_length={LENGTH}"),
        *("train.micro_batch_size=1", *overrides),
    )
    return (load_chat if kind == "chat" else load_text)(config.dataset, config.model, 5)


def sentence(number: int) -> str:
    return " ".join(SENTENCE[: 2 + number % 6])


def test_a_masked_lm_predicts_some_tokens_of_each_epoch(tmp_path: Path) -> None:
    data = load(tmp_path, "masked_lm", [{"text": sentence(number) * 9} for number in range(40)])
    tokenizer = data.tokenizer
    plain = [data.train.tokens[start:end] for start, end in zip([0, *data.train.ends], data.train.ends, strict=False)]  # type: ignore[attr-defined]
    masked = replaced = kept = 0
    for epoch in (0, 1):
        data.train.set_epoch(epoch)  # type: ignore[attr-defined]
        for index, original in enumerate(plain):
            assert len(original) <= LENGTH
            sample = data.train[index]
            ids, labels = sample["input_ids"].numpy(), sample["labels"].numpy()
            is_target = labels != IGNORE
            usual = original != tokenizer.eos_id
            assert not is_target[~usual].any()  # special tokens are not predicted
            assert is_target.sum() == max(1, round(0.15 * usual.sum()))
            assert (labels[is_target] == original[is_target]).all()
            assert (ids[~is_target] == original[~is_target]).all()
            hidden = ids[is_target] == tokenizer.mask_id
            same = ids[is_target] == original[is_target]
            masked, kept, replaced = masked + hidden.sum(), kept + same.sum(), replaced + (~hidden & ~same).sum()
    total = masked + kept + replaced
    assert masked / total == pytest.approx(0.8, abs=0.08)
    assert kept / total == pytest.approx(0.1, abs=0.06)

    def targets(index: int) -> list[bool]:
        return (data.train[index]["labels"] != IGNORE).tolist()  # type: ignore[no-any-return]

    second = [targets(index) for index in range(len(plain))]
    assert second == [targets(index) for index in range(len(plain))]
    data.train.set_epoch(0)  # type: ignore[attr-defined]
    assert second != [targets(index) for index in range(len(plain))]
    batch = data.collate([data.train[0], data.train[1]])
    assert batch.num_targets == int((batch.labels != IGNORE).sum()) > 0


def test_pairs_have_labels_for_the_decoder(tmp_path: Path) -> None:
    rows = [{"prompt": sentence(number), "answer": SENTENCE[number % 7]} for number in range(20)]
    data = load(tmp_path, "seq2seq_lm", rows)
    sample = data.train[3]
    assert data.tokenizer.decode(sample["labels"].tolist()) in SENTENCE
    assert sample["labels"][-1] == data.tokenizer.eos_id == sample["input_ids"][-1]
    batch = data.collate([data.train[index] for index in range(5)])
    assert batch.inputs["input_ids"].shape == (5, LENGTH)
    assert batch.labels.shape[1] < LENGTH  # the longest answer of the data
    assert batch.inputs["decoder_labels"].equal(batch.labels)
    assert batch.num_targets == int((batch.labels != IGNORE).sum())
    assert batch.num_tokens == int(batch.inputs["attention_mask"].sum()) + batch.num_targets


def test_answers_are_cut_with_the_token_that_ends_them(tmp_path: Path) -> None:
    """A tokenizer of a folder may append no end token. The decoder has positions for ``dataset.max_length`` tokens."""
    train_byte_tokenizer([sentence(number) for number in range(9)], 300).save(tmp_path)
    rows = [{"prompt": sentence(number), "answer": sentence(number) * 20} for number in range(8)]
    data = load(tmp_path, "seq2seq_lm", rows, "model.tokenizer=auto")
    assert not any(data.tokenizer.affixes)
    labels = data.train[0]["labels"]
    assert (len(labels), labels[-1]) == (LENGTH, data.tokenizer.eos_id)


@pytest.mark.parametrize(
    "labels", [["good", "bad", "so-so"], [0, 1, 2], ["01", "02", "03"], [90210, 90211, 4915112345678]]
)
def test_texts_have_classes(labels: list[Any], tmp_path: Path) -> None:
    rows = [{"text": sentence(number), "label": labels[number % 3]} for number in range(30)]
    data = load(tmp_path, "sequence_classification", [*rows, {"text": " ", "label": labels[0]}])
    assert data.num_classes == 3
    assert list(data.class_names) == sorted(map(str, labels))
    batch = data.collate([data.train[index] for index in range(4)])
    assert batch.labels.shape == (4,)
    assert (batch.num_targets, batch.num_samples) == (4, 4)
    names = [data.class_names[label] for label in batch.labels.tolist()]
    texts = [data.tokenizer.decode(row.tolist()) for row in batch.inputs["input_ids"]]
    known = {(row["text"], str(row["label"])) for row in rows}
    assert set(zip(texts, names, strict=True)) <= known
    assert "because they are empty: 1 of" in data.notes[0]
    note = "classes are names and not numbers, because 4915112345678 is not below 1,000 or the 22 training rows"
    assert (note in data.notes) is (labels[0] == 90210)


def test_numbers_of_few_rows_stay_numbers(tmp_path: Path) -> None:
    rows = [{"text": sentence(number), "label": 8 * (number % 2)} for number in range(6)]
    assert load(tmp_path, "sequence_classification", rows).num_classes == 9


@pytest.mark.parametrize("form", ["saved", "parquet"])
def test_classes_have_the_names_that_the_library_datasets_knows(form: str, tmp_path: Path) -> None:
    from datasets import ClassLabel, Dataset, Features, Value

    features = Features({"text": Value("string"), "label": ClassLabel(names=["so-so", "bad", "good"])})
    columns = {"text": [sentence(number) for number in range(20)], "label": [number % 2 for number in range(20)]}
    saved, path = Dataset.from_dict(columns, features=features), tmp_path / form
    if form == "saved":
        saved.save_to_disk(path)
    else:
        path = path.with_name("rows[1].parquet")  # no pattern
        saved.to_parquet(path)
    data = load(tmp_path, "sequence_classification", [], f"dataset.path='{path}'")
    assert (data.num_classes, list(data.class_names)) == (3, ["so-so", "bad", "good"])  # no row is good
    assert {int(data.collate([data.train[index]]).labels[0]) for index in range(len(data.train))} == {0, 1}


def test_the_first_token_of_a_word_has_its_tag(tmp_path: Path) -> None:
    tags = {"Ada": "PER", "Oslo": "LOC"}
    rows = [{"tokens": list(SENTENCE[: 5 + number % 3]), "tags": []} for number in range(20)]
    rows = [{**row, "tags": [tags.get(word, "O") for word in row["tokens"]]} for row in rows]
    data = load(tmp_path, "token_classification", rows, "model.vocab_size=null")
    assert data.class_names == ("LOC", "O", "PER")
    for index in range(len(data.train)):
        sample = data.train[index]
        found = [data.class_names[label] for label in sample["labels"].tolist() if label != IGNORE]
        decoded = data.tokenizer.decode(sample["input_ids"].tolist()).split()
        assert found == [tags.get(word, "O") for word in decoded]
        assert sample["labels"].shape == sample["input_ids"].shape


def test_tagged_words_have_the_tokens_of_the_whole_text(tmp_path: Path) -> None:
    """A tokenizer that puts a space before each text would encode two spaces."""
    save_sentencepiece(tmp_path, legacy=True)
    rows = [{"tokens": ["bad", "ab", "b"], "tags": ["A", "B", "A"]}] * 8
    data = load(tmp_path, "token_classification", rows, f"model.tokenizer={tmp_path}", "model.vocab_size=null")
    ids, labels = data.train[0]["input_ids"].tolist(), data.train[0]["labels"].tolist()
    assert ids == data.tokenizer.encode_batch(["bad ab b"])[0].tolist()
    assert [data.tokenizer.decode([token]) for token, label in zip(ids, labels, strict=True) if label != IGNORE] == [
        *("b", "a", "b")
    ]


CLASS = "a class, which is a name or a number from 0"


@pytest.mark.parametrize(
    ("task", "row", "reason"),
    [
        ("sequence_classification", {"text": "a", "label": None}, f"row 3: label is null and not {CLASS}"),
        ("sequence_classification", {"text": "a", "label": ""}, f"row 3: label is empty and not {CLASS}"),
        ("sequence_classification", {"text": "a", "label": 1.5}, f"row 3: label is the number 1.5 and not {CLASS}"),
        ("sequence_classification", {"text": "a"}, "row 3: label is missing"),
        ("sequence_classification", {"text": 5, "label": 1}, "row 3: text is the number 5 and not a text"),
        ("token_classification", {"tokens": ["a"], "tags": ["A", "B"]}, "row 3: it has 1 words, but 2 tags"),
        ("token_classification", {"tokens": "a b", "tags": ["A"]}, "row 3: tokens is a text and not a list of words"),
        ("token_classification", {"tokens": ["a"]}, "row 3: tags is missing"),
        (
            "token_classification",
            {"tokens": ["a", "b", "c"], "tags": ["A", -100, "B"]},
            r"row 3: tags\[1\] is the number -100 and not a class, which is a name or a number from 0",
        ),
        ("token_classification", {"tokens": ["a"], "tags": [""]}, rf"row 3: tags\[0\] is empty and not {CLASS}"),
        ("token_classification", {"tokens": ["a", None], "tags": ["A"]}, r"row 3: tokens\[1\] is null and not a word"),
        ("seq2seq_lm", {"prompt": "a"}, "row 3: answer is missing"),
    ],
)
def test_wrong_rows_are_refused_at_the_start(task: str, row: dict[str, Any], reason: str, tmp_path: Path) -> None:
    right = {
        "sequence_classification": {"text": "a b", "label": 1},
        "token_classification": {"tokens": ["a", "b"], "tags": ["A", "B"]},
        "seq2seq_lm": {"prompt": "a", "answer": "b"},
    }[task]
    with pytest.raises(ConfigError, match=f"{reason}; 1 of 4 rows is wrong"):
        load(tmp_path, task, [right, right, row, right])


def test_messages_for_a_seq2seq_model_are_refused(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 8
    with pytest.raises(
        ConfigError, match=r"has messages, which only causal LMs read: write its rows with a prompt and"
    ):
        load(tmp_path, "seq2seq_lm", rows)


def test_a_class_that_was_not_trained_on_is_refused(tmp_path: Path) -> None:
    # The first row is for evaluation.
    rows = [{"text": "a", "label": "new"}, *({"text": "a", "label": label} for label in "xyxyxyx")]
    with pytest.raises(ConfigError, match=r"row 1: the class 'new' is not in the training set, which has x, y"):
        load(tmp_path, "sequence_classification", rows)
    with pytest.raises(ConfigError, match="the training rows have the classes x: use rows of two or more"):
        load(tmp_path, "sequence_classification", [{"text": "a", "label": "x"}] * 8)


def test_special_tokens_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]"]
    vocabulary = {token: number for number, token in enumerate([*special, "a", "b"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", **names).save_pretrained(tmp_path)
    loaded = HuggingFaceTokenizer(str(tmp_path))
    assert (loaded.affixes, loaded.mask_id, loaded.eos_id) == (((1,), (2,)), 3, 2)
    assert loaded.encode_batch(["b a"])[0].tolist() == [6, 5]
