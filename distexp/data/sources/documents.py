"""Own texts and conversations as tokens for causal LMs: documents, prompts with answers, and lists of messages.

The rows are read and tokenized as a stream into files of the cache, which are then memory-mapped.
"""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distexp.config import ConfigError, DatasetConfig, ModelConfig
from distexp.data.base import TaskData, check_size
from distexp.data.sources.formats import Row, chat_format, read_turn, text_format
from distexp.data.sources.rows import Rows, find_notes, open_rows
from distexp.data.sources.task_rows import load_task
from distexp.data.text import TokenSamples, sequence_length, text_data
from distexp.data.tokenization import TokenIds, Tokenizer, load_tokenizer
from distexp.exceptions import first_line
from distexp.system.cache_dir import build_once, cache_dir

PRELOAD = ("datasets",)

CORPUS_CHARACTERS = 10_000_000
"""Characters of the first training rows on which a byte tokenizer is trained."""

BATCH_ROWS, BATCH_CHARACTERS = 1000, 2_000_000
"""Rows and characters that are tokenized together. They limit the memory."""

FORMAT = "rows-v2"
"""Prefix of cache entries; a change of the stored arrays needs a new version."""

ZEPHYR = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
"""Chat template of HuggingFaceH4/zephyr-7b-beta. It needs no other special token than the end of a sequence."""

Segment = tuple[str, bool]
"""A part of a text, and whether its tokens are targets."""

Encoded = tuple[TokenIds, NDArray[np.bool_]]
"""Token ids of a row, and whether each one is a target; shape (length,)."""


@dataclass(frozen=True)
class Encoder:
    """Tokens of rows."""

    split: Callable[[Row], list[Segment]]  # returns the parts of a row; none if the row is empty
    encode: Callable[[list[list[Segment]]], Iterator[Encoded]]  # yields the tokens of rows
    ending: tuple[int, ...]  # token ids after each row
    cuts: bool  # whether a long row becomes several samples. Otherwise it loses its end.
    fingerprint: str

    def encode_rows(self, rows: Sequence[Row]) -> Iterator[Encoded | None]:
        """Yield the tokens of each row; None for an empty one."""
        parts = [self.split(row) for row in rows]
        filled = [row for row in parts if row]
        found = self.encode(filled) if filled else iter(())
        ending = np.asarray(self.ending, dtype=np.int32)
        for row in parts:
            if not row:
                yield None
                continue
            tokens, is_target = next(found)
            yield np.concatenate([tokens, ending]), np.concatenate([is_target, np.ones(len(ending), dtype=bool)])


def _encode_parts(rows: list[list[Segment]], *, encode: Callable[[list[str]], Sequence[Any]]) -> Iterator[Encoded]:
    """Yield the tokens of rows, part by part, so that a target never shares a token with a prompt."""
    ids = iter(encode([text for row in rows for text, _ in row]))
    for row in rows:
        tokens = [np.asarray(next(ids), dtype=np.int32) for _ in row]
        flags = [np.full(len(each), is_target) for each, (_, is_target) in zip(tokens, row, strict=True)]
        yield np.concatenate(tokens), np.concatenate(flags)


def _encode_whole(rows: list[list[Segment]], *, encode: Callable[..., Any]) -> Iterator[Encoded]:
    """Yield the tokens of rows as whole texts, in which SentencePiece puts no space before each part.

    A token is a target if it has a character of one.
    """
    found = encode(["".join(text for text, _ in row) for row in rows], return_offsets_mapping=True)
    for row, ids, spans in zip(rows, found["input_ids"], found["offset_mapping"], strict=True):
        is_target = np.concatenate([np.full(len(text), is_target) for text, is_target in row])
        targets = np.append(0, np.cumsum(is_target))  # number before each character
        starts, ends = np.reshape(spans, (-1, 2)).astype(int).T
        starts = np.minimum(starts, np.maximum(ends - 1, 0))  # Byte-level tokenizers give a space no characters.
        yield np.asarray(ids, dtype=np.int32), targets[ends] > targets[starts]


