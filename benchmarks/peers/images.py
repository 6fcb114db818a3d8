"""Image classification with torchvision: the loop of the workshop, and a fast one.

The workshop has fp16 with a GradScaler, and DDP if there are several workers. The fast loop (``raw``) adds
channels-last images, ``torch.compile``, a fused optimizer and pinned memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision import transforms
from torchvision.datasets import ImageFolder

from benchmarks.peers.common import DTYPES, StepRecorder, measure, model_config, start_worker
from benchmarks.peers.settings import LEARNING_RATE, WEIGHT_DECAY, Settings
from distexp.data.images import CROP_PADDING_DIVISOR, MEAN, STD
from distexp.models import resnet


def make_loader(settings: Settings, *, pinned: bool) -> tuple[DataLoader[Any], int]:
    """Return a DataLoader of augmented training images, and the number of classes."""
    size = settings.image_size
    transform = transforms.Compose(
        [
            transforms.Resize((size, size)),
            transforms.RandomCrop(size, padding=size // CROP_PADDING_DIVISOR),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )
    files = ImageFolder(f"{settings.data_root}/train", transform)
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(0))
    images: Any = Subset(files, order[: settings.rows].tolist())
    sampler: Any = DistributedSampler(images, shuffle=False) if settings.workers > 1 else None
    loader: DataLoader[Any] = DataLoader(
        images,
        settings.micro_batch,
        sampler=sampler,
        num_workers=settings.loader_processes,
        pin_memory=pinned,
        drop_last=True,
    )
    return loader, len(files.classes)


def train(settings: Settings) -> dict[str, object]:
    """Train and return the result."""
    device, fast = start_worker(settings), settings.peer == "raw"
    on_gpu = device.type == "cuda"
    loader, classes = make_loader(settings, pinned=fast and on_gpu)
    memory_format = torch.channels_last if fast else torch.contiguous_format
    model: Any = resnet.build(model_config(settings), classes)
    model.to(device, memory_format=memory_format)
    if settings.workers > 1:
        model = DistributedDataParallel(model, [device] if on_gpu else None, gradient_as_bucket_view=fast)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=LEARNING_RATE, momentum=0.9, weight_decay=WEIGHT_DECAY, fused=fast and on_gpu
    )
    scaler = torch.amp.GradScaler(device.type, enabled=settings.precision == "fp16")
    autocast = torch.autocast(device.type, DTYPES[settings.precision], enabled=settings.precision != "fp32")
    forward = torch.compile(model) if settings.compile else model
    criterion = nn.CrossEntropyLoss()
    recorder = StepRecorder(settings, device)
    recorder.start()
    for host_images, host_labels in loader:
        images = host_images.to(device, non_blocking=True, memory_format=memory_format)
        labels = host_labels.to(device, non_blocking=True)
        with autocast:
            loss = criterion(forward(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        recorder.end_step(loss)
    return recorder.result()


if __name__ == "__main__":
    measure(train)
