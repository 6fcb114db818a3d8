"""A plain training script, which ``distexp verify`` can check: two lines, with ``watch`` and ``end``.

DISTEXP_VERIFY=recordings/single python train.py
DISTEXP_VERIFY=recordings/ddp torchrun --nproc-per-node=2 train.py
distexp verify --recorded recordings/single recordings/ddp
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distexp import verify

GLOBAL_BATCH, STEPS = 8, 4

rank, workers = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
torch.manual_seed(1)
data, labels = torch.randn(GLOBAL_BATCH * STEPS, 16), torch.randint(0, 4, (GLOBAL_BATCH * STEPS,))
model: nn.Module = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))
if workers > 1:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)

watch = verify.watch(model, optimizer)  # records if DISTEXP_VERIFY names a folder
for step in range(STEPS):
    size = GLOBAL_BATCH // workers
    start = step * GLOBAL_BATCH + rank * size
    own = slice(start, start + size)
    nn.functional.cross_entropy(model(data[own]), labels[own]).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
watch.end()

if workers > 1:
    dist.destroy_process_group()
    os._exit(0)  # With torch 2.13, a thread of gloo may abort the process while Python ends.
