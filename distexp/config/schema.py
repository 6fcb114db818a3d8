"""The typed schema of the configuration: every key that a user can set, its type and its meaning.

Hydra merges the YAML groups of ``conf/`` into :class:`Config`, so a misspelt key or a value of the
wrong type is refused while composing. What only makes sense together is judged in ``resolve``.
``None`` means "not chosen": ``resolve`` fills it in from the strategy, the model or the machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


class ConfigError(ValueError):
    """One or more errors of a configuration, each a sentence with value, constraint and mend."""

    def __init__(self, errors: list[str] | str) -> None:
        self.errors = [errors] if isinstance(errors, str) else list(errors)
        super().__init__("\n".join(self.errors))


@dataclass
class ModelConfig:
    """What is trained. A key that an architecture does not have stays null, and is refused when set."""

    _target_: str = MISSING  # function (model: ModelConfig, num_classes: int) -> torch.nn.Module
    name: str = MISSING  # our name of an architecture, or a Hugging Face name or path
    task: str = MISSING  # causal_lm or image_classification
    path: str | None = None  # a hub id or a folder: what init=pretrained reads where name is ours
    init: str = "random"  # random: from the architecture alone; pretrained: weights are read
    tokenizer: str | None = None  # byte: trained on the data; auto: the model's; else a hub id or a folder
    vocab_size: int | None = None  # null: the tokenizer's
    hidden_size: int | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    ff_dim: int | None = None
    seq_length: int | None = None  # longest sequence that the positions allow
    width: int | None = None  # channels of a ResNet's first stage
    depths: list[int] | None = None  # residual blocks in each of a ResNet's stages
    bottleneck: bool | None = None
    tie_embeddings: bool | None = None  # one weight for embedding and head
    dropout: float | None = 0.0  # null: what the architecture has by itself
    keys: list[str] = field(default_factory=list)  # which of the keys of an architecture this model has
    options: dict[str, Any] = field(default_factory=dict)  # keys of a model of your own


@dataclass
class DatasetConfig:
    """What it is trained on."""

    _target_: str = MISSING  # function (dataset: DatasetConfig, model: ModelConfig, seed: int) -> TaskData
    name: str = MISSING
    task: str = MISSING  # causal_lm, image_classification, or any (synthetic)
    path: str | None = None  # a hub id, or a folder written by datasets.save_to_disk
    train_path: str | None = None  # an official SQuAD v1.1 JSON file
    eval_path: str | None = None
    root: str | None = None  # a folder in TinyImageNet's official layout
    train_size: int | None = None  # the first so many examples; null: all
    eval_size: int | None = None
    max_length: int | None = None  # tokens
    answer_tokens: int = 32  # most tokens of a generated answer, see train.score_answers
    padding: str = "max_length"  # max_length: every batch has one shape; longest: as short as a batch allows
    image_size: int | None = None  # pixels
    num_classes: int | None = None
    num_workers: int = 0  # loader processes of one worker
    keys: list[str] = field(default_factory=list)  # those above that this data set has; any other is refused
    options: dict[str, Any] = field(default_factory=dict)  # keys of a dataset of your own


@dataclass
class StrategyConfig:
    """How the training is distributed; its own keys are in the section of its name."""

    _target_: str = MISSING  # class of the Strategy protocol
    name: str = MISSING
    options: dict[str, Any] = field(default_factory=dict)  # keys of a strategy of your own


@dataclass
class EngineConfig:
    """Whose training loop runs."""

    _target_: str = "distexp.engines.native.Native"  # class of the Trainer protocol
    name: str = "native"


@dataclass
class DDPConfig:
    bucket_cap_mb: float = 25.0
    static_graph: bool = False
    find_unused_parameters: bool = False


@dataclass
class FSDPConfig:
    sharding: str | None = None  # full_shard, shard_grad_op, hybrid_shard, no_shard; null: full_shard
    replicas: int | None = None  # replicas of a hybrid mesh; null: one a node
    wrap: str = "auto"  # auto: every block; else class names, separated by commas
    forward_prefetch: int = 0  # blocks gathered ahead of the forward pass
    backward_prefetch: int = 1  # blocks gathered ahead of the backward pass
    sync_module_states: bool = True  # rank 0's initial weights for everyone


@dataclass
class DeepSpeedConfig:
    zero_stage: int | None = None  # 0, 1, 2, 3; null: the file's, else 2
    config_file: str | None = None  # a ds_config.json of your own; "auto" is filled in, conflicts are refused
    reduce_bucket_size: int | None = None  # elements; null: DeepSpeed's
    allgather_bucket_size: int | None = None  # elements
    stage3_prefetch_bucket_size: int | None = None  # elements
    stage3_param_persistence_threshold: int | None = None  # elements
    stage3_max_live_parameters: int | None = None  # parameters
    overlap_comm: bool = False
    cpu_optimizer: str = (
        "auto"  # of offloaded states: torch, deepspeed (compiled on first use); auto: deepspeed on GPUs
    )


@dataclass
class OffloadConfig:
    enabled: bool = False
    pin_memory: bool = False


@dataclass
class PrecisionConfig:
    name: str = "fp32"  # fp32, bf16, fp16


@dataclass
class TrainConfig:
    num_epochs: int = 3
    max_steps: int | None = None  # optimizer steps; cuts num_epochs short
    micro_batch_size: int = 4  # samples a worker sees at once
    eval_batch_size: int | None = None  # null: micro_batch_size
    gradient_accumulation_steps: int = 1
    learning_rate: float = 5e-5
    weight_decay: float = 0.01  # of matrices; biases and norms are left out, as in the Trainer
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    momentum: float = 0.9  # sgd
    gradient_clipping: float | None = 1.0  # largest gradient norm; null: none
    optimizer: str = "adamw"  # adamw, sgd
    schedule: str = "linear"  # linear (to zero), step, constant
    step_size: int = 30  # epochs between two decays of schedule=step
    gamma: float = 0.1  # factor of one such decay
    warmup_steps: int = 0
    measure_after_step: int = 5  # steps left out of throughput and step times
    profile_steps: int = 0  # last steps profiled for the share of communication, and not measured; 0: none
    log_every: int = 10  # steps between two lines of metrics.jsonl
    seed: int = 42
    on_nan: str = "stop"  # a loss that is not finite: stop the run as failed, or record it and go on
    logits: str = "all"  # where a causal LM computes them: all, or targets alone (the same loss by less work)
    activation_checkpointing: bool = False
    compile: bool = False
    checkpoint_every: int | str | None = None  # steps, or epoch; null: only where a run has to end early
    resume: str | None = None  # folder of a checkpoint, or of a run, to start from
    save_model: bool = False  # the trained model in the Hugging Face layout, in the run's folder model/
    score_answers: bool = False  # after the last epoch, generate answers and score them by SQuAD's exact match and F1


@dataclass
class ClusterConfig:
    """Where it runs."""

    name: str = "local"
    launcher: str = "local"  # local, slurm: set by the option of the group, together with hydra/launcher
    nodes: int = 1
    workers_per_node: int | None = None  # null: every GPU, or 2 on CPU (1 on Slurm); 1 for strategy=single
    device: str = "auto"  # auto, cuda, cpu; auto is cuda on Slurm
    cpus_per_worker: int | None = None  # threads of a worker; null: its share of the cores
    timeout_min: float | None = None  # minutes a run may take; null: no limit, on Slurm the partition's
    hang_timeout_min: float = 30.0  # minutes without a step or a new phase, after which a run has hung
    debug: bool = False  # NCCL's and torch.distributed's own accounts in the logs
    environment: dict[str, str] = field(default_factory=dict)  # variables of the workers alone, as NCCL's
    # On Slurm only: what is asked of it ...
    gpus_per_node: int | None = None  # null: one a worker with device=cuda, none with device=cpu
    memory_gb: float | None = None  # of a node; null: the cluster's default, with exclusive all of it
    partition: str | None = None
    constraint: str | None = None
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None
    exclusive: bool = False  # whole nodes
    sbatch: dict[str, Any] = field(default_factory=dict)  # further options of sbatch, as {mail-type: END}
    srun: list[str] = field(default_factory=list)  # further options of srun, as [--cpu-bind=none]
    signal_delay_s: int = 120  # seconds before the time limit at which a run is told of it
    requeue: bool = True  # Slurm may start a run anew whose node failed, or which gave way to another
    # ... what a job does before it starts a run ...
    modules: list[str] = field(default_factory=list)  # loaded by `module load`
    setup: list[str] = field(default_factory=list)  # lines of shell, after the modules
    python: str | None = None  # Python of the jobs, a container's too; null: the one that submits
    # ... and how the sweep is submitted.
    array_parallelism: int | None = None  # runs of one shape at the same time; null: as many as there are
    wait: bool = True  # false: print the job ids and leave
    dry_run: bool = False  # print the sbatch files, and submit nothing

    @property
    def world_size(self) -> int:
        """Workers on all nodes; one on each node while ``workers_per_node`` is still null."""
        return self.nodes * (self.workers_per_node or 1)


@dataclass
class MeasureConfig:
    """What is sampled from outside the workers."""

    enabled: bool = True
    interval_s: float = 0.5  # seconds between two samples of memory and utilisation


@dataclass
class TrackerConfig:
    """Where else metrics, summary and files go. Keys and passwords are the library's to find, never written here."""

    name: str = "none"
    _target_: str | None = None  # class of the Tracker protocol; null: none
    project: str = "distexp"  # wandb's project, MLflow's experiment
    online: bool = False  # wandb: send at once
    uri: str | None = None  # MLflow's server or store; null: the folder mlruns/