def load_text(dataset: DatasetConfig, model: ModelConfig, seed: int) -> TaskData:
    """Load documents for a causal LM. Each ends with the end token, and a long one is cut into several samples.

    All tokens are targets. For other tasks than causal_lm, ``load_task`` makes the samples. A byte tokenizer is trained
    on the first CORPUS_CHARACTERS of the training rows. Raise ConfigError if the data cannot be found or read, or a row
    is wrong. ``seed`` is not used for a causal LM: nothing is random.
    """
    length = sequence_length(dataset, model)
    train, held_out = open_rows(dataset, partial(text_format, task=model.task))
    if not model.traits.is_causal:
        return load_task(dataset, model, seed, (train, held_out))
    tokenizer = load_tokenizer(model, _corpus(train, (dataset.column,)))
    encoder = Encoder(
        split=lambda row: [(text, True)] if (text := row.values[dataset.column]).strip() else [],
        encode=partial(_encode_parts, encode=tokenizer.encode_batch),
        ending=(tokenizer.eos_id,),
        cuts=True,
        fingerprint=tokenizer.fingerprint,
    )
    return _load(dataset, (train, held_out), encoder, tokenizer, length)


def load_chat(dataset: DatasetConfig, model: ModelConfig, seed: int) -> TaskData:
    """Load prompts with answers, or conversations, for a causal LM; only the former for a seq2seq model.

    The targets are the answers, or the turns of the assistant; all tokens for ``targets=all``. A prompt without white
    space at its end is followed by a line break. Conversations have the chat template of the tokenizer, and the tokens
    of the whole text. Long rows lose their end, and are left out if no target remains. Raise ConfigError as
    ``load_text`` does.
    """
    length = sequence_length(dataset, model)
    train, held_out = open_rows(dataset, partial(chat_format, task=model.task))
    if not model.traits.is_causal:
        return load_task(dataset, model, seed, (train, held_out))
    columns = train.form.columns(dataset)
    tokenizer = load_tokenizer(model, _corpus(train, columns))
    if train.form.keys == ("messages_column",):
        encoder = _conversation_encoder(dataset, tokenizer)
    else:
        encoder = Encoder(
            split=partial(_split_answer, columns=columns, trains_prompt=dataset.targets == "all"),
            encode=partial(_encode_parts, encode=tokenizer.encode_batch),
            ending=(tokenizer.eos_id,),
            cuts=False,
            fingerprint=f"{tokenizer.fingerprint} {dataset.targets}",
        )
    return _load(dataset, (train, held_out), encoder, tokenizer, length)


def _corpus(rows: Rows, columns: tuple[str, ...]) -> Iterator[str]:
    """Yield the texts of the first rows, to train a tokenizer."""
    left = CORPUS_CHARACTERS
    for row in rows:
        for column in columns:
            value = row.values[column]
            turns = [] if isinstance(value, str) else map(read_turn, value)
            texts = [value] if isinstance(value, str) else [f"{turn['role']}\n{turn['content']}" for turn in turns]
            yield from texts
            left -= sum(map(len, texts))
        if left <= 0:
            return


def _split_answer(row: Row, columns: tuple[str, ...], *, trains_prompt: bool) -> list[Segment]:
    prompt, answer = (row.values[column] for column in columns)
    if not answer.strip():
        return []
    separator = "" if not prompt or prompt[-1].isspace() else "\n"
    return [(prompt + separator, trains_prompt), (answer, True)]


