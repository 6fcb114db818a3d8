"""What a trial measures, and how its result is stored and recorded."""

from __future__ import annotations

import json
import signal
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import pytest
import torch

from distexp.config import Config, ConfigError
from distexp.data.base import Batch
from distexp.distributed.context import Context
from distexp.exceptions import SearchError
from distexp.launch.failures import classify_failure
from distexp.launch.outcome import failed_record
from distexp.runs.attempts import write_error_file
from distexp.runs.record import RunRecord
from distexp.runs.record_sections import RunError
from distexp.runs.run_dir import RANK_ERROR
from distexp.runs.step_files import FITS, OUT_OF_MEMORY, TOO_LARGE, MicroBatchSearch, TriedSize, add_search
from distexp.training.build import build_model, load_data
from distexp.worker.__main__ import describe_error
from distexp.worker.forked_trial import MEMORY_CODE, explain_code
from distexp.worker.size_search import (
    Round,
    allowed_sizes,
    needs_new_process,
    nothing_fits,
    read_stored,
    store,
    stored_path,
    whole_saves_mib,
)
from distexp.worker.size_trial import SizeSearch, SizeTrials, StepTime, combine, config_of_round, longest_first
from tests.helpers.runs import make_spec, resolve_cell

SINGLE = ("strategy=single", "cluster.workers_per_node=1", "cluster.device=cpu", "dataset.train_size=12")
AUTO = ("train.micro_batch_size=auto", "train.global_batch_size=8", "dataset.eval_size=4")
FOUND = MicroBatchSearch(4, [TriedSize(2, FITS, 5.0, 100.0, 50.0, 900.0), TriedSize(4, FITS, 9.0, 120.0)], 3.0)


@pytest.fixture
def context(one_rank_group: None, tmp_path: Path) -> Context:
    return Context(0, 1, 0, 1, 1, torch.device("cpu"), tmp_path)


def make_trials(config: Config, context: Context) -> SizeTrials:
    data = load_data(config, context)
    return SizeTrials(config, build_model(config, data, context), data, context)


