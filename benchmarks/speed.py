"""Training speed and memory of distexp relative to other training loops, on one machine.

Usage: ``python benchmarks/speed.py --train-path T.json --eval-path E.json --peers ours,trainer --micro-batch 16 64``.
See ``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.arguments import gpu_error, positive
from benchmarks.measurement import PEERS, Measurement, measure
from benchmarks.peers.settings import OURS, Settings
from benchmarks.tables import all_rows, best_rows
from distexp.config.keys import conf_dir
from distexp.data.squad import read_file
from distexp.launch.run_dirs import package_git_state

LIBRARIES = ("distexp", "torch", "transformers", "accelerate", "deepspeed", "triton")
STRATEGIES = ("single", "ddp", "fsdp", "zero2")


def main(arguments: list[str] | None = None) -> list[Measurement]:
    """Measure, print each result as it comes, and write ``results.json`` and ``table.md``.

    Results in the folder are kept, so the same command continues after an interruption.
    """
    options = parse(arguments)
    folder = Path(options.results).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    planned = with_enough_examples(plan(options), folder)
    started = time.monotonic()
    measurements = read_results(folder / "results.json")
    for peers, repeat in [(peers, repeat + 1) for peers in planned for repeat in range(options.repeats)]:
        for settings in peers:
            if is_done(settings, repeat, measurements) or time.monotonic() - started > options.budget_s:
                continue
            place = folder / "runs" / f"{len(measurements):03d}_{settings.peer}"
            measurements.append(measure(settings, repeat, place, options.timeout_s))
            print(describe(measurements[-1]), flush=True)
            write_results(folder, measurements)
    if measurements:
        print(f"\n{(folder / 'table.md').read_text()}\nwritten to {folder}")
    return measurements


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse and check the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--train-path", default="", help="SQuAD v1.1 JSON file to train on")
    add("--eval-path", default="", help="SQuAD v1.1 JSON file to evaluate on")
    add("--data-root", default="", help="folder of TinyImageNet, for --model resnet50")
    add("--image-size", type=positive, default=224, help="pixels, for --model resnet50")
    add("--loader-processes", type=int, default=8, help="DataLoader processes of a worker, for --model resnet50")
    add("--peers", default="ours,trainer,accelerate,raw", help=f"of {', '.join([*OURS, *PEERS])}")
    add("--model", default="bloom_560m", help="a model group of distexp with random weights")
    add("--micro-batch", type=positive, nargs="+", default=[16], help="samples per worker and forward pass")
    add("--accumulation", type=positive, default=1, help="micro-batches per step")
    add("--gpus", type=positive, default=1, help="workers of all strategies but single; with --device cpu: processes")
    add("--strategies", default=None, help=f"of {', '.join(STRATEGIES)}; default: single, or ddp,fsdp with --gpus")
    add("--logits", choices=("targets", "all"), default="targets", help="logits that distexp computes")
    add("--packing", action="store_true", help="let distexp pack samples into rows; the others pad them")
    add("--precision", choices=("bf16", "fp16", "fp32"), default="bf16")
    add("--max-length", type=positive, default=512, help="tokens of a row")
    add("--tokenizer", default="", help="name or folder; default: a tokenizer trained on the text")
    add("--warmup", type=int, default=10, help="first steps, which are not measured")
    add("--steps", type=positive, default=30, help="measured steps")
    add("--repeats", type=positive, default=3, help="rounds of all peers")
    add("--override", action="append", default=[], metavar="KEY=VALUE", help="a further override of distexp")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--no-compile", dest="compile", action="store_false", help="do not compile the models of the others")
    add("--timeout-s", type=float, default=600.0, help="time limit of one measurement")
    add("--budget-s", type=float, default=math.inf, help="time after which no further measurement starts")
    add(
        "--results",
        default=f"benchmark_results/{datetime.now(UTC):%Y-%m-%d_%H-%M-%S}",
        help="folder; with results in it, the command continues",
    )
    options = parser.parse_args(arguments)
    options.peers = options.peers.split(",")
    default = "ddp,fsdp" if options.gpus > 1 else "single"
    options.strategies = (options.strategies or default).split(",")
    for error in errors(options):
        parser.error(error)
    return options


def errors(options: argparse.Namespace) -> Iterator[str]:
    """Yield what is wrong with the arguments."""
    if options.device == "cuda" and (error := gpu_error(options.gpus)):
        yield error
    known = [*OURS, *PEERS]
    for peer in options.peers:
        if peer not in known:
            yield f"--peers: {peer} is unknown: use {', '.join(known)}"
    for strategy in options.strategies:
        if strategy not in STRATEGIES:
            yield f"--strategies: {strategy} is unknown: use {', '.join(STRATEGIES)}"
    if not (conf_dir() / "model" / f"{options.model}.yaml").is_file():
        yield f"--model: {options.model} is no model group: `distexp --help` lists them"
    if options.data_root:
        if options.accumulation > 1:
            yield f"--accumulation: {options.accumulation} is not supported with --data-root"
        if not Path(options.data_root, "train").is_dir():
            yield f"--data-root: {options.data_root} has no folder train: use the folder of TinyImageNet"
        return
    for name in ("train_path", "eval_path"):
        path = getattr(options, name)
        if not Path(path).is_file():
            yield f"--{name.replace('_', '-')}: {path!r} is not a file: use a SQuAD v1.1 JSON file, or --data-root"


def plan(options: argparse.Namespace) -> list[list[Settings]]:
    """Return the settings that are measured in turn, for each strategy and micro-batch.

    Settings that do not depend on the micro-batch, as those of the workshop, are in the first list only.
    """
    planned: list[list[Settings]] = []
    seen: set[Settings] = set()
    for strategy, micro_batch in itertools.product(options.strategies, options.micro_batch):
        common = Settings(
            peer="",
            model=options.model,
            train_path=absolute(options.train_path),
            eval_path=absolute(options.eval_path),
            data_root=absolute(options.data_root),
            strategy=strategy,
            workers=1 if strategy == "single" else options.gpus,
            micro_batch=micro_batch,
            accumulation=options.accumulation,
            warmup=options.warmup,
            steps=options.steps,
            max_length=options.max_length,
            tokenizer=options.tokenizer,
            image_size=options.image_size,
            loader_processes=options.loader_processes if options.data_root else 0,
            logits=options.logits,
            precision=options.precision,
            compile=options.compile,
            device=options.device,
            packing=options.packing,
            overrides=tuple(options.override),
        )
        new = [settings for peer in options.peers if (settings := common.as_peer(peer)) not in seen]
        seen.update(new)
        planned.append(new)
    return planned


def absolute(path: str) -> str:
    """Return the absolute path, or an empty one."""
    return str(Path(path).resolve()) if path else ""


def with_enough_examples(planned: list[list[Settings]], folder: Path) -> list[list[Settings]]:
    """Return settings whose training file has enough examples; a file that is too small is repeated.

    So every training has one epoch, without an evaluation between its steps. Images are not repeated.
    """
    if planned[0][0].data_root:
        check_images(max(settings.rows for settings in itertools.chain(*planned)), Path(planned[0][0].data_root))
        return planned
    given = Path(planned[0][0].train_path)
    examples = len(read_file(given))
    copies = math.ceil(max(settings.wanted_examples for settings in itertools.chain(*planned)) / examples)
    if copies == 1:
        return planned
    content = json.loads(given.read_text())
    path = folder / "train.json"
    path.write_text(json.dumps({**content, "data": content["data"] * copies}))
    print(f"{given} has {examples} examples, fewer than needed: {path} repeats them {copies} times", flush=True)
    return [[replace(settings, train_path=str(path)) for settings in peers] for peers in planned]


def check_images(needed: int, root: Path) -> None:
    """Exit with a message if the folder has too few images."""
    found = sum(1 for _ in root.glob("train/*/images/*"))
    if found < needed:
        raise SystemExit(f"{root} has {found} images, but the steps need {needed}: lower --steps or --micro-batch")


def describe(one: Measurement) -> str:
    """Return one line about a measurement."""
    settings = one.settings
    name = f"{settings.strategy} x {settings.workers}, {settings.peer}, micro-batch {settings.micro_batch}"
    if one.samples_per_second is None:
        return f"{name}, repeat {one.repeat}: {one.status}: {one.reason}"
    memory = "" if one.peak_mib is None else f", peak {one.peak_mib:,.0f} MiB"
    return f"{name}, repeat {one.repeat}: {one.samples_per_second:.1f} samples/s{memory}, process {one.wall_s:.0f} s"


def provenance(measurements: list[Measurement], commands: list[str]) -> str:
    """Return the commands, versions and devices as Markdown."""
    devices = sorted({one.device_name for one in measurements if one.device_name})
    versions = ", ".join(f"{name} {found}" for name in LIBRARIES if (found := installed_version(name)))
    lines = "".join(f"    {command}\n" for command in commands)
    return f"{lines}\n{', '.join(devices)}; Python {sys.version.split()[0]}, {versions}.\n"


def command_line() -> str:
    """Return the command of this program, without the folders of its files."""
    return shlex.join(["python", "benchmarks/speed.py", *map(without_folders, sys.argv[1:])])


def without_folders(content: Any) -> Any:
    """Return a JSON value in which each absolute path is the name of its file: results can then be published."""
    if isinstance(content, dict):
        return {key: without_folders(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [without_folders(value) for value in content]
    return re.sub(r"(?<![\w/:])/(?:[^\s/]+/)+", "", content) if isinstance(content, str) else content


def installed_version(name: str) -> str | None:
    """Return the version of a library, or None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def read_results(path: Path) -> list[Measurement]:
    """Return the measurements of an earlier command, if there are any."""
    content = json.loads(path.read_text())["measurements"] if path.exists() else []
    return [Measurement(**{**one, "settings": Settings.from_json(one["settings"])}) for one in content]


