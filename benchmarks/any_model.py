"""Speed and memory of ``kernels=fast`` for models that distexp was not tuned for, and those of an expert's loop.

Usage: ``python benchmarks/any_model.py OPT GEMMA --repeats 2``. See ``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.measurement import environment_of_gpus, read_record, read_result, run
from benchmarks.peers.settings import LEARNING_RATE, WEIGHT_DECAY
from benchmarks.plan import MODELS, write_model

LOOPS = ("ours", "expert")


def main(arguments: list[str] | None = None) -> None:
    """Measure both loops in turn, print each result as it comes, and write all into a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("models", nargs="+", choices=sorted(yaml.safe_load(MODELS.read_text())), metavar="MODEL", help="of models.yaml")
    add("--loops", default=",".join(LOOPS), help="ours, expert, or both")
    add("--strategy", choices=("single", "ddp", "fsdp"), default="single")
    add("--gpus", type=int, default=1, help="workers")
    add("--micro-batch", type=int, default=16)
    add("--length", type=int, default=512, help="tokens of a sample")
    add("--checkpointing", action="store_true", help="recompute the activations of the blocks")
    add("--tensor", type=int, default=1, help="workers that share the layers of a model of the Llama kind, with fsdp")
    add("--eager", action="store_true", help="the expert compiles nothing")
    add("--warmup", type=int, default=8, help="first steps, which are not measured")
    add("--steps", type=int, default=20, help="measured steps")
    add("--repeats", type=int, default=2)
    add("--override", action="append", default=[], metavar="KEY=VALUE", help="a further override of distexp")
    add("--results", type=Path, default=Path("benchmark_results/any_model"))
    add("--timeout-s", type=float, default=300.0, help="time limit of one run")
    add("--budget-s", type=float, default=math.inf, help="time after which no further run starts")
    options = parser.parse_args(arguments)
    end = time.monotonic() + options.budget_s
    path = options.results / "results.json"
    found = json.loads(path.read_text()) if path.exists() else []
    for repeat in range(options.repeats):
        for model in options.models:
            for loop in options.loops.split(","):
                left = end - time.monotonic()
                if left <= 0:
                    continue
                folder = options.results.absolute() / f"{len(found):03d}_{model.lower()}_{loop}"
                result = measure(loop, model, options, folder, min(left, options.timeout_s))
                found.append({"repeat": repeat + 1, **result})
                print(describe(found[-1]), flush=True)
                path.write_text(json.dumps(found, indent=1) + "\n")


def measure(loop: str, model: str, options: argparse.Namespace, folder: Path, timeout_s: float) -> dict[str, Any]:
    """Run one training in processes of its own, and return its result, or why it has none."""
    folder.mkdir(parents=True)
    target = write_model(folder, model)
    settings: dict[str, Any] = {
        "model": str(target),
        "strategy": options.strategy,
        "workers": options.gpus,
        "micro_batch": options.micro_batch,
        "length": options.length,
        "checkpointing": options.checkpointing,
        "warmup": options.warmup,
        "steps": options.steps,
        "tensor": options.tensor,
        "compile": not options.eager,
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    command = our_command(settings, options.override, folder) if loop == "ours" else expert_command(settings, folder)
    started = time.perf_counter()
    code = run(command, environment_of_gpus(options.gpus), folder / "log.txt", timeout_s)
    facts = {"loop": loop, **settings, "model": model, "overrides": options.override}
    facts["wall_s"] = round(time.perf_counter() - started, 1)
    result = our_result(folder / "run" / "record.json") if loop == "ours" else read_result(folder / "result.json")
    if code == 0 and result.get("samples_per_second"):
        return {**facts, "status": "completed", **result}
    last = (folder / "log.txt").read_text(errors="replace")[-1500:]
    return {**facts, "status": "too slow" if code is None else "failed", "reason": result.get("reason") or last}


def our_command(settings: dict[str, Any], overrides: list[str], folder: Path) -> list[str]:
    """Return the command of distexp."""
    steps, groups = settings["warmup"] + settings["steps"], settings["workers"] // settings["tensor"]
    own = [
        "model=hf",
        f"model.name={settings['model']}",
        "model.init=random",
        "dataset=synthetic",
        f"dataset.max_length={settings['length']}",
        f"dataset.train_size={steps * groups * settings['micro_batch']}",
        f"strategy={settings['strategy']}",
        "precision=bf16",
        "kernels=fast",
        f"cluster.workers_per_node={settings['workers']}",
        f"train.micro_batch_size={settings['micro_batch']}",
        "train.gradient_accumulation_steps=1",
        "train.evaluate=false",
        "train.num_epochs=1",
        f"train.measure_after_step={settings['warmup']}",
        "train.schedule=constant",
        "train.warmup_steps=0",
        f"train.learning_rate={LEARNING_RATE}",
        f"train.weight_decay={WEIGHT_DECAY}",
        *([f"parallel.tensor={settings['tensor']}"] if settings["tensor"] > 1 else []),
        *(["train.activation_checkpointing=true"] if settings["checkpointing"] else []),
    ]
    return [sys.executable, "-m", "distexp", *own, *overrides, f"hydra.run.dir={folder / 'run'}"]


def expert_command(settings: dict[str, Any], folder: Path) -> list[str]:
    """Return the command of the expert's loop."""
    program = ["-m", "benchmarks.peers.expert", str(folder / "settings.json"), str(folder / "result.json")]
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={settings['workers']}"]
    return [sys.executable, *(several if settings["workers"] > 1 else []), *program]


def our_result(path: Path) -> dict[str, Any]:
    """Return the result of a run of distexp: its speed and memory, or the reason why it has none."""
    result = read_record(path)
    if "samples_per_second" not in result:
        return result
    record = json.loads(path.read_text())
    metrics, environment = record["metrics"], record["environment"] or {}
    return {
        **result,
        **{name: metrics.get(name) for name in ("tokens_per_second", "mfu", "hfu", "compile")},
        "built": record["built"],
        "versions": {name: environment.get(name) for name in ("torch", "transformers", "python")},
        "commit": record["run"]["git_sha"],
        "clean": record["run"]["git_dirty"] is False,
    }


def describe(one: dict[str, Any]) -> str:
    """Return one line about a run."""
    name = f"{one['model']} {one['strategy']} x {one['workers']}, {one['micro_batch']} x {one['length']}, {one['loop']}"
    if one["status"] != "completed":
        return f"{name}: {one['status']} after {one['wall_s']} s: {one['reason']}"
    how = (one.get("built") or {}).get("compiled", "")
    facts = f"{one['samples_per_second']:.2f} samples/s, {one['peak_mib']:,.0f} MiB, loss {one['loss']:.3f}"
    return f"{name}: {facts}, mfu {one.get('mfu')}, {how}, process {one['wall_s']} s"


if __name__ == "__main__":
    main()
