"""``distexp verify``: its output, its exit codes, and runs without a false alarm."""

from __future__ import annotations

import hashlib
import html
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from distexp import verify
from distexp.config import ConfigError
from distexp.exceptions import SweepInterrupted
from distexp.launch.outcome import add_proof
from distexp.runs.record import RunRecord, RunSpec
from distexp.verify import phases
from distexp.verify.arithmetic import explain_gradients
from distexp.verify.comparison import Recording
from distexp.verify.diagnosis import Finding, diagnose
from distexp.verify.phases import PHASES, phase_overrides
from tests.helpers.odd_models import UNREPEATABLE, build
from tests.helpers.runs import HELPERS, REPOSITORY, resolve_cell, run_distexp, run_module
from tests.models.test_own_modules import MODEL
from tests.verify.test_museum import CONF

OPTIONS = ("model=gpt_tiny", "cluster.device=cpu", "--config-dir", str(CONF), "trusted_packages=[tests]")
ENV = {"PYTHONPATH": str(REPOSITORY)}


DS_CONFIG = {
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"weight_decay": "auto"}},
    "zero_optimization": {"stage": 2, "round_robin_gradients": True, "reduce_bucket_size": 20_000},
}
"""A user's file with values that the phases change, and options that distexp has no key for."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what one command printed about DDP, a strategy with a bug, one that fails, and a file of DeepSpeed."""
    folder = tmp_path_factory.mktemp("verify é, 1")  # a path that Hydra takes in quotes only
    (folder / "ds.json").write_text(json.dumps(DS_CONFIG))
    cells = [
        ["strategy=ddp"],
        ["strategy=museum", "strategy.options.bug=summed"],
        ["strategy=museum", "strategy.options.bug=fails"],
        ["strategy=deepspeed", "deepspeed.config_file=ds.json", "train.gradient_clipping=0.5", "precision=bf16"],
    ]
    swept = f"sweep.cells={json.dumps(cells, separators=(',', ':'))}"
    done = run_distexp("verify", "--quick", "--json", "--multirun", swept, *OPTIONS, cwd=folder, env=ENV)
    assert done.returncode == 1, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_no_phase_has_dropout() -> None:
    typed = ("model=hf", "model.name=gpt2", "model.init=random", "adapter=lora", "adapter.dropout=0.1")
    config = resolve_cell(*typed, "dataset=synthetic")
    for phase in PHASES:
        assert {"model.dropout=0", "adapter.dropout=0"} <= set(phase_overrides(phase, config))
    assert "adapter.dropout=0" not in phase_overrides(PHASES[0], resolve_cell("model=gpt_tiny"))


def test_a_scale_limits_no_batch_of_a_phase() -> None:
    """The run on one worker has more micro-batches than the limit of ``scale=tiny``."""
    tiny = ("model=gpt_tiny", "dataset=squad_sample", "scale=tiny")
    typed = [*phase_overrides(PHASES[0], resolve_cell(*tiny)), "train.gradient_accumulation_steps=6"]
    assert resolve_cell(*tiny, *typed).train.gradient_accumulation_steps == 6


def test_a_repeated_verification_has_nothing_of_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(overrides: Sequence[str]) -> Any:
        config = resolve_cell(*overrides)
        known = {"config": config, "overrides": list(overrides), "varied": [], "errors": []}
        return SimpleNamespace(**known, id="0", config_dir_options=[])

    def interrupt(*_: Any) -> None:
        raise SweepInterrupted("interrupted")

    monkeypatch.setenv("MY_API_KEY", "not for a file")
    monkeypatch.setattr(phases, "PHASES", PHASES[-1:])
    monkeypatch.setattr(verify, "run_workers", interrupt)
    cell = make(["model=gpt_tiny", "strategy=ddp"])
    for _ in range(2):
        with pytest.raises(SweepInterrupted):
            verify.verify_cells([cell], make, tmp_path, quick=False, timeout_s=60)
        proofs = ("0/proof.json", "0/proof.html", "1/proof.json", "1/proof.html")  # The earlier one had two variants.
        for name in (*proofs, "0/resume/tensors.pt", "0/resume/checkpoints/step-3/manifest.json"):
            path = tmp_path / name
            assert not path.exists()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert tmp_path / "job.json" in files
        assert not [path for path in files if b"not for a file" in path.read_bytes()], "a secret of the shell"
        assert {"resume", "resume-resumed"} <= {file.parent.name for file in tmp_path.rglob("spec.json")}
        assert (tmp_path / "0" / "resume-resumed" / "checkpoints" / "step-3").is_dir()