def is_done(settings: Settings, repeat: int, measurements: list[Measurement]) -> bool:
    """Return whether the settings were measured in this repeat, or failed in an earlier one."""
    wanted = without_folders(asdict(settings))
    earlier = [one for one in measurements if without_folders(asdict(one.settings)) == wanted]
    return any(one.repeat == repeat or one.status != "completed" for one in earlier)


def write_results(folder: Path, measurements: list[Measurement]) -> None:
    """Write all measurements with versions, commit and command, as JSON and as tables."""
    path, code = folder / "results.json", package_git_state()
    earlier = json.loads(path.read_text())["commands"] if path.exists() else []
    commands = list(dict.fromkeys([*earlier, command_line()]))
    content = {
        "commands": commands,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "git_sha": code.sha,
        "git_dirty": code.dirty,
        "python": sys.version.split()[0],
        "versions": {name: installed_version(name) for name in LIBRARIES},
        "measurements": [without_folders(asdict(one)) for one in measurements],
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
    tables = f"{all_rows(measurements)}\nThe fastest micro-batch of each:\n\n{best_rows(measurements)}"
    (folder / "table.md").write_text(f"{provenance(measurements, commands)}\n{tables}")


if __name__ == "__main__":
    # SIGTERM must end the process of a measurement too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    main()