def test_a_trial_runs_whole_steps_on_the_longest_samples(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of_round(
        resolve_cell(*SINGLE, *AUTO, "dataset.bucketing=true", "model=gpt_tiny", "dataset.max_length=64"), 2
    )
    trials = make_trials(config, context)
    seen: list[tuple[Batch, bool]] = []
    forward_backward = trials.model.forward_backward

    def record(batch: Batch, *, normalizer: torch.Tensor, last_micro: bool) -> torch.Tensor:
        seen.append((batch, last_micro))
        return forward_backward(batch, normalizer=normalizer, last_micro=last_micro)

    monkeypatch.setattr(trials.model, "forward_backward", record)
    found = trials.measure(2)
    assert [last for _, last in seen] == [False, True] * 5, "two warm-up steps and three timed ones"
    longest = max(len(sample["input_ids"]) for sample in (trials.data.train[index] for index in range(12)))
    assert seen[0][0].inputs["attention_mask"].sum(dim=1).max() == longest
    assert len(seen[0][0].labels) == found.micro_batch_size == 2
    assert trials.tensors().optimizer_states, "the peak contains them"
    assert found.outcome == FITS
    assert found.samples_per_second is not None
    assert found.samples_per_second > 0


def test_a_whole_batch_has_one_micro_batch(context: Context) -> None:
    assert config_of_round(resolve_cell(*SINGLE, *AUTO), 8).train.gradient_accumulation_steps == 1
    assert config_of_round(resolve_cell(*SINGLE, *AUTO), 4).train.gradient_accumulation_steps == 2


def test_images_keep_their_order(context: Context) -> None:
    config = resolve_cell(*SINGLE, *AUTO, "model=resnet_tiny", "dataset=synthetic")
    assert longest_first(load_data(config, context).train) == list(range(12))


@pytest.mark.parametrize(("model", "expected"), [("gpt_tiny", [1, 2, 4, 8]), ("resnet_tiny", [2, 4, 8])])
def test_a_batch_norm_gets_several_samples(model: str, expected: list[int], context: Context) -> None:
    config = resolve_cell(*SINGLE, *AUTO, f"model={model}", "dataset=synthetic")
    data = load_data(config, context)
    assert allowed_sizes(config, data, build_model(config, data, context).model) == expected


def test_the_slowest_and_fullest_rank_decides() -> None:
    config = resolve_cell("strategy=ddp", "cluster.workers_per_node=2", "cluster.device=cpu", *AUTO)
    ranks = [(1.0, 100.0, 60.0, 1000.0), (2.0, 300.0, 50.0, 800.0)]
    assert combine(4, config, ranks) == TriedSize(4, FITS, 4.0, 300.0, 60.0, 800.0)
    assert combine(4, config, [ranks[0], (2.0, 790.0, 50.0, 800.0)]).outcome == TOO_LARGE
    assert StepTime(other=2.0, last=3.0).of_whole_step(5) == 11.0


@pytest.mark.parametrize(
    ("overrides", "sizes", "expected"),
    [
        (("strategy=single",), (1, 8), False),
        (("zero_stage=2",), (1, 4), False),
        (("zero_stage=2",), (4, 8), True),
        (("strategy=single", "train.compile=blocks"), (2, 4), True),
        (("strategy=single", "train.compile=blocks"), (4, 4), False),
    ],
)
def test_sizes_share_processes_if_the_model_allows_it(
    overrides: tuple[str, ...], sizes: tuple[int, int], expected: bool
) -> None:
    config = resolve_cell(*SINGLE[1:], *AUTO, *overrides)
    assert needs_new_process(config, *sizes) == expected


def test_a_single_micro_batch_of_a_fused_update_needs_no_fp32_gradients(context: Context) -> None:
    config = resolve_cell(*SINGLE, *AUTO, "model=gpt_tiny", "precision=bf16", "train.compute_weights=step")
    model = build_model(config, load_data(config, context), context).model
    assert whole_saves_mib(config, 8, model) == 0
    config.train.fused_update = True  # refused on CPUs
    parameters = sum(weight.numel() for weight in model.parameters())
    assert whole_saves_mib(config, 8, model) == 4 * parameters / 2**20
    assert whole_saves_mib(config, 4, model) == 0, "the data has no whole batch"
    assert [needs_new_process(config, 4, size) for size in (2, 4, 8)] == [False, False, True]


class Memory:
    """A store in this process."""

    def __init__(self, **content: object) -> None:
        self.content = {name: json.dumps(value).encode() for name, value in content.items()}

    def get(self, key: str) -> bytes:
        return self.content[key]

    def check(self, keys: list[str]) -> bool:
        return set(keys) <= set(self.content)

    def add(self, key: str, amount: int) -> int:
        return int(self.content.get(key, b"0")) + amount


def conclude(tmp_path: Path, *ends: dict[str, object]) -> SizeSearch:
    """Return what the ranks conclude after size 1 was tried, and their processes have ended."""
    one = TriedSize(1, FITS, 5.0, 100.0, 50.0, 900.0)
    store = Memory(sizes=[1, 2, 4, 8], candidates=1, **{"candidate/0": asdict(one)})
    return Round(make_spec(*SINGLE, *AUTO), tmp_path, store, [])._conclude([*ends])


ENDED_BY_OTHERS = {"code": None}
CONNECTION_CLOSED = {"code": 1, "time": 5.0, "type": "RuntimeError", "message": "Connection closed by peer"}


def test_one_rank_without_memory_ends_the_size_on_all_ranks(tmp_path: Path) -> None:
    for other in (ENDED_BY_OTHERS, CONNECTION_CLOSED):
        search = conclude(tmp_path, other, {"code": MEMORY_CODE})
        assert [(candidate.micro_batch_size, candidate.outcome) for candidate in search.tried] == [
            (1, FITS),
            (2, OUT_OF_MEMORY),
        ]
        assert search.next_size() is None


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ({"machine": 1}, {"machine": 2}, MEMORY_CODE),
        ({"machine": 2}, {"machine": 2}, -signal.SIGKILL),
        ({}, {}, MEMORY_CODE),
    ],
)
def test_a_killed_process_ran_out_of_memory_if_the_kernel_counts_it_or_does_not_count(
    before: dict[str, int], now: dict[str, int], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distexp.system.cgroups.oom_kills", lambda: now)
    assert explain_code(-signal.SIGKILL, before) == expected
    assert explain_code(1, before) == 1


def test_a_killed_process_is_the_cause(tmp_path: Path) -> None:
    with pytest.raises(SearchError, match=r"failed on rank 1 \(terminated by SIGKILL\): see logs"):
        conclude(tmp_path, CONNECTION_CLOSED, {"code": -signal.SIGKILL})


def test_other_errors_stop_the_run_with_the_first_cause(tmp_path: Path) -> None:
    first = {"code": 1, "time": 2.0, "type": "ValueError", "message": "no samples"}
    with pytest.raises(
        SearchError, match=r"failed on rank 1 \(ValueError: no samples\): see .*rank1.search.log, or set a"
    ):
        conclude(tmp_path, CONNECTION_CLOSED, first)
    first["place"] = "mine/model.py:3"
    with pytest.raises(SearchError) as caught:
        conclude(tmp_path, CONNECTION_CLOSED, first)
    found = describe_error(caught.value, tmp_path, "search", rank=0)
    assert (found.rank, found.place) == (1, "mine/model.py:3")
    with pytest.raises(SearchError, match=r"rank 0 \(terminated by SIGSEGV\)"):
        conclude(tmp_path, {"code": -11}, CONNECTION_CLOSED)
    with pytest.raises(ConfigError, match="lower it"):
        conclude(tmp_path, {"code": 1, "time": 2.0, "errors": ["x=3 is too much: lower it"]}, ENDED_BY_OTHERS)


def test_a_round_that_ended_in_time_has_its_candidates(tmp_path: Path) -> None:
    search = conclude(tmp_path, ENDED_BY_OTHERS, ENDED_BY_OTHERS)
    assert [candidate.micro_batch_size for candidate in search.tried] == [1]
    assert search.next_size() == 2


@pytest.mark.parametrize(
    ("overrides", "size", "status", "hint"),
    [
        (("cluster.device=cpu",), 1, "oom_host", "Lower dataset.max_length, or choose sharding=full_shard or train."),
        (("cluster=slurm", "strategy=ddp"), 1, "oom_gpu", "sharding=full_shard or train.activation_checkpointing"),
        (
            ("cluster=slurm", "sharding=full_shard"),
            1,
            "oom_gpu",
            "max_length, or choose offload=true or train.activation",
        ),
        (
            ("cluster=slurm", "zero_stage=3", "offload=true", "train.activation_checkpointing=true"),
            1,
            "oom_gpu",
            "Lower dataset.max_length",
        ),
        (("cluster=slurm", "model=resnet_tiny"), 2, "oom_gpu", "of 2 samples needs more memory than there is. Lower "),
    ],
)
def test_if_nothing_fits_the_status_names_the_memory(
    overrides: tuple[str, ...], size: int, status: str, hint: str, tmp_path: Path
) -> None:
    chooses = any(text.startswith(("strategy=", "sharding=", "zero_stage=")) for text in overrides)
    strategy = () if chooses else ("strategy=single",)
    spec = make_spec(*strategy, "cluster.workers_per_node=1", *AUTO, *overrides)
    error = nothing_fits(spec.config, MicroBatchSearch(None, [TriedSize(size, OUT_OF_MEMORY)]))
    assert hint in str(error)
    write_error_file(RANK_ERROR.path(tmp_path, 0, 0), RunError(type(error).__name__, str(error), "search", 0))
    assert classify_failure(tmp_path, {0: 1}, spec)[0] == status


@dataclass
class MegatronConfig:
    tensor_parallel: int = 1


@dataclass
class ExtendedConfig(Config):
    megatron: MegatronConfig = field(default_factory=MegatronConfig)


def test_a_section_that_is_added_to_the_configuration_is_part_of_the_key() -> None:
    config = resolve_cell(*SINGLE, *AUTO)
    sections = {section.name: getattr(config, section.name) for section in fields(config)}
    paths = {stored_path(ExtendedConfig(**sections, megatron=MegatronConfig(parts))) for parts in (1, 2)}
    assert len({stored_path(config), *paths}) == 3


def test_a_search_is_stored_for_equal_speed_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTEXP_CACHE", str(tmp_path))
    path = stored_path(resolve_cell(*SINGLE, *AUTO))
    for same in ("train.seed=3", "train.learning_rate=0.1", "train.max_steps=2", "name=other"):
        assert stored_path(resolve_cell(*SINGLE, *AUTO, same)) == path
    others = (
        *("train.global_batch_size=16", "precision=bf16", "model.num_layers=3", "train.optimizer=sgd"),
        "train.micro_batch_search_s=9",
        "train.momentum=0.5",
    )
    assert len({path, *(stored_path(resolve_cell(*SINGLE, *AUTO, other)) for other in others)}) == 7
    assert read_stored(path, samples=8) is None
    store(FOUND, path)
    found = read_stored(path, samples=8)
    assert found is not None
    assert (found.chosen, found.candidates, found.stored_in) == (4, FOUND.candidates, str(path))
    assert read_stored(path, samples=6) is None, "4 is no divisor"
    path.write_text("{")
    assert read_stored(path, samples=8) is None


def test_a_cache_that_cannot_be_written_is_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    store(FOUND, tmp_path / "file" / "a.json")
    assert "note: the micro-batch size cannot be stored" in capsys.readouterr().out


def test_the_record_of_a_failed_run_has_the_found_size(tmp_path: Path) -> None:
    spec = make_spec(*SINGLE, *AUTO)
    FOUND.write(tmp_path / "micro_batch.json")
    record = failed_record(spec, tmp_path, "failed", RunError("E", "m"), None)
    assert (record.config["train"]["micro_batch_size"], record.config["train"]["gradient_accumulation_steps"]) == (4, 2)
    assert record.metrics.micro_batch_search == asdict(FOUND)
    record.write(tmp_path)
    assert RunRecord.read(tmp_path / "record.json").metrics.micro_batch_search == asdict(FOUND)


def test_a_record_without_a_search_is_unchanged(tmp_path: Path) -> None:
    spec = make_spec(*SINGLE)
    record = RunRecord("failed", spec.run, asdict(spec.config))
    add_search(record, tmp_path)
    assert record.metrics.micro_batch_search is None
    assert record.config == asdict(spec.config)