def test_the_same_training_is_equal(results: list[dict[str, Any]]) -> None:
    found = results[0]
    assert (found["label"], found["status"]) == ("ddp", "equal")
    assert [phase["phase"] for phase in found["phases"]] == ["sgd", "uneven", "accumulation", "training"]
    for phase in found["phases"]:
        assert {"samples", "initial", "loss", "gradient", "norm", "lr", "update"} <= phase["worst"].keys()
        assert phase["worst"]["gradient"]["error"] < 1e-5
    assert "evaluation" in found["phases"][1]["worst"]


def test_a_difference_has_its_place_and_its_cause(results: list[dict[str, Any]]) -> None:
    cause: Mapping[str, Any] = results[1]["cause"]
    assert (cause["id"], cause["phase"], cause["step"]) == ("summed", "sgd", 1)
    assert cause["sentence"].endswith("are 2 times those of single: summed over the 2 workers, not averaged")
    proof = json.loads(Path(results[1]["proof"]).read_text())
    assert proof == results[1]
    assert proof["versions"]["torch"]
    assert len(proof["configuration"]) == 12
    error, bound, step, phase = next(iter(proof["parameters"].values()))["gradient"]
    assert error / bound > 1000
    assert (step, phase) == (1, "sgd")
    page = Path(results[1]["proof"]).with_name("proof.html").read_text()
    assert html.escape(cause["sentence"]) in page
    assert page.count('<td class="l4"') > len(proof["parameters"])
    assert proof["command"].startswith(f"distexp verify --quick --config-dir {CONF} ")
    assert proof["command"].endswith("strategy=museum ++strategy.options.bug=summed")


def test_a_strategy_that_fails_cannot_be_compared(results: list[dict[str, Any]]) -> None:
    found = results[2]
    assert found["status"] == "not comparable"
    assert found["reasons"][0] == (
        "phase sgd: the variant run failed on rank 1: RuntimeError: the second update is broken"
    )


def test_a_file_of_deepspeed_is_used_with_the_settings_of_each_phase(results: list[dict[str, Any]]) -> None:
    found = results[3]
    assert (found["status"], found["skipped"], len(found["phases"])) == ("equal", {}, 4)
    for phase, clipping in (("sgd", 0.0), ("training", 0.02)):
        written = json.loads((Path(found["proof"]).parent / phase / "ds_config.json").read_text())
        assert written["gradient_clipping"] == clipping
        assert written["zero_optimization"].items() >= DS_CONFIG["zero_optimization"].items()  # type: ignore[attr-defined]


