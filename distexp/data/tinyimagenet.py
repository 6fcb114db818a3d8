"""TinyImageNet in its official layout.

``wnids.txt`` lists the classes. Training images are ``train/<wnid>/images/<name>.JPEG``. Validation images
are ``val/images/<name>.JPEG``. ``val/val_annotations.txt`` has a line for each of them: file name, wnid and
bounding box, separated by tabs.
"""

import random
from pathlib import Path

from distexp.config import ConfigError, DatasetConfig, ModelConfig
from distexp.data.base import TaskData, check_size
from distexp.data.images import ImageFiles, collate_images, decode_image

LabeledFiles = list[tuple[str, int]]


def load(dataset: DatasetConfig, model: ModelConfig, seed: int) -> TaskData:
    """Load images for classification; a class is its index in the sorted wnids.txt.

    The sizes of the sets count from a fixed shuffled order, because the files are sorted by class. A null image_size is
    that of the first image. ``seed`` is for the augmentation. Raise ConfigError if the folder has not what is
    requested.
    """
    if dataset.root is None:
        raise ConfigError(
            "dataset.root is null: set it to the folder tiny-imagenet-200 of the official archive, or use "
            "dataset=tinyimagenet_sample"
        )
    root = Path(dataset.root)
    wnids = read_wnids(root)
    classes = {wnid: index for index, wnid in enumerate(wnids)}
    train = _select(read_train(root, classes), dataset.train_size, "train", "training")
    held_out = _select(read_val(root, classes), dataset.eval_size, "eval", "evaluation")
    size = dataset.image_size or decode_image(root / train[0][0], None).shape[1]
    return TaskData(
        task="image_classification",
        train=_image_files(root, train, size, seed, augment=True),
        evaluation=_image_files(root, held_out, size, seed, augment=False),
        collate=collate_images,
        num_classes=len(wnids),
    )


def read_wnids(root: Path) -> list[str]:
    """Read the classes from wnids.txt, sorted."""
    if not root.is_dir():
        raise ConfigError(f"dataset.root={root} is not a folder: set it to the unpacked official archive")
    path = root / "wnids.txt"
    if not path.is_file():
        raise ConfigError(f"{path}, the list of classes, is missing: set dataset.root to the top folder of the archive")
    wnids = sorted(path.read_text().split())
    if not wnids or len(set(wnids)) < len(wnids):
        raise ConfigError(f"{path} must list each class once, one per line: restore the official file")
    return wnids


def read_train(root: Path, classes: dict[str, int]) -> LabeledFiles:
    """List the training images, sorted by class and name."""
    found: LabeledFiles = []
    for wnid, label in classes.items():
        folder = root / "train" / wnid / "images"
        if not folder.is_dir():
            raise ConfigError(
                f"{folder} is missing: the official layout has train/<wnid>/images for each wnid in wnids.txt"
            )
        names = sorted(file.name for file in folder.iterdir() if file.suffix.lower() in (".jpeg", ".jpg"))
        if not names:
            raise ConfigError(f"{folder} has no .JPEG files: unpack the official archive again")
        found += [(f"train/{wnid}/images/{name}", label) for name in names]
    return found


def read_val(root: Path, classes: dict[str, int]) -> LabeledFiles:
    """List the validation images in the order of val_annotations.txt."""
    path, images = root / "val" / "val_annotations.txt", root / "val" / "images"
    if not path.is_file():
        raise ConfigError(
            f"{path} is missing: the official layout has all validation images in val/images, and their classes in "
            "this file (a val folder with one folder per class is not supported)"
        )
    names = {file.name for file in images.iterdir()} if images.is_dir() else set()
    found: LabeledFiles = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        name, _, rest = line.partition("\t")
        wnid = rest.partition("\t")[0]
        if wnid not in classes:
            raise ConfigError(
                f"{path}, line {number}: {line!r} must be a file name, a class in wnids.txt and a bounding box, "
                "separated by tabs: restore the official file"
            )
        if name not in names:
            raise ConfigError(f"{images / name} is missing, but {path} lists it in line {number}: restore the image")
        found.append((f"val/images/{name}", classes[wnid]))
    return found


def _select(files: LabeledFiles, size: int | None, kind: str, name: str) -> LabeledFiles:
    """Take the first ``size`` files of a fixed random order."""
    check_size(kind, size, len(files), f"{name} images")
    if not files:
        raise ConfigError(f"the data has no {name} images: unpack the official archive again")
    random.Random(0).shuffle(files)  # A subset is the same for every train.seed.
    return files[:size]


def _image_files(root: Path, labeled: LabeledFiles, size: int, seed: int, *, augment: bool) -> ImageFiles:
    files, classes = zip(*labeled, strict=True)
    return ImageFiles(root=root, files=files, classes=classes, size=size, augment=augment, seed=seed)
