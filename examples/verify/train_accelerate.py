"""A training script with accelerate, which ``distexp verify`` can check.

DISTEXP_VERIFY=recordings/single python train_accelerate.py
DISTEXP_VERIFY=recordings/accelerate torchrun --nproc-per-node=2 train_accelerate.py
distexp verify --recorded recordings/single recordings/accelerate
"""

import os

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distexp import verify

MICRO_BATCH, ACCUMULATION, STEPS = 4, 2, 3  # samples of all processes, micro-batches of a step

torch.manual_seed(1)
size = MICRO_BATCH * ACCUMULATION * STEPS
data = TensorDataset(torch.randn(size, 16), torch.randint(0, 4, (size,)))
model: nn.Module = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))
optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)

# Each process gets its part of a batch, so that a step has the same samples on one process and on several.
loading = DataLoaderConfiguration(split_batches=True)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION, dataloader_config=loading)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=MICRO_BATCH))

watch = verify.watch(model, optimizer)  # records if DISTEXP_VERIFY names a folder
for inputs, labels in loader:
    with accelerator.accumulate(model):
        accelerator.backward(nn.functional.cross_entropy(model(inputs), labels))
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
watch.end()
accelerator.end_training()
if accelerator.num_processes > 1:
    os._exit(0)  # With torch 2.13, a thread of gloo may abort the process while Python ends.