@dataclass
class PreflightConfig:
    """Whether the interconnect is measured before a training, and what stops it."""

    enabled: bool = False
    only: bool = False  # measure, and train nothing
    min_busbw_gbps: float | None = None  # GB/s of the largest all-reduce; null: 5 on GPUs, no threshold on a CPU
    max_bytes: int | None = None  # of the largest buffer; null: 4 GiB on GPUs, 64 MiB on a CPU
    warmup_rounds: int = 20
    rounds: int = 50  # fewer where a size would take longer than 10 s


@dataclass
class ScaleConfig:
    """How far down a run is scaled. The limits hold for what a preset or the command line says; null is none."""

    name: str = "full"
    shrink: int | None = None  # divides the widths of a model
    layers: int | None = None  # of a model, and of each stage of a ResNet
    heads: int | None = None
    vocab_size: int | None = None
    max_length: int | None = None  # tokens
    image_size: int | None = None  # pixels
    train_size: int | None = None  # samples
    eval_size: int | None = None
    micro_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    workers: int | None = None  # a cell with more is refused
    workers_per_node: int = 2  # what presets on several nodes start on each of them


@dataclass
class ScalingConfig:
    """How the work follows the number of workers."""

    name: str = "fixed"  # fixed, weak_data, weak_model, weak_model_seed
    samples_per_worker: int | None = None  # weak_data: what dataset.train_size is made of
    base_workers: int | None = None  # weak_model: where layers and micro-batch are as configured


@dataclass
class SweepConfig:
    """Cells beside the product of a sweep: each is a list of overrides, and may sweep itself."""

    cells: list[Any] = field(default_factory=list)
    resume: bool = False  # keep what is done in hydra.sweep.dir: what distexp.resume sets


@dataclass
class Config:
    """The whole configuration."""

    name: str = "distexp"  # folder of the results
    exercise: str | None = None  # the exercise whose own table the report makes; its preset sets it
    model: ModelConfig = field(default_factory=ModelConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    ddp: DDPConfig = field(default_factory=DDPConfig)
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    deepspeed: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    preflight: PreflightConfig = field(default_factory=PreflightConfig)
    scale: ScaleConfig = field(default_factory=ScaleConfig)
    scaling: ScalingConfig = field(default_factory=ScalingConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    trusted_packages: list[str] = field(default_factory=list)  # packages whose _target_s may run


def register_schema() -> None:
    """Makes the schema known to Hydra under the name that ``conf/config.yaml`` extends."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="schema", node=Config)
