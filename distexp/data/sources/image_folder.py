"""Own images in one folder for each class, which torchvision's ImageFolder reads too. Imports no torch."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from distexp.config import ConfigError, DatasetConfig, ModelConfig
from distexp.config.overrides import copyable_overrides
from distexp.data.sources.rows import (
    DEFAULT_SHARE,
    SPLIT_WORDS,
    TRAIN_WORDS,
    is_held_out,
    note_left_out,
    walk_files,
    words_of,
)
from distexp.system.cache_dir import build_once, cache_dir

if TYPE_CHECKING:
    from distexp.data.base import TaskData
    from distexp.data.images import ImageFiles

IMAGE_FOLDER = "distexp.data.sources.image_folder.load"
"""Target of this dataset."""

ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp")

LAYOUT = "use FOLDER/CLASS/*.jpg, or FOLDER/train/CLASS/*.jpg with FOLDER/val/CLASS/*.jpg"

CHECKED_IMAGES = 50
"""Images that are opened before a run starts. The workers open all of them once."""


@dataclass(frozen=True)
class LabeledImages:
    """Image files with their classes."""

    root: Path
    names: tuple[str, ...]  # relative to the root
    labels: tuple[int, ...]


@dataclass(frozen=True)
class ImageSets:
    """The images of a folder."""

    train: LabeledImages
    evaluation: LabeledImages
    classes: tuple[str, ...]
    notes: tuple[str, ...]


def load(dataset: DatasetConfig, model: ModelConfig, seed: int) -> TaskData:
    """Load images for classification. A class is the index of its folder, sorted by name.

    An image of another shape is resized by its shorter edge, and its center is used. The sizes of the sets count from a
    fixed shuffled order. ``seed`` is for the augmentation. Raise ConfigError if the folders or the images are wrong.
    """
    from distexp.data.base import TaskData, check_size
    from distexp.data.images import collate_images

    sets = find_images(dataset)
    for key, images in (("train", sets.train), ("eval", sets.evaluation)):
        check_size(key, getattr(dataset, f"{key}_size"), len(images.names), "images")
    train = _image_files(sets.train, dataset, dataset.train_size, seed, augment=True)
    evaluation = _image_files(sets.evaluation, dataset, dataset.eval_size, seed, augment=False)
    return TaskData(
        task="image_classification",
        train=train,
        evaluation=evaluation,
        collate=collate_images,
        num_classes=len(sets.classes),
        class_names=sets.classes,
        notes=list(sets.notes),
    )


def _image_files(
    images: LabeledImages, dataset: DatasetConfig, size: int | None, seed: int, *, augment: bool
) -> ImageFiles:
    from distexp.data.images import ImageFiles, decode_image, fingerprint

    names, labels, root = images.names[:size], images.labels[:size], images.root
    edge = dataset.image_size or decode_image(root / names[0], None).shape[0]
    files = ImageFiles(root, names, labels, edge, augment, seed, crops=True)
    checked = partial(_check_images, files=LabeledImages(root, names, labels))
    build_once(cache_dir() / f"image-headers-v1-{fingerprint(files)}", checked)
    return files


def _check_images(done: Path, files: LabeledImages) -> None:
    """Open all images, and write an empty file. Raise ConfigError if some cannot be opened."""
    if error := broken_images(files.root, files.names):
        raise ConfigError(error)
    done.touch()


def broken_images(root: Path, names: tuple[str, ...]) -> str | None:
    """Return which images cannot be opened, and how many, or None. Their pixels are not decoded."""
    from PIL import Image

    first, broken = "", 0
    for name in names:
        try:
            Image.open(root / name).close()
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            broken, first = broken + 1, first or f"{root / name} is not an image ({error})"
    return f"{first}; {broken} of {len(names)} images are broken: restore or remove them" if broken else None


def find_images(dataset: DatasetConfig) -> ImageSets:
    """Return the images for training and evaluation. Raise ConfigError if there are no class folders, or wrong ones."""
    if dataset.path is None:
        raise ConfigError(
            f"dataset={dataset.name} needs a folder: set dataset.path to one with a folder for each class"
        )
    return _find_images(dataset.path, dataset.eval_path, dataset.eval_share)


@lru_cache(maxsize=8)
def _find_images(path: str, eval_path: str | None, eval_share: float | None) -> ImageSets:
    root = Path(path)
    if (root / "wnids.txt").is_file():
        raise ConfigError(
            f"{path} is TinyImageNet in its official layout: use "
            f"{copyable_overrides('dataset=tinyimagenet', f'dataset.root={path}')}"
        )
    train_root = _split_folder(root, TRAIN_WORDS)
    if train_root is None or not _folders(train_root):  # A class may have such a name too.
        train_root = root
    found = None if train_root is root or eval_share is not None else _split_folder(root, *SPLIT_WORDS.values())
    eval_root = Path(eval_path) if eval_path else found
    train = class_files(train_root)
    classes, notes = tuple(train), list(_notes(train_root))
    if train_root is root and not eval_path:  # otherwise the user named the splits
        _refuse_splits_as_classes(root, classes)
    used = {folder.resolve() for folder in (train_root, eval_root) if folder is not None}
    unused = [name for name in _folders(root) if (root / name).resolve() not in used]
    if train_root is not root and unused:
        notes.append(note_left_out("they are not the chosen splits", unused, root, "folder"))
    if len(classes) < 2:
        raise ConfigError(f"{train_root} has only the class folder {classes[0]}, but two or more are needed: {LAYOUT}")
    if eval_root is None:
        (pairs,), share = _shuffled(classes, train), eval_share or DEFAULT_SHARE
        train_pairs = [pair for index, pair in enumerate(pairs) if not is_held_out(index, share)]
        eval_pairs = [pair for index, pair in enumerate(pairs) if is_held_out(index, share)]
        sets = _labeled(train_root, train_pairs), _labeled(train_root, eval_pairs)
        return ImageSets(*sets, classes, tuple(notes))
    try:
        held_out = class_files(eval_root)
    except ConfigError as error:
        if eval_path:
            raise
        raise ConfigError(
            f"{error}, or set dataset.eval_share={DEFAULT_SHARE} to evaluate a share of {train_root} in its place"
        ) from None
    if unknown := sorted(set(held_out) - set(train)):
        raise ConfigError(
            f"{eval_root} has {len(unknown)} of {len(held_out)} class folders that {train_root} does not have, as "
            f"{', '.join(unknown[:3])}: use the same classes"
        )
    if missing := sorted(set(train) - set(held_out)):
        notes.append(f"{eval_root} has no images of {len(missing)} of {len(train)} classes, as {missing[0]}")
    notes += _notes(eval_root)
    train_pairs, eval_pairs = _shuffled(classes, train, held_out)
    return ImageSets(_labeled(train_root, train_pairs), _labeled(eval_root, eval_pairs), classes, tuple(notes))


def _shuffled(classes: tuple[str, ...], *sets: dict[str, list[str]]) -> list[list[tuple[str, int]]]:
    """Return the images of some sets with their classes. A subset is the same for every train.seed."""
    pairs = [[(name, classes.index(label)) for label in files for name in files[label]] for files in sets]
    for images in pairs:
        random.Random(0).shuffle(images)
    return pairs


def _labeled(root: Path, pairs: list[tuple[str, int]]) -> LabeledImages:
    names, labels = zip(*pairs, strict=True) if pairs else ((), ())
    return LabeledImages(root, tuple(names), tuple(labels))


def _split_folder(root: Path, *splits: frozenset[str]) -> Path | None:
    """Return the folder of the first split that exists. A split is a set of names, which are found in any case."""
    names = _folders(root) if root.is_dir() else []
    return next((root / name for split in splits for name in names if name.lower() in split), None)


def _refuse_splits_as_classes(root: Path, classes: tuple[str, ...]) -> None:
    """Raise ConfigError if the class folders are splits, as train, val and others, dev and test, or val alone."""
    known = TRAIN_WORDS, frozenset[str]().union(*SPLIT_WORDS.values())
    found = [[name for name in classes if words_of(name) & words] for words in known]
    are_splits = all(words_of(name) - {""} <= known[0] | known[1] for name in classes)
    has_both = all(any(name.lower() in names for name in classes) for names in known)
    only_splits = len(found[0]) + len(found[1]) == len(classes) and (len(classes) == 1 or all(found) or are_splits)
    if has_both or only_splits:
        exact = sorted(found[0], key=lambda name: name.lower() not in known[0])  # before names such as bullet_train
        train, *others = [*exact, *found[1]]
        paths = [f"dataset.path={root / train}", *(f"dataset.eval_path={root / name}" for name in others[-1:])]
        hint = f", or set {copyable_overrides(*paths)}" if _folders(root / train) else ""
        raise ConfigError(
            f"the folders {', '.join(classes)} of {root} would be the classes, but their names are those of splits: "
            f"{LAYOUT}{hint}"
        )


def _folders(root: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))


def class_files(root: Path) -> dict[str, list[str]]:
    """Return the images of each class folder, at any depth, relative to the root. Raise ConfigError without any."""
    if not root.is_dir():
        raise ConfigError(f"{root} is not a folder: {LAYOUT}")
    found = {name: [file for file in _files(root, name) if file.lower().endswith(ENDINGS)] for name in _folders(root)}
    if not any(found.values()):
        raise ConfigError(f"{root} has no class folders with images: {LAYOUT}")
    if empty := [name for name, files in found.items() if not files]:
        raise ConfigError(
            f"{len(empty)} of {len(found)} class folders of {root} have no image, as {empty[0]}: add images that end "
            f"in {', '.join(ENDINGS)}, or remove the folders"
        )
    return found


def _files(root: Path, folder: str) -> list[str]:
    """Return the files of a folder at any depth, relative to the root."""
    return sorted(os.path.relpath(path, root) for path in walk_files(root / folder))


def _notes(root: Path) -> Iterator[str]:
    """Yield a note about files that are left out."""
    other = [name for name in _files(root, "") if not name.lower().endswith(ENDINGS) or os.sep not in name]
    if other:
        yield note_left_out("they are no images in class folders", other, root)
