"""TinyImageNet in its official layout.

``wnids.txt`` lists the classes. Training images are ``train/<wnid>/images/<name>.JPEG``, those for
validation ``val/images/<name>.JPEG``, and ``val/val_annotations.txt`` has a line for each of them: name,
wnid and a box, separated by tabs.
"""

from __future__ import annotations

import random
from pathlib import Path

from distexp.config import ConfigError, DatasetConfig, ModelConfig
from distexp.data.base import TaskData
from distexp.data.images import ImageFiles, collate_images, decode

Labelled = list[tuple[str, int]]
"""Files relative to the root, with their class."""

ORDER_SEED = 0
"""Of the order of files: the same subset whatever train.seed is."""


def load(dataset: DatasetConfig, model: ModelConfig, seed: int) -> TaskData:
    """Images with the position of their class in the sorted wnids.txt.

    Args:
        dataset: root; train_size and eval_size take the first images of a fixed shuffled order, since the
            files are sorted by class; image_size in pixels, null for that of the first image.
        model: unused; every image model takes what ``ImageFiles`` gives.
        seed: of the augmentation of training images.

    Raises:
        ConfigError: no such folder, another layout, or fewer images than asked for.
    """
    if dataset.root is None:
        raise ConfigError(
            "dataset.root is null: set it to the folder tiny-imagenet-200 of the official archive, or choose "
            "dataset=tinyimagenet_sample"
        )
    root = Path(dataset.root)
    wnids = read_wnids(root)
    classes = {wnid: position for position, wnid in enumerate(wnids)}
    train = _first(read_train(root, classes), dataset.train_size, "train", "training")
    held_out = _first(read_val(root, classes), dataset.eval_size, "eval", "evaluation")
    size = dataset.image_size or _size_of(root / train[0][0])
    return TaskData(
        task="image_classification",
        train=_image_files(root, train, size, seed, augment=True),
        evaluation=_image_files(root, held_out, size, seed, augment=False),
        collate=collate_images,
        num_classes=len(wnids),
    )


def read_wnids(root: Path) -> list[str]:
    """The classes, sorted."""
    if not root.is_dir():
        raise ConfigError(f"dataset.root={root} is not a folder: give that of the official archive, unpacked")
    path = root / "wnids.txt"
    if not path.is_file():
        raise ConfigError(f"{path} is missing, which lists the classes: give the archive's top folder")
    wnids = sorted(path.read_text().split())
    if not wnids or len(set(wnids)) < len(wnids):
        raise ConfigError(f"{path} must list every class once, one a line: restore the official file")
    return wnids


def read_train(root: Path, classes: dict[str, int]) -> Labelled:
    """The training images, sorted by class and name."""
    found: Labelled = []
    for wnid, label in classes.items():
        folder = root / "train" / wnid / "images"
        if not folder.is_dir():
            raise ConfigError(
                f"{folder} is missing: the official layout has train/<wnid>/images for each wnid of wnids.txt"
            )
        names = sorted(file.name for file in folder.iterdir() if file.suffix.lower() in (".jpeg", ".jpg"))
        if not names:
            raise ConfigError(f"{folder} holds no .JPEG files: unpack the official archive again")
        found += [(f"train/{wnid}/images/{name}", label) for name in names]
    return found


def read_val(root: Path, classes: dict[str, int]) -> Labelled:
    """The validation images, in the order of val_annotations.txt."""
    path = root / "val" / "val_annotations.txt"
    if not path.is_file():
        raise ConfigError(
            f"{path} is missing: the official layout has val/images and the classes of its files there "
            "(a val folder sorted into classes is another layout)"
        )
    images = root / "val" / "images"
    there = {file.name for file in images.iterdir()} if images.is_dir() else set()
    found: Labelled = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        name, _, rest = line.partition("\t")
        wnid = rest.partition("\t")[0]
        if wnid not in classes:
            raise ConfigError(
                f"{path}, line {number}: {line!r} must be a file name, a class of wnids.txt and a box, "
                "separated by tabs: restore the official file"
            )
        if name not in there:
            raise ConfigError(f"{images / name} is missing, which line {number} of {path} names: restore it")
        found.append((f"val/images/{name}", classes[wnid]))
    return found


def _first(found: Labelled, size: int | None, kind: str, name: str) -> Labelled:
    if size is not None and size > len(found):
        raise ConfigError(
            f"dataset.{kind}_size={size} is more than the {len(found)} {name} images that there are: "
            f"set at most {len(found)}, or null for all"
        )
    if not found:
        raise ConfigError(f"There are no {name} images: unpack the official archive again")
    random.Random(ORDER_SEED).shuffle(found)
    return found[:size]


def _image_files(root: Path, found: Labelled, size: int, seed: int, *, augment: bool) -> ImageFiles:
    files, classes = zip(*found, strict=True)
    return ImageFiles(root=root, files=files, classes=classes, size=size, augment=augment, seed=seed)


def _size_of(path: Path) -> int:
    from PIL import Image

    decode(path, 1)  # its error names the file
    with Image.open(path) as image:
        return int(image.size[0])
