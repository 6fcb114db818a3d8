"""dataset.cache: the batches of decoded images are those of image files."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import functional as reference

from distexp.config import ConfigError, DatasetConfig
from distexp.data import image_cache, tinyimagenet
from distexp.data import images as decoded_images
from distexp.data.base import TaskData
from distexp.data.image_cache import CachedImages, cache_images, cut_windows, describe_cache
from distexp.data.images import MEAN, STD, DataError, ImageFiles, decode_once
from distexp.data.loader import BatchSharding, ShardedLoader
from distexp.data.tinyimagenet_sample import write_images
from tests.helpers.datasets import IMAGE_MODEL, dataset

CPU = torch.device("cpu")
PLACES = ("cpu", "gpu")  # On a CPU, "gpu" keeps the pixels on the device of the training, which is the CPU.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images") / "root"
    write_images(root, train=40, val=20)
    return root


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTEXP_CACHE", str(tmp_path / "cache"))


def load(folder: Path, **keys: Any) -> TaskData:
    config: DatasetConfig = dataset("tinyimagenet", root=str(folder), **keys)
    return tinyimagenet.load(config, IMAGE_MODEL, seed=3)


def image_files(data: TaskData) -> ImageFiles:
    assert isinstance(data.train, ImageFiles)
    return data.train


def make_loader(data: TaskData, *, train: bool = True, rank: int = 0, world_size: int = 1) -> ShardedLoader:
    sharding = BatchSharding(rank, world_size, micro_batch_size=4, accumulation=2)
    samples = data.train if train else data.evaluation
    return ShardedLoader(samples, data, sharding, CPU, seed=3, shuffle=train, num_workers=0)


def batches(loader: ShardedLoader, epoch: int, steps: range | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    for step in loader.iter_steps(epoch, steps):
        for batch in step.micro_batches:
            yield batch.inputs["images"], batch.labels


def levels(images: Tensor) -> Tensor:
    """Return the pixels from 0 to 255 of normalized images."""
    std, mean = (torch.tensor(values)[:, None, None] for values in (STD, MEAN))
    return (images * std + mean) * 255


@pytest.mark.parametrize("place", PLACES)
def test_batches_are_those_of_the_files_to_the_digit(folder: Path, place: str) -> None:
    data = load(folder)
    cached = cache_images(data, place, CPU)
    for rank in (0, 1):
        for train in (True, False):
            plain, fast = (make_loader(task_data, train=train, rank=rank, world_size=2) for task_data in (data, cached))
            for epoch in (0, 1) if train else (0,):
                pairs = list(zip(batches(plain, epoch), batches(fast, epoch), strict=True))
                assert pairs
                for (images, labels), (cached_images, cached_labels) in pairs:
                    assert labels.equal(cached_labels)
                    assert images.equal(cached_images)
                    assert cached_images.stride() == images.stride()
                    assert cached_images.dtype == torch.float32


@pytest.mark.parametrize("place", PLACES)
def test_an_empty_evaluation_set_is_kept(folder: Path, place: str) -> None:
    data = load(folder)
    assert isinstance(data.evaluation, ImageFiles)
    empty = replace(data, evaluation=replace(data.evaluation, files=[], classes=[]))
    cached = cache_images(empty, place, CPU)
    assert (len(cached.train), len(cached.evaluation)) == (len(data.train), 0)


@pytest.mark.parametrize("size", [20, 32, 50, 224])
def test_resized_images_are_those_of_the_files_within_one_level(folder: Path, size: int) -> None:
    data = load(folder, train_size=16, eval_size=16, image_size=size)
    cached = cache_images(data, "gpu", CPU)
    assert isinstance(cached.train, CachedImages)
    assert cached.train.pixels.shape == (16, 3, min(size, 32), min(size, 32)), "small images are stored small"
    for train in (True, False):
        loaders = (make_loader(task_data, train=train) for task_data in (data, cached))
        plain, fast = (levels(torch.cat([images for images, _ in batches(loader, 1)])) for loader in loaders)
        difference = (plain - fast).abs()
        assert difference.max() < 1.01
        assert (difference > 0.01).float().mean() < 0.05, "most pixels are equal"


def test_windows_are_those_of_torchvision() -> None:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (6, 3, 16, 16), dtype=torch.uint8, generator=generator)
    windows = torch.tensor([[0, 0, 0], [6, 6, 1], [3, 3, 0], [0, 6, 1], [5, 1, 1], [2, 4, 0]])
    cut = cut_windows(pixels, windows, size=24, margin=3)
    for image, (top, left, flip), result in zip(pixels, windows.tolist(), cut, strict=True):
        resized = reference.resize(Image.fromarray(image.permute(1, 2, 0).numpy()), [24, 24])
        expected = reference.crop(reference.pad(resized, [3]), top, left, 24, 24)
        expected = reference.hflip(expected) if flip else expected
        assert (reference.pil_to_tensor(expected) - result).abs().max() <= 1


def test_crops_and_flips_are_uniform(folder: Path) -> None:
    cached = cache_images(load(folder), "gpu", CPU)
    windows = []
    for epoch in range(100):
        cached.train.set_epoch(epoch)  # type: ignore[attr-defined]
        windows += [cached.train[index]["windows"].tolist() for index in range(40)]
    edges = Counter(top for top, _, _ in windows) + Counter(left for _, left, _ in windows)
    assert set(edges) == set(range(9)), "32 / 8 pixels on each side"
    expected = 8000 / 9
    assert all(abs(count - expected) < 5 * expected**0.5 for count in edges.values())
    assert abs(sum(flip for _, _, flip in windows) - 2000) < 5 * 1000**0.5
    assert [cached.evaluation[index]["windows"].tolist() for index in range(3)] == [[4, 4, 0]] * 3


@pytest.mark.parametrize("place", PLACES)
def test_the_rest_of_an_epoch_is_that_of_an_uninterrupted_run(folder: Path, place: str) -> None:
    data = cache_images(load(folder), place, CPU)
    whole = list(batches(make_loader(data), 1))
    resumed = list(batches(make_loader(cache_images(load(folder), place, CPU)), 1, range(2, 5)))
    assert len(resumed) == 6
    for (images, labels), (again, same_labels) in zip(whole[4:], resumed, strict=True):
        assert images.equal(again)
        assert labels.equal(same_labels)


def test_loader_processes_change_nothing(folder: Path) -> None:
    data = cache_images(load(folder, train_size=16), "cpu", CPU)
    sharding = BatchSharding(0, 1, micro_batch_size=8)
    loaders = [ShardedLoader(data.train, data, sharding, CPU, seed=3, shuffle=True, num_workers=n) for n in (0, 1)]
    for epoch in (0, 1):
        for (images, _), (again, _) in zip(*(batches(loader, epoch) for loader in loaders), strict=True):
            assert images.equal(again)


def test_images_are_decoded_once_and_by_several_processes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = image_files(load(folder))
    monkeypatch.setattr(decoded_images, "IMAGES_PER_JOB", 12)  # 40 images: 4 jobs, the last one of 4 images
    monkeypatch.setattr(decoded_images, "cpu_count", lambda: 2)
    first = decode_once(files)
    assert "note: decoding 40 images to 0 MB in " in capsys.readouterr().out
    plain = replace(files, augment=False)
    assert all(first[index].equal(plain[index]["images"]) for index in range(40))
    monkeypatch.setattr(decoded_images, "decode_image", None)
    assert decode_once(files).equal(first)
    assert capsys.readouterr().out == ""


def test_changed_files_are_decoded_again(folder: Path, tmp_path: Path) -> None:
    write_images(tmp_path / "changed", train=10, val=10)
    files = image_files(load(tmp_path / "changed"))
    before = decode_once(files)
    path = files.root / files.files[0]
    Image.new("RGB", (32, 32), "white").save(path, format="PNG")
    assert not before[0].equal(decode_once(files)[0])
    assert int(decode_once(files)[0].min()) == 255


def test_images_of_several_sizes_are_stored_as_requested(tmp_path: Path) -> None:
    write_images(tmp_path / "mixed", train=10, val=10)
    data = load(tmp_path / "mixed", image_size=40)
    files = image_files(data)
    Image.new("RGB", (20, 30), "red").save(files.root / files.files[7])
    pixels = decode_once(files)
    assert pixels.shape == (10, 3, 40, 40)
    plain = replace(files, augment=False)
    assert all(pixels[index].equal(plain[index]["images"]) for index in range(10))


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_damaged_image_is_named_and_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    write_images(tmp_path / "damaged", train=10, val=10)
    files = image_files(load(tmp_path / "damaged"))
    path = files.root / files.files[8]
    path.write_bytes(path.read_bytes()[:300])
    monkeypatch.setattr(decoded_images, "IMAGES_PER_JOB", 10 // jobs)
    monkeypatch.setattr(decoded_images, "cpu_count", lambda: 2)
    with pytest.raises(DataError, match=rf"cannot decode .*{files.files[8]} as an image"):
        decode_once(files)
    assert not list((tmp_path / "cache").glob("images-*"))


def test_a_full_disk_is_explained(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(decoded_images, "_write", write)
    with pytest.raises(ConfigError, match=r"cannot write 40 decoded images to .*cache \(No space left.*DISTEXP_CACHE"):
        decode_once(image_files(load(folder)))


def test_images_that_do_not_fit_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = 60 * 3 * 32 * 32
    monkeypatch.setattr(image_cache, "usable_memory", lambda: int(needed / 0.79))
    cache_images(load(folder), "cpu", CPU)
    monkeypatch.setattr(image_cache, "usable_memory", lambda: int(needed / 0.81))
    with pytest.raises(ConfigError, match=r"dataset.cache=cpu needs .* MiB .* more than 80% of .*dataset.cache=none"):
        cache_images(load(folder), "cpu", CPU)
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (needed, 10**12))
    with pytest.raises(ConfigError, match=r"free memory of cuda:0: use dataset.cache=cpu, or lower dataset.train_size"):
        cache_images(load(folder), "gpu", gpu)


def test_other_data_is_refused() -> None:
    data = TaskData("image_classification", [], [], lambda samples: None, num_classes=1)  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigError, match=r"dataset.cache=cpu needs data of distexp.data.images.ImageFiles, but it is"):
        cache_images(data, "cpu", CPU)


def test_the_record_has_the_memory_that_was_used(folder: Path) -> None:
    data = load(folder)
    assert describe_cache(data) == "none"
    assert describe_cache(cache_images(data, "cpu", CPU)) == "cpu"
    assert describe_cache(replace(data, task="causal_lm")) is None