TEXT = ("model=gpt_tiny", "dataset.max_length=32", "train.micro_batch_size=2", "dataset.path=rows.jsonl")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((*TEXT, "dataset=text"), id="text", marks=pytest.mark.release),
        pytest.param((*TEXT, "dataset=text", "dataset.eval_path=rows.jsonl", "dataset.train_size=5"), id="few"),
        pytest.param(("model=resnet_tiny", "dataset=image_folder", "dataset.path=photos"), id="images"),
        pytest.param(
            (*TEXT[:-1], "dataset=squad", "dataset.train_path=a.json", "dataset.eval_path=a.json"),
            id="qa",
            marks=pytest.mark.release,
        ),
    ],
)
def test_small_data_of_a_user_are_compared(options: tuple[str, ...], tmp_path: Path) -> None:
    rows = [json.dumps({"text": f"some words and the number {number}"}) for number in range(16)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    for number in range(14):
        path = tmp_path / "photos" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (17 * number, 90, 30)).save(path)
    answers = {"answers": [{"text": "words", "answer_start": 5}]}
    asked = [{"id": str(number), "question": f"What is {number}?", **answers} for number in range(14)]
    (tmp_path / "a.json").write_text(
        json.dumps({"data": [{"paragraphs": [{"context": "some words", "qas": asked}]}], "version": "1.1"})
    )
    done = run_distexp("verify", "--quick", "--json", "strategy=ddp", "cluster.device=cpu", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    assert {phase["status"] for phase in json.loads(done.stdout)[0]["phases"]} == {"equal"}


ODD = (*MODEL[:-1], "trusted_packages=[odd_models]", "strategy=ddp", "cluster.device=cpu", "dataset.max_length=32")


def test_a_training_that_draws_random_numbers_or_counts_cannot_be_compared(tmp_path: Path) -> None:
    own = "+model.options.kind=counting,dropping_in_object"
    env = {"PYTHONPATH": str(HELPERS)}
    swept = run_distexp("verify", "--quick", "--json", "--multirun", *ODD, own, cwd=tmp_path, env=env)
    assert swept.returncode == 2, swept.stdout[-2000:] + swept.stderr
    found = json.loads(swept.stdout)
    assert [each["status"] for each in found] == ["not comparable"] * 2
    for each, kind in zip(found, ("Counting", "DroppingInObject"), strict=True):
        assert f"{kind} has other outputs in a second forward pass of a batch in training, by " in each["reasons"][0]


@pytest.mark.parametrize("kind", [*UNREPEATABLE, "in_place"])
def test_a_forward_pass_that_draws_random_numbers_is_repeated(kind: str) -> None:
    import torch

    from distexp.verify.arithmetic import RepeatCheck

    torch.manual_seed(0)
    config = resolve_cell(*MODEL[:-1], "trusted_packages=[odd_models]", f"+model.options.kind={kind}").model
    model, tokens = build(config, 64), torch.arange(24).view(2, 12)
    RepeatCheck(model, 1e-6, torch.device("cpu"))
    refused = pytest.raises(ConfigError, match=f"{type(model).__name__} has other outputs in a second forward pass")
    with refused if kind in UNREPEATABLE else nullcontext():
        model(input_ids=tokens, attention_mask=torch.ones_like(tokens))


def test_a_model_that_changes_its_inputs_or_has_an_own_loss_is_compared(tmp_path: Path) -> None:
    kind = "+model.options.kind"
    cells = json.dumps([[f"{kind}=in_place"], [f"{kind}=loss", "train.loss='own'"]])
    env = {"PYTHONPATH": str(HELPERS)}
    swept = run_distexp(
        "verify", "--quick", "--json", "--multirun", *ODD, f"sweep.cells={cells}", cwd=tmp_path, env=env
    )
    assert swept.returncode == 0, swept.stdout[-2000:] + swept.stderr


def test_workers_elsewhere_are_refused(tmp_path: Path) -> None:
    done = run_distexp("verify", "cluster=slurm", cwd=tmp_path)
    assert done.returncode == 2
    assert "use cluster=local" in done.stderr
    assert not list(tmp_path.rglob("proof.json"))


def test_variants_with_other_arithmetic_are_refused(tmp_path: Path) -> None:
    cells = 'sweep.cells=[["strategy=ddp"],["cluster.environment={ATEN_CPU_CAPABILITY: default}"]]'
    done = run_distexp("verify", "--multirun", cells, "cluster.device=cpu", cwd=tmp_path)
    assert done.returncode == 2
    assert "verify each of them by its own command" in done.stderr


def test_a_run_refuses_the_keys_of_verify(tmp_path: Path) -> None:
    done = run_distexp("verify.quick=true", cwd=tmp_path)
    assert done.returncode == 2
    assert "verify.quick=true is for distexp verify" in done.stderr


@pytest.fixture(scope="module")
def proved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Return the cache and the results of a complete verification of FSDP and ZeRO-3."""
    folder = tmp_path_factory.mktemp("proved")
    cells = 'sweep.cells=[["sharding=full_shard"],["zero_stage=3"]]'
    env = {"DISTEXP_CACHE": str(folder / "cache")}
    done = run_distexp("verify", "--json", "--multirun", cells, *GPT, cwd=folder, env=env)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    return folder / "cache", json.loads(done.stdout)


GPT = ("model=gpt_tiny", "cluster.device=cpu")


@pytest.mark.slow
def test_all_phases_give_no_false_alarm(proved: tuple[Path, list[dict[str, Any]]]) -> None:
    found = proved[1]
    assert [each["status"] for each in found] == ["equal", "equal"]
    for each in found:
        assert [phase["phase"] for phase in each["phases"]] == [*(phase.name for phase in PHASES), "tied"]


@pytest.mark.slow
def test_the_proof_is_in_the_records_of_later_runs(
    proved: tuple[Path, list[dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, (sharded, _) = proved
    monkeypatch.setenv("DISTEXP_CACHE", str(cache))
    run_distexp(
        *(*GPT, "sharding=full_shard", "train.learning_rate=0.02", "train.max_steps=1", "hydra.run.dir=run"),
        cwd=tmp_path,
    )
    record, spec = RunRecord.read(tmp_path / "run" / "record.json"), RunSpec.read(tmp_path / "run")
    digest = hashlib.sha256(Path(sharded["proof"]).read_bytes()).hexdigest()[:12]
    assert record.run.proof == digest
    assert record.environment is not None
    record.environment.variables = {"ATEN_CPU_CAPABILITY": "default"}
    add_proof(record, spec, tmp_path)
    assert record.run.proof is None, "the arithmetic is another one"
    record.environment.variables = {}
    add_proof(record, spec, tmp_path)
    assert record.run.proof == digest
    spec.config.fsdp.blocks_per_unit = 2
    add_proof(record, spec, tmp_path)
    assert record.run.proof is None, "an option is another one"


SCRIPT = REPOSITORY / "examples" / "verify" / "train.py"
REDUCED = "[parameter.grad.mul_(workers) for parameter in model.parameters()]"
"""A line that undoes the division by the number of workers."""

VARIABLE = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_VERBOSE": "0"}
FLAG = 'torch.backends.mkldnn.matmul.fp32_precision = "bf16"'
"""What changes the arithmetic: an environment variable, next to one that does not; and a flag of torch."""


def record(script: Path, folder: Path, workers: int = 1, **added: str) -> None:
    """Run a script with a number of workers, and record its training in a folder."""
    launched = ["-m", "torch.distributed.run", f"--nproc-per-node={workers}"] if workers > 1 else []
    env = {**os.environ, "DISTEXP_VERIFY": folder.name, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **added}
    subprocess.run([sys.executable, *launched, str(script)], cwd=folder.parent, env=env, check=True)


def record_forked(script: Path, folder: Path, workers: int = 1) -> None:
    """Record as ``record`` does, in forks of a process that has imported torch."""
    shutil.copy(script, folder.parent)
    ranks = ("tests.helpers.forked_ranks", str(workers), str(script)) if workers > 1 else (script.stem,)
    env = {"DISTEXP_VERIFY": folder.name, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = run_module(*ranks, cwd=folder.parent, env=env)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_script_with_accelerate_is_compared_with_one_process(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    script = SCRIPT.with_name("train_accelerate.py")
    record_forked(script, tmp_path / "single")
    record_forked(script, tmp_path / "accelerate", 2)
    done = run_distexp("verify", "--recorded", "single", "accelerate", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    ((phase,),) = (each["phases"] for each in json.loads(done.stdout))
    assert (phase["steps"], phase["worst"].keys() >= {"samples", "gradient", "lr", "update", "state"}) == (3, True)


def test_a_plain_script_is_compared_with_one_process(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    broken = tmp_path / "scripts" / "broken.py"
    broken.write_text(SCRIPT.read_text().replace("    optimizer.step()", f"    {REDUCED}\n    optimizer.step()"))
    record_forked(SCRIPT, tmp_path / "single")
    record(SCRIPT, tmp_path / "ddp", 2)
    record_forked(broken, tmp_path / "b=1, 2", 2)
    results = {}
    for folder, code in (("ddp", 0), ("b=1, 2", 1)):
        done = run_distexp("verify", "--recorded", "single", folder, "--json", cwd=tmp_path)
        assert done.returncode == code, done.stderr
        (results[folder],) = json.loads(done.stdout)
        assert shlex.split(results[folder]["command"])[-2:] == ["single", folder]
    assert {"samples", "initial", "gradient", "lr", "update", "state"} <= results["ddp"]["phases"][0]["worst"].keys()
    assert (results["b=1, 2"]["cause"]["id"], results["b=1, 2"]["cause"]["step"]) == ("summed", 1)
    for folders, message in (
        (("single", "an other"), "an other has no recording: run your script with DISTEXP_VERIFY='an other'"),
        (("ddp", "single"), "ddp is a recording of 2 workers, but the first folder must have that of one process: run"),
    ):
        done = run_distexp("verify", "--recorded", *folders, cwd=tmp_path)
        assert done.returncode == 2
        assert message in done.stderr


def test_a_new_recording_removes_that_of_more_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTEXP_VERIFY", str(tmp_path))
    for rank in (0, 1, 10):
        (tmp_path / f"seen{rank}.json").write_text('{"steps": []}')
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recording = verify.watch(model, optimizer)
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    recording.end()
    (seen,) = Recording.read(tmp_path).ranks
    assert len(seen[0]["batches"][0]["inputs"]) == 3


@pytest.mark.release
def test_scripts_with_other_arithmetic_are_not_compared(tmp_path: Path) -> None:
    flagged = tmp_path / "flagged.py"
    flagged.write_text(f"import torch\n{FLAG}\n{SCRIPT.read_text()}")
    record(SCRIPT, tmp_path / "single")
    record(SCRIPT, tmp_path / "variable", **VARIABLE)
    record(flagged, tmp_path / "flag")
    for folder, setting, hint in (
        ("variable", "ATEN_CPU_CAPABILITY=default", "or none by env -u ATEN_CPU_CAPABILITY COMMAND"),
        ("flag", "fp32 bf16", "set the flags of torch in code that both run"),
    ):
        done = run_distexp("verify", "--recorded", "single", folder, cwd=tmp_path)
        assert done.returncode == 2
        reason = " ".join(done.stderr.split())
        assert f"{folder} cannot be compared: phase script: single computes with" in reason
        assert setting in reason
        assert hint in reason


@pytest.mark.parametrize("has_loss", [True, False])
def test_no_loss_is_called_equal_that_a_script_does_not_record(has_loss: bool) -> None:
    detail = {"scale": 1.0, "scale_residual": 1.0, "targets": [0], "zeros": 0, "are_multiples": False}
    detail["has_loss"] = has_loss
    finding = Finding("gradient", "script", 2, ["head.weight"], "head.weight", 1.2, 2e-5, detail)
    assert ("the loss is equal" in diagnose([finding], 2, 1, "fp32").sentence) is has_loss


def test_samples_in_a_dictionary_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Keyed(torch.nn.Linear):
        def forward(self, batch: Any) -> torch.Tensor:
            return super().forward(batch["features"])

    monkeypatch.setenv("DISTEXP_VERIFY", str(tmp_path))
    model = Keyed(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = verify.watch(model, optimizer)
    model({"features": torch.randn(3, 2)}).sum().backward()
    optimizer.step()
    recorder.end()
    ((batch,),) = (step["batches"] for step in json.loads((tmp_path / "seen0.json").read_text())["steps"])
    assert len(set(batch["inputs"])) == 3


@pytest.mark.parametrize("step", [1, 3])
def test_gradients_that_differ_by_rounding_in_a_later_step_may_be_a_maximum(step: int) -> None:
    detail = {"scale": 1.0, "scale_residual": 1e-4, "targets": [4, 4]}
    finding = Finding("gradient", "sgd", step, ["head.weight"], "head.weight", 1e-3, 2e-5, detail)
    cause = diagnose([finding], 2, 1, "fp32")
    assert cause.id == "rounded"
    assert ("use another seed (train.seed=7)" in cause.sentence) == (step > 1)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_gradients_that_are_zero_are_lost_and_others_may_be_rounded(share: float) -> None:
    right = {"head.weight": torch.randn(4, 4)}
    found = {"head.weight": share * right["head.weight"].bfloat16().float()}
    detail = explain_gradients(["head.weight"], found, right, [right], None) | {"targets": [4, 4]}
    cause = diagnose([Finding("gradient", "sgd", 1, ["head.weight"], "head.weight", 1.0, 2e-5, detail)], 2, 1, "fp32")
    assert cause.id == ("rounded" if share else "gradient_lost")
    assert share or cause.sentence.endswith("cleared before the update, or lost in the reduction")


@pytest.mark.parametrize("workers", [1, 2])
def test_only_several_workers_sum_a_loss(workers: int) -> None:
    detail = {"value": 7.01 * workers, "expected": 7.0}
    cause = diagnose([Finding("loss", "uneven", 4, ["loss"], "loss", 1e-2, 9e-3, detail)], workers, 1, "bf16")
    assert ("summed over the 2 workers" in cause.sentence) == (workers == 2)
    assert "1 workers" not in cause.sentence


@pytest.mark.parametrize("residual", [1e-4, 1.0])
def test_batch_norms_may_have_amplified_rounding(residual: float) -> None:
    detail = {"scale": 1.0, "scale_residual": residual, "targets": [4, 4], "zeros": 0, "are_multiples": False}
    for has_batch_norms in (False, True):
        detail["has_batch_norms"] = has_batch_norms
        finding = Finding("gradient", "sgd", 1, ["head.weight"], "head.weight", 2e-2, 2e-5, detail)
        sentence = diagnose([finding], 2, 1, "fp32").sentence
        # The model that differs may be resnet_tiny itself, with other data.
        advice = "verify the strategy with model=resnet_tiny dataset=tinyimagenet_sample train.seed=7"
        assert (advice in sentence) == has_batch_norms
        assert "probably wrong" not in sentence or not has_batch_norms


@pytest.mark.parametrize(("scale", "cause"), [(1.004, "gradient_other"), (1.5, "scaled_differently")])
def test_parameters_are_scaled_differently_only_if_a_factor_is_not_1(scale: float, cause: str) -> None:
    detail = {"scale": 1.0, "scale_residual": 1.0, "targets": [4, 4], "zeros": 0, "are_multiples": True}
    detail["scales"] = {"first.weight": 1.0, "head.weight": scale}
    finding = Finding("gradient", "sgd", 1, ["first.weight", "head.weight"], "head.weight", 2e-2, 2e-5, detail)
    found = diagnose([finding], 2, 1, "fp32")
    assert found.id == cause
    assert ("different factors: head.weight 1.50, first.weight 1.00" in found.sentence) == (scale == 1.5)


def test_modules_with_kinks_become_smooth_and_keep_their_shapes() -> None:
    import torch
    from torch import nn

    from distexp.verify.arithmetic import make_smooth

    shared = nn.ReLU(inplace=True)
    pools = [nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True), nn.MaxPool2d(2, dilation=2)]
    model = nn.Sequential(nn.Sequential(shared, pools[0]), shared, nn.LeakyReLU(), pools[1])
    images = torch.linspace(-1, 1, 2 * 3 * 16 * 16).view(2, 3, 16, 16)
    shape = model(images.clone()).shape
    make_smooth(model)
    assert model(images).shape == shape
    found = [type(each) for each in model.modules() if not isinstance(each, nn.Sequential)]
    assert found == [nn.GELU, nn.AvgPool2d, nn.GELU, nn.GELU, nn.MaxPool2d], "an average has no dilation"


COMPARES_AND_FORKS = """
import os, torch
from distexp.verify import workers

def compute(phase):
    return {"sum": float(torch.ones(1000, 1000).matmul(torch.ones(1000, 1000)).add(1).sum())}

torch.set_num_threads(2)
workers.compare_phase = compute
found = workers.compare_in_fork({"name": "sgd", "adds": ""})
if os.fork() == 0:
    torch.set_num_threads(2)
    compute({})
    os._exit(0)
print(found, os.wait()[1])
"""


def test_ranks_that_start_after_a_comparison_can_use_several_threads() -> None:
    """A fork of a process that has used threads of OpenMP waits for them forever."""
    done = subprocess.run(
        [sys.executable, "-c", COMPARES_AND_FORKS], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.stdout, done.returncode) == ("{'sum': 1001000000.0} 0\n", 0), done.stderr


CLEAN = (
    *(["strategy=ddp"], ["sharding=full_shard"], ["zero_stage=3"]),
    ["strategy=ddp", "kernels=fast"],
    ["strategy=ddp", "precision=bf16"],
    ["strategy=ddp", "engine=hf_trainer"],
    ["strategy=fsdp", "train.activation_checkpointing=true"],
    ["strategy=fsdp", "precision=bf16"],
    ["strategy=fsdp", "engine=hf_trainer"],
    ["sharding=shard_grad_op"],
    ["sharding=hybrid_shard", "cluster.nodes=2", "cluster.workers_per_node=2"],
    ["sharding=full_shard", "offload=true"],
    ["zero_stage=0"],
    ["zero_stage=1"],
    ["zero_stage=2", "offload=true"],
    ["zero_stage=2", "engine=hf_trainer"],
    ["strategy=ddp", "model=resnet_tiny"],
    ["strategy=fsdp", "model=resnet_tiny"],
    ["strategy=fsdp", "model=gpt_tiny"],
)


@pytest.mark.release
def test_other_variants_give_no_false_alarm(tmp_path: Path) -> None:
    swept = f"sweep.cells={json.dumps(CLEAN, separators=(',', ':'))}"
    command = ("verify", "--json", "--multirun")
    done = run_distexp(*command, swept, "cluster.device=cpu", cwd=tmp_path, timeout=1200)
    found = json.loads(done.stdout)
    assert len(found) == len(CLEAN)
    assert [each for each in found if each["status"] != "equal"] == []
    assert done.returncode == 0