def _conversation_encoder(dataset: DatasetConfig, tokenizer: Tokenizer) -> Encoder:
    """Return the encoder of lists of messages. Raise ConfigError without a chat template."""
    chat = tokenizer.for_chat()
    template = ZEPHYR if dataset.chat_template == "zephyr" else chat.chat_template
    if template is None:
        raise ConfigError(
            f"{dataset.path} has messages, but the tokenizer {tokenizer.name} has no chat template: set "
            "dataset.chat_template=zephyr, or model.tokenizer to one with a template"
        )

    def render(messages: Sequence[Mapping[str, Any]], place: str, *, prompt: bool = False) -> str:
        try:
            text: str = chat.apply_chat_template(
                list(messages), tokenize=False, chat_template=template, add_generation_prompt=prompt
            )
        except Exception as error:  # of the template, which may refuse roles or their order
            raise ConfigError(
                f"{place}: the chat template of {tokenizer.name} refuses it ({first_line(error)}): correct the "
                "messages, or set dataset.chat_template=zephyr"
            ) from error
        return text

    def split(row: Row) -> list[Segment]:
        turns = [read_turn(turn) for turn in row.values[dataset.messages_column]]
        if not any(turn["role"] == "assistant" and turn["content"].strip() for turn in turns):
            return []
        whole, done, parts = render(turns, row.place), 0, list[Segment]()
        for index, turn in enumerate(turns):
            if turn["role"] != "assistant":
                continue
            after = render(turns[: index + 1], row.place)
            if index:
                before = render(turns[:index], row.place, prompt=True)
            else:  # The template may refuse an empty list. What starts the first turn is the same with other contents.
                others = [render([turn | {"content": text}], row.place) for text in "xy"]
                same = takewhile(lambda found: len(set(found)) == 1, zip(after, *others, strict=False))
                before = after[: len(list(same))]
            if not (whole.startswith(after) and after.startswith(before)) and dataset.targets == "answer":
                raise ConfigError(
                    f"{row.place}: the chat template of {tokenizer.name} changes earlier turns, so the answers cannot "
                    "be found: set dataset.targets=all, or dataset.chat_template=zephyr"
                )
            parts += [(whole[done : len(before)], False), (whole[len(before) : len(after)], True)]
            done = len(after)
        return [(whole, True)] if dataset.targets == "all" else [*parts, (whole[done:], False)]

    options = {"add_special_tokens": False, "return_attention_mask": False}
    whole = partial(_encode_whole, encode=partial(chat, **options))
    parts = partial(_encode_parts, encode=lambda texts: chat(texts, **options)["input_ids"])
    encode = whole if getattr(chat, "is_fast", False) else parts  # Others do not know the place of a token.
    # A template may write special tokens, whose names are not in the fingerprint of a tokenizer.
    special = f"{chat.special_tokens_map} {getattr(chat, 'split_special_tokens', False)}"
    fingerprint = f"{tokenizer.fingerprint} {dataset.targets} {template} {special}"
    return Encoder(split, encode, ending=(), cuts=False, fingerprint=fingerprint)


def _load(
    dataset: DatasetConfig, both: tuple[Rows, Rows], encoder: Encoder, tokenizer: Tokenizer, length: int
) -> TaskData:
    train, train_notes = _tokenize(both[0], encoder, length, dataset.train_size, "train")
    held_out, eval_notes = _tokenize(both[1], encoder, length, dataset.eval_size, "eval")
    notes = [*find_notes(dataset), *train_notes, *eval_notes]
    return text_data(dataset, tokenizer, (train, held_out), length=length, notes=notes)


def _tokenize(rows: Rows, encoder: Encoder, length: int, size: int | None, key: str) -> tuple[TokenSamples, list[str]]:
    """Return the first ``size`` samples of some rows, from the cache if they were tokenized before, and notes."""
    settings = [rows.fingerprint, encoder.fingerprint, encoder.ending, encoder.cuts, length, size]
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:24]
    write = partial(_write, rows=rows, encoder=encoder, length=length, size=size)
    folder = build_once(cache_dir() / f"{FORMAT}-{digest}", write)
    counts = Counter(json.loads((folder / "counts.json").read_text()))
    notes = list(_notes(counts, rows.name, encoder, length))
    ends = np.load(folder / "ends.npy", mmap_mode="r")
    if not len(ends):
        raise ConfigError(f"the {rows.name} set has no sample: {'; '.join(notes) or 'it has no row'}: use other data")
    check_size(key, size, len(ends), f"{rows.name} samples")
    tokens = np.memmap(folder / "tokens", dtype=np.int32, mode="r")
    is_target = None if encoder.cuts else np.memmap(folder / "is_target", dtype=np.bool_, mode="r")
    return TokenSamples(tokens, ends, np.zeros(len(ends), dtype=np.int32), is_target=is_target), notes


