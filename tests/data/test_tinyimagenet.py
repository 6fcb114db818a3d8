"""TinyImageNet: reading of JPEG files, augmentation, and errors in the folder."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from PIL import Image
from torch.utils.data import DataLoader

from distexp.config import ConfigError, DatasetConfig, ModelConfig
from distexp.data import tinyimagenet, tinyimagenet_sample
from distexp.data.base import IGNORE
from distexp.data.images import DataError, ImageFiles, decode_image
from distexp.data.tinyimagenet_sample import write_images
from tests.helpers.datasets import IMAGE_MODEL, REPOSITORY, dataset


@pytest.fixture
def sample(tmp_path: Path) -> DatasetConfig:
    """Generate a small folder that a test may damage."""
    write_images(tmp_path / "images", train=40, val=20)
    return dataset("tinyimagenet", root=str(tmp_path / "images"))


def load(config: DatasetConfig, model: ModelConfig, seed: int = 0) -> tuple[ImageFiles, ImageFiles]:
    data = tinyimagenet.load(config, model, seed)
    assert isinstance(data.train, ImageFiles)
    assert isinstance(data.evaluation, ImageFiles)
    return data.train, data.evaluation


def test_images_have_the_class_of_their_folder(tinyimagenet_folder: DatasetConfig) -> None:
    train, held_out = load(tinyimagenet_folder, IMAGE_MODEL)
    assert (len(train), len(held_out)) == (2000, 400)
    root = Path(str(tinyimagenet_folder.root))
    wnids = sorted((root / "wnids.txt").read_text().split())
    assert all(f"train/{wnids[label]}/" in file for file, label in zip(train.files, train.classes, strict=True))
    lines = (root / "val" / "val_annotations.txt").read_text().splitlines()
    annotated = dict(line.split("\t")[:2] for line in lines)
    for file, label in zip(held_out.files, held_out.classes, strict=True):
        assert annotated[Path(file).name] == wnids[label]
    assert len(set(train.files)) == 2000
    assert tinyimagenet.load(tinyimagenet_folder, IMAGE_MODEL, 0).num_classes == 200


def test_every_image_can_be_read(tinyimagenet_folder: DatasetConfig) -> None:
    for samples in load(tinyimagenet_folder, IMAGE_MODEL):
        shapes = {tuple(samples[index]["images"].shape) for index in range(len(samples))}
        assert shapes == {(3, 32, 32)}
        assert samples[0]["images"].dtype == torch.uint8
        assert samples[0]["labels"].shape == ()


def test_images_are_normalized_on_the_device(tinyimagenet_folder: DatasetConfig) -> None:
    data = tinyimagenet.load(tinyimagenet_folder, IMAGE_MODEL, 0)
    assert isinstance(data.evaluation, ImageFiles)
    batch = data.collate([data.evaluation[index] for index in (2, 3)]).to(torch.device("cpu"))
    assert batch.inputs["images"].is_contiguous(memory_format=torch.channels_last)
    assert batch.to(torch.device("cpu")).inputs["images"].equal(batch.inputs["images"]), "normalized once"
    with Image.open(data.evaluation.root / data.evaluation.files[3]) as image:
        pixels = np.asarray(image.convert("RGB"), dtype=np.float32)
    for channel, (mean, std) in enumerate([(0.485, 0.229), (0.456, 0.224), (0.406, 0.225)]):
        expected = (pixels[:, :, channel] / 255 - mean) / std
        np.testing.assert_allclose(batch.inputs["images"][1, channel].numpy(), expected, rtol=1e-5, atol=1e-5)


def test_the_first_images_are_of_many_classes(tinyimagenet_folder: DatasetConfig) -> None:
    train, held_out = load(replace(tinyimagenet_folder, train_size=200, eval_size=50), IMAGE_MODEL)
    assert (len(train), len(held_out)) == (200, 50)
    assert len(set(train.classes)) > 100
    assert len(set(held_out.classes)) > 30
    other_seed, _ = load(replace(tinyimagenet_folder, train_size=200), IMAGE_MODEL, seed=9)
    assert other_seed.files == train.files, "a subset does not change with train.seed"


@pytest.mark.parametrize("mode", ["L", "CMYK", "RGB"])
def test_images_of_every_mode_become_rgb(tmp_path: Path, mode: str) -> None:
    gray = Image.new("RGB", (8, 8), (120, 120, 120))
    gray.convert(mode).save(tmp_path / "x.JPEG")
    pixels = decode_image(tmp_path / "x.JPEG", 8)
    assert pixels.shape == (8, 8, 3)
    assert pixels.dtype == np.uint8
    assert np.abs(pixels.astype(int) - 120).max() <= 4


def test_a_file_of_another_format_is_not_interpreted(tmp_path: Path) -> None:
    """Pillow passes EPS to Ghostscript, which runs it."""
    (tmp_path / "x.JPEG").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n")
    with pytest.raises(DataError, match="cannot identify image file"):
        decode_image(tmp_path / "x.JPEG", 8)


@pytest.mark.parametrize(
    ("dtype", "ending", "largest", "expected"),
    [
        *((np.uint16, ending, *pair) for ending in ("png", "tif") for pair in ((65_535, 255), (32_768, 128), (255, 0))),
        *((np.int32, "pgm", *pair) for pair in ((65_535, 255), (255, 0))),  # a PGM of 16 bits
        *((np.int32, "tif", *pair) for pair in ((65_535, 255), (256, 1), (255, 255), (1, 1))),
    ],
)
def test_gray_images_of_16_and_32_bits_are_scaled_to_8(
    dtype: type[np.integer[Any]], ending: str, largest: int, expected: int, tmp_path: Path
) -> None:
    path = tmp_path / f"x.{ending}"
    Image.fromarray(np.array([[0, largest], [0, largest]], dtype=dtype)).save(path)
    assert decode_image(path, 2).tolist() == 2 * [[3 * [0], 3 * [expected]]]


def test_the_first_image_of_an_animation_is_used(tmp_path: Path) -> None:
    first, second = (Image.new("RGB", (4, 4), color) for color in ("red", "blue"))
    first.save(tmp_path / "x.gif", save_all=True, append_images=[second])
    assert decode_image(tmp_path / "x.gif", 4)[0, 0].tolist() == [255, 0, 0]


def test_images_of_floating_point_numbers_and_of_huge_size_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.tif"
    Image.fromarray(np.full((4, 4), 0.5, dtype=np.float32)).save(path)
    with pytest.raises(DataError, match=r"cannot decode .*x.tif as an image \(its pixels are float32"):
        decode_image(path, 4)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1)
    with pytest.raises(DataError, match=r"cannot decode .*x.tif as an image"):
        decode_image(path, 4)


def test_images_are_resized_to_image_size(sample: DatasetConfig) -> None:
    train, _ = load(replace(sample, image_size=20), IMAGE_MODEL)
    assert train[0]["images"].shape == (3, 20, 20)
    train, _ = load(sample, IMAGE_MODEL)
    assert train[0]["images"].shape == (3, 32, 32)


def test_augmentation_depends_on_seed_epoch_and_index_only(sample: DatasetConfig) -> None:
    train, held_out = load(sample, IMAGE_MODEL, seed=5)
    first = [train[index]["images"] for index in range(40)]
    again, _ = load(sample, IMAGE_MODEL, seed=5)
    assert all(again[index]["images"].equal(first[index]) for index in range(40))
    train.set_epoch(1)
    assert sum(train[index]["images"].equal(first[index]) for index in range(40)) < 5
    train.set_epoch(0)
    assert train[7]["images"].equal(first[7])
    other, _ = load(sample, IMAGE_MODEL, seed=6)
    assert sum(other[index]["images"].equal(first[index]) for index in range(40)) < 5
    held_out.set_epoch(1)
    fresh = load(sample, IMAGE_MODEL, seed=5)[1]
    assert held_out[0]["images"].equal(fresh[0]["images"]), "evaluation is never augmented"


def test_augmentation_moves_by_an_eighth_at_most_and_flips(sample: DatasetConfig) -> None:
    train, _ = load(sample, IMAGE_MODEL)
    plain = replace(train, augment=False)[0]["images"]
    padded = torch.nn.functional.pad(plain, (4, 4, 4, 4))
    seen = set()
    for epoch in range(200):
        train.set_epoch(epoch)
        image = train[0]["images"]
        seen |= {
            (top, left, flip)
            for top in range(9)
            for left in range(9)
            for flip in (False, True)
            if (image.flip(2) if flip else image).equal(padded[:, top : top + 32, left : left + 32])
        }
    assert len(seen) > 80
    assert {flip for _, _, flip in seen} == {False, True}


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_loader_workers_change_nothing(sample: DatasetConfig, context: str) -> None:
    data = tinyimagenet.load(replace(sample, train_size=8), IMAGE_MODEL, 3)
    assert isinstance(data.train, ImageFiles)
    loader: Any = DataLoader(
        data.train, 4, collate_fn=data.collate, num_workers=1, persistent_workers=True,
        multiprocessing_context=context,
    )  # fmt: skip
    for epoch in (0, 1):
        data.train.set_epoch(epoch)
        alone = [data.train[index]["images"] for index in range(8)]
        read = torch.cat([batch.inputs["images"] for batch in loader])
        assert read.equal(torch.stack(alone)), f"epoch {epoch}"


def test_samples_can_be_pickled(sample: DatasetConfig) -> None:
    train, _ = load(sample, IMAGE_MODEL)
    assert pickle.loads(pickle.dumps(train))[3]["images"].equal(train[3]["images"])


def test_a_batch_does_not_count_padding_samples(sample: DatasetConfig) -> None:
    data = tinyimagenet.load(sample, IMAGE_MODEL, 0)
    padding = {**data.train[1], "labels": torch.tensor(IGNORE)}
    batch = data.collate([data.train[0], padding, data.train[2]])
    assert batch.inputs["images"].shape == (3, 3, 32, 32)
    assert batch.labels.tolist() == [data.train[0]["labels"], IGNORE, data.train[2]["labels"]]
    assert (batch.num_samples, batch.num_targets, batch.num_tokens) == (2, 2, 0)


def test_images_that_are_not_uint8_are_refused(sample: DatasetConfig) -> None:
    data = tinyimagenet.load(sample, IMAGE_MODEL, 0)
    floats = {**data.train[0], "images": data.train[0]["images"] / 255}
    with pytest.raises(DataError, match=r"collate_images expects torch.uint8 pixels from 0 to 255, not torch.float32"):
        data.collate([floats])


def remove_folder(root: Path) -> None:
    (root / "train" / "n90000003" / "images").rename(root / "elsewhere")


def empty_folder(root: Path) -> None:
    for file in (root / "train" / "n90000003" / "images").iterdir():
        file.unlink()


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (
        lambda root: root.rename(root.parent / "moved"),
        r"dataset.root=.*/images is not a folder: set it to",
    ),
    (lambda root: (root / "wnids.txt").unlink(), r"wnids.txt, the list of classes, is missing"),
    (lambda root: (root / "wnids.txt").write_text("n1\nn1\n"), r"wnids.txt must list each class once"),
    (lambda root: (root / "wnids.txt").write_text(""), r"wnids.txt must list each class once"),
    (remove_folder, r"train/n90000003/images is missing: the official layout has train/<wnid>/images"),
    (empty_folder, r"train/n90000003/images has no .JPEG files"),
    (lambda root: (root / "val" / "val_annotations.txt").unlink(), r"val_annotations.txt is missing.*layout"),
    (
        lambda root: (root / "val" / "val_annotations.txt").write_text("val_0.JPEG n90000000\n"),
        r"val_annotations.txt, line 1: 'val_0.JPEG n90000000' must be a file name, a class",
    ),
    (
        lambda root: (root / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn90000000\t0\nval_1.JPEG\tn5"),
        r"val_annotations.txt, line 2: .* must be a file name, a class in wnids.txt and a bounding box",
    ),
    (
        lambda root: (root / "val" / "images" / "val_3.JPEG").unlink(),
        r"val_3.JPEG is missing, but .*val_annotations.txt lists it in line 4",
    ),
    (lambda root: (root / "val" / "val_annotations.txt").write_text(""), r"the data has no evaluation images"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=[message[:40] for _, message in DAMAGES])
def test_another_layout_is_refused(sample: DatasetConfig, damage: Callable[[Path], object], message: str) -> None:
    damage(Path(str(sample.root)))
    with pytest.raises(ConfigError, match=message) as caught:
        load(sample, IMAGE_MODEL)
    assert "\n" not in str(caught.value)


def test_a_missing_root_and_too_large_sizes_are_refused(sample: DatasetConfig) -> None:
    with pytest.raises(ConfigError, match=r"dataset.root is null: set it to the folder tiny-imagenet-200"):
        load(replace(sample, root=None), IMAGE_MODEL)
    with pytest.raises(ConfigError, match=r"dataset.train_size=41 is more than the 40 training images"):
        load(replace(sample, train_size=41), IMAGE_MODEL)
    with pytest.raises(ConfigError, match=r"dataset.eval_size=21 is more than the 20 evaluation images"):
        load(replace(sample, eval_size=21), IMAGE_MODEL)


@pytest.mark.parametrize("content", [b"", b"no image", None], ids=["empty", "text", "cut"])
def test_a_corrupt_image_is_named(sample: DatasetConfig, content: bytes | None) -> None:
    train, _ = load(sample, IMAGE_MODEL)
    path = train.root / train.files[5]
    path.write_bytes(path.read_bytes()[:300] if content is None else content)
    assert train[4]["images"].shape == (3, 32, 32)
    with pytest.raises(DataError, match=rf"cannot decode .*{train.files[5]} as an image \(.+\): restore"):
        train[5]


def read_tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_generated_images_are_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_images(tmp_path / name, train=100, val=40)
    assert read_tree(tmp_path / "one") == read_tree(tmp_path / "two")


def test_generated_images_are_in_the_official_layout(tmp_path: Path) -> None:
    write_images(tmp_path / "x", train=400, val=100)
    files = read_tree(tmp_path / "x")
    wnids = files["wnids.txt"].decode().split()
    assert [line.split("\t")[0] for line in files["words.txt"].decode().splitlines()] == wnids
    assert len(wnids) == 10
    for wnid in wnids:
        boxes = files[f"train/{wnid}/{wnid}_boxes.txt"].decode().splitlines()
        assert len(boxes) == 40
        assert all(f"train/{wnid}/images/{box.split()[0]}" in files and len(box.split()) == 5 for box in boxes)
    lines = [line.split("\t") for line in files["val/val_annotations.txt"].decode().splitlines()]
    assert all(len(line) == 6 and f"val/images/{line[0]}" in files for line in lines)
    assert Counter(line[1] for line in lines) == dict.fromkeys(wnids, 10)
    modes: Counter[str] = Counter()
    for path in (tmp_path / "x").rglob("*.JPEG"):
        with Image.open(path) as image:
            assert (image.format, image.size) == ("JPEG", (32, 32))
            modes[image.mode] += 1
    assert modes == {"RGB": 480, "L": 20}


def test_the_default_sample_loads() -> None:
    loaded = OmegaConf.load(REPOSITORY / "conf" / "dataset" / "tinyimagenet_sample.yaml")
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(DatasetConfig), loaded))
    assert isinstance(config, DatasetConfig)
    data = tinyimagenet_sample.load(config, IMAGE_MODEL, 0)
    assert (len(data.train), len(data.evaluation), data.num_classes) == (400, 100, 10)
    few = tinyimagenet_sample.load(replace(config, train_size=30, eval_size=10), IMAGE_MODEL, 0)
    assert (len(few.train), len(few.evaluation)) == (30, 10)
    with pytest.raises(ConfigError, match=r"dataset.root=/x has no effect with dataset=tinyimagenet_sample"):
        tinyimagenet_sample.load(replace(config, root="/x"), IMAGE_MODEL, 0)
