"""Checks of Slurm, and of the compilers that DeepSpeed needs for its extensions."""

from __future__ import annotations

import os
import re
import shutil
import sysconfig
from pathlib import Path

from distexp.doctor.check_result import CheckResult, missing, ok, warning
from distexp.doctor.commands import TOOL_TIMEOUT_S, run_command
from distexp.doctor.software import TorchInfo


def check_compiler() -> CheckResult:
    """Check the C++ compiler, which DeepSpeed needs for its CPU Adam."""
    compiler = os.environ.get("CXX") or "c++"
    path = shutil.which(compiler) or shutil.which("g++")
    if path is None:
        hint = "install g++ (or module load gcc), or set deepspeed.cpu_optimizer=torch"
        return missing("C++ compiler", f"neither {compiler} nor g++ is on PATH", hint)
    result = run_command([path, "--version"], TOOL_TIMEOUT_S)
    if result.code != 0:
        hint = "reinstall g++, or set deepspeed.cpu_optimizer=torch"
        return warning("C++ compiler", f"{path} does not run: {result.error_line}", hint)
    return ok("C++ compiler", result.output.splitlines()[0])


def check_ninja() -> CheckResult:
    """Check ninja, which builds torch extensions and must be on PATH."""
    path = shutil.which("ninja")
    if path is not None:
        result = run_command([path, "--version"], TOOL_TIMEOUT_S)
        if result.code == 0:
            return ok("ninja", f"{result.output.strip()} at {path}")
    scripts = Path(sysconfig.get_path("scripts"))
    if path is None and (scripts / "ninja").exists():
        return warning("ninja", f"{scripts}/ninja is not on PATH", f'export PATH="{scripts}:$PATH"')
    return missing("ninja", f"{path} does not run" if path else "not on PATH", "pip install ninja")


def check_toolkit(torch: TorchInfo, gpus: int) -> CheckResult:
    """Check the CUDA toolkit for DeepSpeed's GPU kernels; torch must have the same major version of CUDA."""
    home = os.environ.get("CUDA_HOME")
    path = shutil.which("nvcc", path=f"{home}/bin") if home else shutil.which("nvcc")
    if path is None:
        where = f"CUDA_HOME={home} has no bin/nvcc" if home else "nvcc is not on PATH"
        hint = (
            "load a CUDA module or set CUDA_HOME, if DeepSpeed has to compile GPU kernels"
            if gpus else "nothing to do without GPUs"
        )  # fmt: skip
        return missing("CUDA toolkit", where, hint)
    result = run_command([path, "--version"], TOOL_TIMEOUT_S)
    match = re.search(r"release (\d+)\.(\d+)", result.output)
    if match is None:
        return warning("CUDA toolkit", f"{path} does not run: {result.error_line}", "reinstall it")
    found = f"{match[1]}.{match[2]} at {path}"
    if torch.cuda and torch.cuda.split(".")[0] != match[1]:
        hint = f"DeepSpeed refuses to compile with it: load the toolkit of CUDA {torch.cuda}"
        return warning("CUDA toolkit", f"{found}, torch was built for {torch.cuda}", hint)
    letters = [letter for letter in re.split(r"[ ;,]+", os.environ.get("TORCH_CUDA_ARCH_LIST", ""))
               if re.fullmatch(r"\d+\.\d+[a-z]+(\+PTX)?", letter)]  # fmt: skip
    if letters:
        plain = re.sub(r"(\.\d+)[a-z]+", r"\1", os.environ["TORCH_CUDA_ARCH_LIST"])
        hint = f'DeepSpeed cannot parse the letter suffix: export TORCH_CUDA_ARCH_LIST="{plain}"'
        return warning("CUDA toolkit", f"{found}, TORCH_CUDA_ARCH_LIST has {', '.join(letters)}", hint)
    return ok("CUDA toolkit", found)


def check_slurm(timeout_s: float = TOOL_TIMEOUT_S) -> CheckResult:
    """Check that the commands of Slurm exist and the controller responds."""
    absent = [tool for tool in ("sbatch", "sinfo", "squeue") if shutil.which(tool) is None]
    if absent:
        hint = "for cluster=slurm, use a login node of the cluster; cluster=local does not need Slurm"
        return missing("Slurm", f"{', '.join(absent)} not on PATH", hint)
    result = run_command(["sinfo", "--noheader", "--format=%P %D %t %G"], timeout_s)
    if result.code is None:
        hint = "the controller may be down or overloaded: run sinfo manually, or contact the administrators"
        return warning("Slurm", f"sinfo did not respond within {timeout_s:g} s", hint)
    if result.code != 0:
        hint = "check that this host is part of the cluster and munge is running"
        return warning("Slurm", f"sinfo failed: {result.error_line[:200]}", hint)
    partitions = list(dict.fromkeys(line.split()[0] for line in result.output.splitlines() if line.strip()))
    version = run_command(["sinfo", "--version"], timeout_s).output.strip() or "of unknown version"
    if not partitions:
        return warning("Slurm", f"{version}, no partition", "ask the administrators for access to a partition")
    return ok("Slurm", f"{version}, partitions {', '.join(partitions[:8])}")