def _notes(counts: Counter[str], name: str, encoder: Encoder, length: int) -> Iterator[str]:
    """Yield a note about each kind of rows that were cut or left out."""
    rows, limit = f"of {counts['rows']} {name} rows", f"dataset.max_length={length} tokens"
    if empty := counts["empty"]:
        yield f"left out, because they have no text: {empty} {rows}"
    if left_out := counts["left_out"]:
        yield f"left out, because their answers start after {limit}: {left_out} {rows}"
    if cut := counts["cut"]:
        how = f"the set has {counts['samples']} samples" if encoder.cuts else "they have lost their end"
        yield f"cut, because they are longer than {limit}: {cut} {rows}; {how}"


def _write(folder: Path, *, rows: Rows, encoder: Encoder, length: int, size: int | None) -> None:
    """Tokenize rows up to a number of samples, and write their tokens, targets, ends and counts to files."""
    folder.mkdir()
    counts, ends, total, reported = Counter[str](), [np.zeros(0, dtype=np.int64)], 0, time.monotonic()
    with (folder / "tokens").open("wb") as tokens, (folder / "is_target").open("wb") as targets:
        for encoded in (each for batch in _batches(rows) for each in encoder.encode_rows(batch)):
            room = None if size is None else size - counts["samples"]
            if room == 0:
                break
            kept, pieces = _cut(encoded, encoder.cuts, length, counts)
            pieces = pieces[:room]
            if not len(pieces):
                continue
            tokens.write(kept[0][: pieces[-1]].data)
            if not encoder.cuts:
                targets.write(kept[1].data)
            ends.append(pieces + total)
            total += int(pieces[-1])
            counts["samples"] += len(pieces)
            if time.monotonic() - reported > 10:
                reported = time.monotonic()
                print(f"note: {counts['rows']:,} {rows.name} rows are tokenized", flush=True)
    np.save(folder / "ends.npy", np.concatenate(ends))
    (folder / "counts.json").write_text(json.dumps(counts))


def _cut(encoded: Encoded | None, cuts: bool, length: int, counts: Counter[str]) -> tuple[Encoded, NDArray[np.int64]]:
    """Return what is kept of a row, and the ends of its samples, which are none for an empty row. Count it."""
    counts["rows"] += 1
    nothing = np.zeros(0, dtype=np.int64)
    if encoded is None:
        counts["empty"] += 1
        return (nothing.astype(np.int32), nothing.astype(bool)), nothing
    tokens, is_target = encoded
    counts["cut"] += len(tokens) > length
    if cuts:
        return encoded, piece_ends(len(tokens), length)
    kept = tokens[:length], is_target[:length]
    has_target = kept[1][1:].any()
    counts["left_out"] += not has_target
    return kept, np.full(int(has_target), len(kept[0]), dtype=np.int64)


def piece_ends(tokens: int, length: int) -> NDArray[np.int64]:
    """Return the ends of the samples of a document. The last one has two tokens or more, because one has no target."""
    ends = np.append(np.arange(length, tokens, length), tokens)
    if tokens % length == 1 and len(ends) > 1 and length > 2:
        ends[-2] -= 1
    return ends


def _batches(rows: Rows) -> Iterator[list[Row]]:
    """Yield rows that are tokenized together."""
    waiting = iter(rows)
    while batch := list(islice(waiting, 1)):
        size = 0
        for row in islice(waiting, BATCH_ROWS - 1):
            batch.append(row)
            size += sum(len(value) for value in row.values.values() if isinstance(value, str))
            if size > BATCH_CHARACTERS:
                break
        yield batch
