"""What DeepSpeed compiles its own parts with, and Slurm."""

from __future__ import annotations

import os
import re
import shutil
import sysconfig
from pathlib import Path

from distexp.doctor.finding import TOOL_TIMEOUT_S, Finding, ask, missing, ok, warning
from distexp.doctor.software import Torch


def check_compiler() -> Finding:
    """What DeepSpeed's CPU Adam is compiled with."""
    compiler = os.environ.get("CXX") or "c++"
    path = shutil.which(compiler) or shutil.which("g++")
    if path is None:
        mend = "install g++ (or module load gcc), or set deepspeed.cpu_optimizer=torch"
        return missing("C++ compiler", f"neither {compiler} nor g++ is in PATH", mend)
    answer = ask([path, "--version"], TOOL_TIMEOUT_S)
    if answer.code != 0:
        mend = "install g++ again, or set deepspeed.cpu_optimizer=torch"
        return warning("C++ compiler", f"{path} does not run: {answer.last_words}", mend)
    return ok("C++ compiler", answer.output.splitlines()[0])


def check_ninja() -> Finding:
    """The build tool of torch's extensions, which must be in PATH."""
    path = shutil.which("ninja")
    if path is not None:
        answer = ask([path, "--version"], TOOL_TIMEOUT_S)
        if answer.code == 0:
            return ok("ninja", f"{answer.output.strip()} at {path}")
    scripts = Path(sysconfig.get_path("scripts"))
    if path is None and (scripts / "ninja").exists():
        return warning("ninja", f"{scripts}/ninja is not in PATH", f'export PATH="{scripts}:$PATH"')
    return missing("ninja", f"{path} does not run" if path else "not in PATH", "pip install ninja")


def check_toolkit(torch: Torch, gpus: int) -> Finding:
    """The CUDA toolkit, for DeepSpeed's GPU kernels: of the same major version as torch's."""
    home = os.environ.get("CUDA_HOME")
    path = shutil.which("nvcc", path=f"{home}/bin") if home else shutil.which("nvcc")
    if path is None:
        where = f"CUDA_HOME={home} holds no bin/nvcc" if home else "nvcc is not in PATH"
        mend = (
            "load a CUDA module or set CUDA_HOME where DeepSpeed is to compile its own kernels"
            if gpus else "nothing to do without GPUs"
        )  # fmt: skip
        return missing("CUDA toolkit", where, mend)
    answer = ask([path, "--version"], TOOL_TIMEOUT_S)
    match = re.search(r"release (\d+)\.(\d+)", answer.output)
    if match is None:
        return warning("CUDA toolkit", f"{path} does not run: {answer.last_words}", "install it again")
    found = f"{match[1]}.{match[2]} at {path}"
    if torch.cuda and torch.cuda.split(".")[0] != match[1]:
        mend = f"DeepSpeed refuses to compile: load the toolkit of CUDA {torch.cuda}"
        return warning("CUDA toolkit", f"{found}, torch was built for {torch.cuda}", mend)
    letters = [each for each in re.split(r"[ ;,]+", os.environ.get("TORCH_CUDA_ARCH_LIST", ""))
               if re.fullmatch(r"\d+\.\d+[a-z]+(\+PTX)?", each)]  # fmt: skip
    if letters:
        plain = re.sub(r"(\.\d+)[a-z]+", r"\1", os.environ["TORCH_CUDA_ARCH_LIST"])
        mend = f'DeepSpeed cannot read the letter: export TORCH_CUDA_ARCH_LIST="{plain}"'
        return warning("CUDA toolkit", f"{found}, TORCH_CUDA_ARCH_LIST has {', '.join(letters)}", mend)
    return ok("CUDA toolkit", found)


def check_slurm(timeout_s: float = TOOL_TIMEOUT_S) -> Finding:
    """Whether sbatch is here, and the controller answers."""
    absent = [tool for tool in ("sbatch", "sinfo", "squeue") if shutil.which(tool) is None]
    if absent:
        mend = "for cluster=slurm, start on a login node; cluster=local needs none"
        return missing("Slurm", f"{', '.join(absent)} not in PATH", mend)
    answer = ask(["sinfo", "--noheader", "--format=%P %D %t %G"], timeout_s)
    if answer.code is None:
        mend = "the controller may be down or overloaded: try sinfo by hand, ask the operators"
        return warning("Slurm", f"sinfo did not answer within {timeout_s:g} s", mend)
    if answer.code != 0:
        mend = "see that this host is part of the cluster and munge runs"
        return warning("Slurm", f"sinfo failed: {answer.last_words[:200]}", mend)
    partitions = list(dict.fromkeys(line.split()[0] for line in answer.output.splitlines() if line.strip()))
    version = ask(["sinfo", "--version"], timeout_s).output.strip() or "of unknown version"
    if not partitions:
        return warning("Slurm", f"{version}, no partition", "ask the operators for access to one")
    return ok("Slurm", f"{version}, partitions {', '.join(partitions[:8])}")
