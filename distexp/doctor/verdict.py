"""What the findings add up to: which strategies, precisions and clusters can be used here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from distexp.doctor.finding import Finding
from distexp.doctor.software import Torch

NEEDED = ("configuration", "torch", "distexp cache", "disk here")
"""Without any of these, nothing can be trained."""


@dataclass
class Verdict:
    """What this machine can be used for."""

    fit: bool
    device: str
    strategies: list[str] = field(default_factory=list)
    precisions: list[str] = field(default_factory=list)
    offload: list[str] = field(default_factory=list)
    clusters: list[str] = field(default_factory=list)
    not_possible: list[str] = field(default_factory=list)


def judge(findings: Sequence[Finding], torch: Torch) -> Verdict:
    """What can be trained here, and why the rest cannot."""
    states = {finding.name: finding.state for finding in findings}
    broken = [name for name in NEEDED if states[name] == "missing"]
    if broken:
        return Verdict(False, "none", not_possible=[f"any training: mend {', '.join(broken)} first"])
    gpus = len(torch.capabilities) if torch.usable else 0
    verdict = Verdict(True, "cuda" if torch.usable else "cpu")
    collective = "nccl all-reduce" if gpus > 1 else "gloo all-reduce"
    meets = states["loopback port"] == "ok" and (gpus == 1 or states.get(collective) == "ok")
    verdict.strategies = ["single", *(["ddp", "fsdp"] if meets else [])]
    verdict.clusters = ["local"]
    if states["deepspeed"] == "ok" and meets:
        verdict.strategies.append("deepspeed")
    verdict.precisions = ["fp32", "bf16"]
    verdict.offload = ["false", "true"]
    if torch.usable:
        verdict.precisions.append("fp16")
        verdict.offload.append("pinned")
    if states["Slurm"] == "ok":
        verdict.clusters.append("slurm")
    verdict.not_possible = list(_not_possible(states, torch, meets=meets, collective=collective))
    return verdict


def _not_possible(states: Mapping[str, str], torch: Torch, *, meets: bool, collective: str) -> Iterator[str]:
    if not meets:
        yield f"strategy=ddp, fsdp, deepspeed: workers cannot meet ({collective}, loopback port)"
    elif states["deepspeed"] != "ok":
        yield "strategy=deepspeed: its library does not work"
    if not torch.usable:
        yield "precision=fp16, offload=pinned: they need a GPU"
        if states["GPUs"] != "missing":
            yield "training on the GPUs: see torch above, and choose cluster.device=cpu until it is mended"
    elif any(capability < (8, 0) for capability in torch.capabilities):
        yield "precision=bf16 at full speed: this GPU only emulates it, choose precision=fp16"
    if torch.usable and "missing" in (states["C++ compiler"], states["ninja"]):
        yield "DeepSpeed's own CPU Adam: it cannot be compiled, set deepspeed.cpu_optimizer=torch"
    if states["Slurm"] != "ok":
        yield "cluster=slurm: see Slurm above"


def spoken(verdict: Verdict) -> Iterator[str]:
    """The verdict in sentences."""
    if verdict.fit:
        where = "GPUs" if verdict.device == "cuda" else "the CPU"
        yield f"This machine is fit for training on {where}:"
        for key in ("strategy", "precision", "offload", "cluster"):
            values = {"strategy": verdict.strategies, "precision": verdict.precisions,
                      "offload": verdict.offload, "cluster": verdict.clusters}[key]  # fmt: skip
            yield f"  {key}={', '.join(values)}"
    else:
        yield "This machine is not fit for training."
    for reason in verdict.not_possible:
        yield f"Not possible: {reason}."
