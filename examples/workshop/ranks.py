"""Processes that find each other, print who they are, and add their ranks.

torchrun --nproc-per-node 2 examples/workshop/ranks.py
"""

import os

import torch
import torch.distributed as dist


def main() -> None:
    """Join the process group and print this process, with the sum over all of them."""
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    address = "{MASTER_ADDR}:{MASTER_PORT}".format(**os.environ)
    print(f"rank {rank}: process {os.getpid()}, waiting for the others at {address}", flush=True)
    uses_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if uses_gpu else torch.device("cpu")
    if uses_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if uses_gpu else "gloo")
    total = torch.tensor([rank], device=device)
    dist.all_reduce(total)
    name = f"rank {rank} of {dist.get_world_size()}"
    print(f"{name}: {dist.get_backend()} on {device}, sum of all ranks {total.item()}", flush=True)
    dist.destroy_process_group()
    os._exit(0)  # With torch 2.13, a thread of gloo may abort the process while Python ends.


if __name__ == "__main__":
    main()
