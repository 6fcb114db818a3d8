"""The schema of the configuration: every key with its type, default, meaning and limits.

Hydra merges the YAML groups of ``conf/`` into :class:`Config`, so an unknown key or a wrong type is an error while
composing. ``None`` means "not chosen": ``resolve`` sets it, and checks what involves several keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from omegaconf import MISSING

from distexp.config import sections
from distexp.config.fields import key

WHOLE_MODEL = ("model", "graphs")
"""Values of ``train.compile`` that compile the whole model as one graph."""


@dataclass
class ScaleConfig:
    """Upper limits that shrink a run, for example a preset on a laptop. Null means no limit."""

    name: str = key("full", "Name of the scale.")
    shrink: int | None = key(None, "Divisor of the widths of a model.", at_least=1)
    layers: int | None = key(None, "Layers of a model, or of each stage of a ResNet.", at_least=1)
    heads: int | None = key(None, "Attention heads.", at_least=1)
    vocab_size: int | None = key(None, "Rows of the embedding.", at_least=1)
    max_length: int | None = key(None, "Length of a text.", unit="tokens", at_least=1)
    image_size: int | None = key(None, "Height and width of an image.", unit="pixels", at_least=1)
    train_size: int | None = key(None, "Training examples.", at_least=1)
    eval_size: int | None = key(None, "Evaluation examples.", at_least=1)
    micro_batch_size: int | None = key(None, "Samples per worker and forward pass.", at_least=1)
    gradient_accumulation_steps: int | None = key(None, "Micro-batches per optimizer step.", at_least=1)
    workers: int | None = key(None, "Workers on all nodes. A cell with more is invalid.", at_least=1)
    workers_per_node: int = key(2, "Workers per node in the presets for several nodes.", at_least=1)


@dataclass
class ScalingConfig:
    """How the work changes with the number of workers."""

    name: str = key("fixed", "Scaling rule.", choices=("fixed", "weak_data", "weak_model", "weak_model_workshop"))
    samples_per_worker: int | None = key(None, "`weak_data`: training examples per worker.", at_least=1)
    base_workers: int | None = key(
        None, "`weak_model`: workers at which layers and micro-batch size are as configured.", at_least=1
    )


@dataclass
class MeasureConfig:
    """Memory and utilization, sampled from outside the workers, and the watch for slow ranks inside of them."""

    enabled: bool = key(True, "Whether to sample.")
    interval_s: float = key(0.5, "Time between two samples.", unit="seconds", above=0)
    slow_ranks: bool = key(
        True, "Whether to watch for slow ranks: how long each rank waits for the others in some steps. "
        "If false, no method of torch is replaced.",
    )  # fmt: skip
    watchers: list[str] = key(
        [], "Custom measurements of the training: classes that extend `Watcher`, from `trusted_packages`."
    )


@dataclass
class TrackerConfig:
    """Experiment tracker. Credentials are read by its library and are never part of a configuration."""

    name: str = key("none", "Name of the tracker.")
    _target_: str | None = key(None, "Class that implements the `Tracker` protocol.", null="no tracker")
    project: str = key("distexp", "Project of wandb and trackio, or experiment of MLflow.")
    online: bool = key(False, "wandb: upload while the run trains.")
    uri: str | None = key(None, "MLflow server or store.", null="the folder `mlruns/`")


@dataclass
class PreflightConfig:
    """Communication bandwidth test before training."""

    enabled: bool = key(False, "Whether to run the test.")
    min_busbw_gbps: float | None = key(
        None, "Lowest accepted bus bandwidth of the largest all-reduce.", unit="GB/s", at_least=0,
        null="5 on GPUs, no limit on CPUs",
    )  # fmt: skip
    max_bytes: int | None = key(
        None, "Size of the largest buffer.", unit="bytes", at_least=1024, null="4 GiB on GPUs, 64 MiB on CPUs"
    )
    warmup_rounds: int = key(20, "Rounds before the measured ones.", at_least=0)
    rounds: int = key(50, "Measured rounds. Fewer if one size would take longer than 10 s.", at_least=1)


@dataclass
class StrategyConfig:
    """How the model is distributed. Each strategy has a section of its name with its keys."""

    _target_: str = key(MISSING, "Class that extends the base class `Strategy`.")
    name: str = key(MISSING, "Name of the strategy.")
    options: dict[str, Any] = key({}, "Keys of a custom strategy.")


@dataclass
class EngineConfig:
    """The trainer, that is, the training loop."""

    _target_: str = key("distexp.engines.native.Native", "Class that implements the `Trainer` protocol.")
    name: str = key("native", "Name of the trainer.")


@dataclass
class OffloadConfig:
    """Offloading of states to CPU memory; `offload=` sets both keys."""

    enabled: bool = key(False, "Whether states are offloaded.")
    pin_memory: bool = key(False, "Use page-locked CPU memory.")


@dataclass
class PrecisionConfig:
    """Arithmetic of the forward and backward pass."""

    name: str = key(
        "fp32", "Data type of the computation. `float8`: bf16, and float8 for the linear layers of the blocks.",
        choices=("fp32", "bf16", "fp16", "float8"),
    )  # fmt: skip

    @property
    def outside_products(self) -> str:
        """Return the data type of all but the products of linear layers in blocks: that of ``name``, or bf16."""
        return "bf16" if self.name == "float8" else self.name


@dataclass
class KernelsConfig:
    """Options of speed, set together. A key that is set itself wins."""

    name: str = key(
        "reference", "`fast` sets keys that are null, for model, strategy and device. `reference`: none.",
        choices=("reference", "fast"),
    )  # fmt: skip
    compile: str | None = key(
        None, "What `fast` chose first for `train.compile`. Set by distexp.", null="it was typed, or is false",
    )  # fmt: skip
    compile_note: str = key("", "Why `fast` chose another `train.compile` than its first choice. Set by distexp.")


@dataclass
class TrainConfig:
    """The training: length, batch, optimizer, schedule, checkpoints."""

    num_epochs: int = key(3, "Passes over the training set.", at_least=1)
    max_steps: int | None = key(None, "Optimizer steps after which training ends early.", at_least=1, null="no limit")
    micro_batch_size: int | str = key(
        4, "Samples per worker and forward pass. `auto`: the fastest size that fits, for `train.global_batch_size`.",
        choices=("auto",), at_least=1,
    )  # fmt: skip
    global_batch_size: int | None = key(
        None, "Samples per optimizer step, over all workers. It sets `train.gradient_accumulation_steps`.",
        at_least=1, null="micro_batch_size x gradient_accumulation_steps x workers", id_if_changed=True,
    )  # fmt: skip
    micro_batch_search_s: int = key(
        180, "Time limit of the search for `micro_batch_size=auto`. Then the best size so far is used.",
        unit="seconds", at_least=1,
    )  # fmt: skip
    eval_batch_size: int | None = key(
        None, "Samples per worker in the evaluation.", at_least=1, null="micro_batch_size"
    )
    gradient_accumulation_steps: int = key(1, "Micro-batches per optimizer step.", at_least=1)
    learning_rate: float = key(5e-5, "Learning rate after the warmup.", at_least=0)
    weight_decay: float = key(0.01, "Weight decay of matrices. Biases and norms have none.", at_least=0)
    betas: list[float] = key([0.9, 0.999], "Betas of AdamW.", length=2, at_least=0, below=1, example="[0.9,0.999]")
    eps: float = key(1e-8, "Epsilon of AdamW, a normal number of fp32.", at_least=1.2e-38)
    momentum: float = key(0.9, "Momentum of SGD and Muon.", at_least=0)
    gradient_clipping: float | None = key(1.0, "Largest gradient norm.", above=0, null="no clipping")
    optimizer: str = key(
        "adamw",
        "Optimizer. `adamw8bit`: AdamW whose states have 8 bits. `muon`: for the matrices of the blocks, and AdamW for "
        "the other weights.",
        choices=("adamw", "adamw8bit", "sgd", "muon"),
    )  # fmt: skip
    schedule: str = key(
        "linear", "Learning rate schedule. `linear` and `cosine` decay to zero.",
        choices=("linear", "cosine", "step", "constant"),
    )  # fmt: skip
    step_size: int = key(30, "Epochs between two decays of `schedule=step`.", at_least=1)
    gamma: float = key(0.1, "Factor of each decay of `schedule=step`.", at_least=0)
    warmup_steps: int = key(0, "Steps in which the learning rate rises to its full value.", at_least=0)
    measure_after_step: int = key(5, "First steps to exclude from speed and step times.", at_least=0)
    profile_steps: int = key(0, "Last steps to profile. They are excluded from speed and memory. 0: none.", at_least=0)
    log_every: int = key(10, "Steps between two lines of `metrics.jsonl`.", at_least=1)
    seed: int = key(42, "Seed of weights, dropout and sample order.", at_least=0, below=2**32)
    on_nan: str = key(
        "stop", "When the loss or the gradient norm is not finite: stop the run as failed, or record it and continue.",
        choices=("stop", "record"),
    )  # fmt: skip
    logits: str | None = key(
        None, "Tokens whose logits a causal LM computes. `targets`: the same loss with less work.",
        choices=("all", "targets"), reference="all",
    )  # fmt: skip
    loss: str | None = key(
        None,
        "Loss of a causal LM. `chunked`: the same loss with the logits of one chunk in memory at a time. `own`: that "
        "of an own model, which gets the labels.",
        choices=("full", "chunked", "own"), reference="full", id_if_changed=True,
    )  # fmt: skip
    loss_chunk_tokens: int = key(
        1024, "Size of a chunk of `loss=chunked`.", unit="tokens", at_least=1, id_if_changed=True
    )
    activation_checkpointing: bool | str = key(
        False,
        "Recompute the activations of each block in the backward pass. `selective`: all but those of matrix products "
        "and attention. `offload`: all, and keep the inputs of the blocks in the memory of the CPU.",
        choices=(False, True, "selective", "offload"),
    )
    compile: bool | str | None = key(
        None, "What `torch.compile` compiles. `true`: the blocks. `graphs`: the model, with CUDA graphs.",
        choices=(False, True, "blocks", *WHOLE_MODEL), reference=False,
    )  # fmt: skip
    activation_budget: float | None = key(
        None, "Share of the activations that a compiled graph stores. It computes the others again.",
        above=0, below=1, null="what the compiler chooses", id_if_changed=True,
    )  # fmt: skip
    compute_weights: str | None = key(
        None, "When weights are cast for `precision=bf16`: in each micro-batch, or once per step.",
        choices=("autocast", "step"), reference="autocast", id_if_changed=True,
    )  # fmt: skip
    fused_update: bool | None = key(
        None, "Clip the gradients and update and cast the weights by AdamW in one kernel, for single and DDP.",
        reference=False, id_if_changed=True,
    )  # fmt: skip
    channels_last: bool | None = key(
        None, "Keep weights of convolutions in the channels-last format, as images are, for single and DDP.",
        reference=False, id_if_changed=True,
    )  # fmt: skip
    checkpoint_every: int | str | None = key(
        None, "Steps between two checkpoints, or `epoch`.", choices=("epoch",), at_least=1,
        null="only if the run has to stop early",
    )  # fmt: skip
    resume: str | None = key(None, "Folder of a checkpoint or of a run to start from.", path="checkpoint")
    save_model: bool = key(False, "Save the trained model in the Hugging Face layout, in `model/` of the run.")
    evaluate: bool = key(True, "Compute the loss of the evaluation set after each epoch.", id_if_changed=True)
    score_answers: bool = key(
        False, "Generate answers after the last epoch. Score them with the exact match and F1 of SQuAD."
    )

    @property
    def compiled(self) -> str:
        """Return what is compiled: blocks, model, graphs, or none."""
        if isinstance(self.compile, str):
            return self.compile
        return "blocks" if self.compile else "none"

    @property
    def micro_batch(self) -> int:
        """Micro-batch size as a number. Raise ValueError if it is ``auto`` and was not searched yet."""
        if isinstance(self.micro_batch_size, str):
            raise ValueError(f"train.micro_batch_size={self.micro_batch_size} is not a number before its search")
        return self.micro_batch_size


@dataclass
class SweepConfig:
    """Cells of a sweep. Other swept keys are combined with each of them."""

    cells: list[Any] = key([], "Lists of overrides. Each list is a cell, and may itself sweep.")
    resume: bool = key(False, "Keep finished runs of `hydra.sweep.dir`. Set by `distexp resume`.")


@dataclass
class VerifyConfig:
    """Comparison of the training with that of `strategy=single`, by `distexp verify`."""

    quick: bool = key(False, "Compare the core phases only. Its option `--quick` sets it.")
    timeout_s: float = key(300.0, "Longest time of a phase.", unit="seconds", above=0)
    output: str = key("table", "Output of `distexp verify`. Its option `--json` sets it.", choices=("table", "json"))


class Command(StrEnum):
    """What a command does with its cells. Each has its entry, which is the only one that names it."""

    TRAIN = "train"
    PLAN = "plan"
    CHOOSE = "choose"
    FORECAST = "forecast"
    PREFLIGHT = "preflight"
    VERIFY = "verify"


@dataclass
class Config:
    """The whole configuration."""

    name: str = key("distexp", "Folder of the results.")
    command: str = key("train", "Command of distexp that uses it, and that sets it.", choices=tuple(map(str, Command)))
    exercise: str | None = key(None, "Exercise whose table the report fills. Set by its preset.")
    model: sections.ModelConfig = field(default_factory=sections.ModelConfig)
    adapter: sections.AdapterConfig = field(default_factory=sections.AdapterConfig)
    dataset: sections.DatasetConfig = field(default_factory=sections.DatasetConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    ddp: sections.DDPConfig = field(default_factory=sections.DDPConfig)
    fsdp: sections.FSDPConfig = field(default_factory=sections.FSDPConfig)
    deepspeed: sections.DeepSpeedConfig = field(default_factory=sections.DeepSpeedConfig)
    parallel: sections.ParallelConfig = field(default_factory=sections.ParallelConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    cluster: sections.ClusterConfig = field(default_factory=sections.ClusterConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    preflight: PreflightConfig = field(default_factory=PreflightConfig)
    plan: sections.PlanConfig = field(default_factory=sections.PlanConfig)
    choose: sections.ChooseConfig = field(default_factory=sections.ChooseConfig)
    forecast: sections.ForecastConfig = field(default_factory=sections.ForecastConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    scale: ScaleConfig = field(default_factory=ScaleConfig)
    scaling: ScalingConfig = field(default_factory=ScalingConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    profile: bool = key(
        False,
        "Profile the last steps of each run: the same as `train.profile_steps=3`. For another number of steps, set "
        "`train.profile_steps`.",
    )
    repeats: int = key(1, "Runs of each cell, with the seeds `train.seed`, `train.seed` + 1, ...", at_least=1)
    trusted_packages: list[str] = key([], "Packages whose `_target_` may be imported; set on the command line only.")

    @property
    def data_parallel(self) -> int:
        """Return how many workers, or groups of workers with the same rows, have their own rows of a batch."""
        return max(1, self.cluster.world_size // self.parallel.copies)

    @property
    def is_preflight(self) -> bool:
        """Return whether the workers only measure the machines, and train nothing."""
        return self.command == Command.PREFLIGHT

    @property
    def is_prediction(self) -> bool:
        """Return whether nothing is started, for example to plan for GPUs that this machine does not have."""
        names_gpu = self.plan.gpu is not None or self.plan.gpu_memory_gb is not None
        plans_search = self.command == Command.CHOOSE and self.choose.dry_run and names_gpu
        return self.command in (Command.PLAN, Command.FORECAST) or plans_search


def register_schema(command: Command = Command.TRAIN) -> None:
    """Register the schema with Hydra under the name that ``conf/config.yaml`` extends."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="schema", node=Config(command=str(command)))
