"""The sections of the schema with the cluster, the data, the strategies, and the commands that predict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING

from distexp.config.fields import key
from distexp.config.tasks import AUTO, DATASET_KINDS, TASKS, Task, task_of


@dataclass
class ClusterConfig:
    """Where a run starts, and its resources. Some keys are for Slurm only."""

    name: str = key("local", "Name of the cluster.")
    _target_: str = key(
        "distexp.launch.local.launcher.LocalLauncher", "Launcher: what starts the runs. Set by `cluster=`."
    )
    nodes: int = key(1, "Nodes. On one machine more than one are simulated.", at_least=1)
    workers_per_node: int | None = key(
        None, "Workers per node.", at_least=1,
        null="1 with `strategy=single`, else one per GPU, or 2 without GPUs; on Slurm `gpus_per_node`, else 1",
    )  # fmt: skip
    device: str = key("auto", "Device of the workers. `auto` is cuda on Slurm.", choices=("auto", "cuda", "cpu"))
    cpus_per_worker: int | None = key(
        None, "CPU threads of each worker.", at_least=1, null="an equal share of the cores, or 4 on Slurm"
    )
    timeout_min: float | None = key(
        None, "Time limit of a run.", unit="minutes", above=0, null="none, or the limit of the Slurm partition"
    )
    hang_timeout_min: float = key(
        30.0, "Time without progress after which a run counts as hung.", unit="minutes", at_least=0.01, below=30_000
    )
    debug: bool = key(False, "Enable the debug logs of NCCL and torch.distributed.")
    environment: dict[str, str] = key({}, "Environment variables of the workers only, for example `NCCL_*`.")
    gpus_per_node: int | None = key(
        None, "GPUs of each node.", at_least=0, null="one per worker on cuda, none on cpu", slurm_only=True
    )
    gpu_memory_limit_gb: float | None = key(
        None, "Memory that a worker may use on its GPU, to try a smaller one, in GiB.", above=0,
        null="all",
    )  # fmt: skip
    memory_gb: float | None = key(
        None, "Memory of each node.", unit="GiB", above=0, slurm_only=True,
        null="the default of the cluster, or all memory with `exclusive`",
    )  # fmt: skip
    partition: str | None = key(None, "Partition.", slurm_only=True)
    constraint: str | None = key(None, "Required node features.", slurm_only=True)
    account: str | None = key(None, "Account to charge.", slurm_only=True)
    qos: str | None = key(None, "Quality of service.", slurm_only=True)
    reservation: str | None = key(None, "Reservation.", slurm_only=True)
    exclusive: bool = key(False, "Allocate whole nodes.", slurm_only=True)
    sbatch: dict[str, Any] = key({}, "More options of sbatch, as `{mail-type: END}`.", slurm_only=True)
    srun: list[str] = key([], "More options of srun, as `['--cpu-bind=none']`.", slurm_only=True)
    signal_delay_s: int = key(
        120, "Time before the time limit at which a run is asked to stop.", unit="seconds", at_least=0, slurm_only=True
    )
    requeue: bool = key(True, "Requeue a run after a node failure, a time limit or a preemption.", slurm_only=True)
    modules: list[str] = key([], "Modules to load in the job.", slurm_only=True)
    setup: list[str] = key([], "Shell lines to run in the job, after the modules.", slurm_only=True)
    python: str | None = key(
        None, "Python command of the jobs, possibly in a container.", null="the Python that submits", slurm_only=True
    )
    array_parallelism: int | None = key(
        None, "Most runs of one job array at the same time.", at_least=1, null="no limit", slurm_only=True
    )
    wait: bool = key(True, "Wait for the jobs. False: print the job ids and exit.", slurm_only=True)
    gco2_per_kwh: float | None = key(
        None, "Carbon intensity of the electricity, for `metrics.energy.co2e_g`.", unit="grams of CO2e per kWh",
        at_least=0, null="no CO2e in record and tables",
    )  # fmt: skip
    price_per_gpu_hour: float | None = key(
        None, "Price of an hour of one GPU, in any currency, for `metrics.energy.price`.", at_least=0,
        null="no price in record and tables",
    )  # fmt: skip
    dry_run: bool = key(False, "Print the sbatch files and submit nothing.", slurm_only=True)

    @property
    def world_size(self) -> int:
        """Workers on all nodes; one on each node while ``workers_per_node`` is still null."""
        return self.nodes * (self.workers_per_node or 1)


@dataclass
class ModelConfig:
    """The model to train. Keys that an architecture does not have must stay null."""

    _target_: str = key(MISSING, "Function `(model: ModelConfig, num_classes: int) -> torch.nn.Module`.")
    name: str = key(MISSING, "Name in distexp, timm or torchvision, or a Hugging Face name or path.")
    task: str = key(
        MISSING, "Task of the model. `auto`: that of the architecture in the config.json of `model=hf`.",
        choices=(*TASKS, AUTO),
    )  # fmt: skip
    path: str | None = key(
        None, "Weights that `init=pretrained` loads: hub id or folder. A file for timm and torchvision.", path="hub"
    )
    init: str = key("random", "Random weights, or pretrained weights from `path`.", choices=("random", "pretrained"))
    tokenizer: str | None = key(
        None, "`byte`: trained on the dataset. `auto`: the tokenizer of the model. Else a hub id or a folder.",
        path="hub",
    )  # fmt: skip
    vocab_size: int | None = key(None, "Rows of the embedding.", at_least=1, below=10**9, null="size of the tokenizer")
    hidden_size: int | None = key(None, "Width of the hidden states.", at_least=1, below=10**7)
    num_layers: int | None = key(None, "Number of transformer blocks.", at_least=1, below=10**4)
    num_heads: int | None = key(None, "Attention heads. They must divide `hidden_size`.", at_least=1, below=10**5)
    ff_dim: int | None = key(None, "Width of the feed-forward layers.", at_least=1, below=10**7)
    seq_length: int | None = key(None, "Most positions of the model.", unit="tokens", at_least=1, below=10**9)
    width: int | None = key(None, "Channels of the first stage of a ResNet.", at_least=1, below=10**6)
    depths: list[int] | None = key(
        None, "Residual blocks in each stage of a ResNet.", length=4, at_least=1, below=10**4, example="[3,4,6,3]"
    )
    bottleneck: bool | None = key(None, "Whether a ResNet uses bottleneck blocks.")
    tie_embeddings: bool | None = key(None, "Whether embedding and output head share one weight.")
    dropout: float | None = key(0.0, "Dropout probability.", at_least=0, below=1, null="default of the architecture")
    attention: str = key(
        "auto", "Implementation of the attention. `auto`: the default of the model. `flash`: only for `model=hf`.",
        choices=("auto", "eager", "sdpa", "flex", "flash"), id_if_changed=True,
    )  # fmt: skip
    keys: list[str] = key([], "Keys that this model has. Any other key of this section is an error.")
    options: dict[str, Any] = key({}, "Keys of a custom model. For `model=hf` values of config.json.")

    @property
    def traits(self) -> Task:
        """Return the properties of the task, which ``resolve`` decides for ``auto``."""
        return task_of(self.task)


@dataclass
class AdapterConfig:
    """Low-rank adapters (LoRA) that are trained in place of the weights of the model, by `peft`."""

    name: str = key("none", "`lora`: train adapters, and freeze the model.", choices=("none", "lora"))
    rank: int = key(8, "Rows of matrix A, and columns of matrix B, of each adapter.", at_least=1, below=100_000)
    alpha: int = key(16, "Factor of the adapters is `alpha / rank`.", at_least=1, below=1_000_000)
    dropout: float = key(0.0, "Dropout probability of the inputs of the adapters.", at_least=0, below=1)
    targets: list[str] | None = key(
        None, "Ends of the names of the layers with adapters, as in `[q_proj,v_proj]`.",
        null="peft's choice for the architecture, else all linear layers of the blocks", may_be_empty=False,
        example="[q_proj,v_proj]",
    )  # fmt: skip
    modules_to_save: list[str] | None = key(
        None, "Ends of the names of modules that are trained and saved whole, as in `[classifier]`.",
        null="the head of a model for classification, else none", id_if_changed=True, may_be_empty=False,
        example="[classifier]",
    )  # fmt: skip
    base_dtype: str | None = key(
        None, "Data type in which the frozen weights are kept.", choices=("fp32", "bf16"),
        null="bf16 with `precision=bf16`, else fp32",
    )  # fmt: skip

    @property
    def freezes_model(self) -> bool:
        """Return whether only adapters are trained."""
        return self.name != "none"


@dataclass
class DatasetConfig:
    """The dataset to train on."""

    _target_: str = key(MISSING, "Function `(dataset: DatasetConfig, model: ModelConfig, seed: int) -> TaskData`.")
    name: str = key(MISSING, "Name of the dataset.")
    task: str = key(
        MISSING, "Task of the dataset. Those of own texts and synthetic data have samples for several.",
        choices=(*TASKS, *DATASET_KINDS),
    )  # fmt: skip
    path: str | None = key(
        None, "Hub id, or a folder written by `datasets.save_to_disk`. Own data: also a file, a folder or a pattern.",
        path="hub",
    )  # fmt: skip
    train_path: str | None = key(None, "SQuAD v1.1 JSON file to train on.", path="file")
    eval_path: str | None = key(None, "SQuAD v1.1 JSON file to evaluate on. Own data: a local `path`.", path="file")
    subset: str | None = key(None, "Subset (configuration) of a dataset of the hub.", id_if_changed=True)
    split: str | None = key(None, "Split to train on.", null="train", id_if_changed=True)
    eval_split: str | None = key(
        None, "Split to evaluate on.", null="validation or test, if the data has such a split", id_if_changed=True
    )
    eval_share: float | None = key(
        None, "Share of the training rows to evaluate on in place of a split or `eval_path`.", above=0, below=1,
        null="0.1 if the data has no split for it", id_if_changed=True,
    )  # fmt: skip
    column: str = key("text", "Column with the text.", id_if_changed=True)
    prompt_column: str = key("prompt", "Column with the prompt.", id_if_changed=True)
    answer_column: str = key("answer", "Column with the answer.", id_if_changed=True)
    label_column: str = key("label", "Column with the class of a text: a name, or a number from 0.", id_if_changed=True)
    tokens_column: str = key(
        "tokens", "Column with the tokens of a text, as a list: each is a word.", id_if_changed=True
    )
    tags_column: str = key("tags", "Column with the classes of these words, as a list.", id_if_changed=True)
    messages_column: str = key(
        "messages", "Column with lists of messages, each with `role` and `content`. If it exists, it is used in place "
        "of prompt and answer.", id_if_changed=True,
    )  # fmt: skip
    chat_template: str = key(
        "tokenizer", "Template for messages: that of the tokenizer, or that of Zephyr.",
        choices=("tokenizer", "zephyr"), id_if_changed=True,
    )  # fmt: skip
    targets: str = key(
        "answer", "Tokens that are trained: those of the answers, or also those of the prompts.",
        choices=("answer", "all"), id_if_changed=True,
    )  # fmt: skip
    documents: str = key(
        "paragraph", "Documents of a plain text file: the lines between two empty ones, each line, or the file.",
        choices=("paragraph", "line", "file"), id_if_changed=True,
    )  # fmt: skip
    root: str | None = key(None, "Folder in the official layout of TinyImageNet.", path="folder")
    train_size: int | None = key(None, "Number of training examples.", at_least=1, null="all")
    eval_size: int | None = key(None, "Number of evaluation examples.", at_least=1, null="all")
    max_length: int | None = key(
        None, "Most tokens of a sample. Longer texts are cut. Own texts: 512, or the positions of the model if fewer.",
        unit="tokens", at_least=2,
    )  # fmt: skip
    answer_tokens: int = key(32, "Longest generated answer. See `train.score_answers`.", unit="tokens", at_least=1)
    padding: str = key(
        "max_length", "Pad to `max_length`, or to the longest text of the batch.", choices=("max_length", "longest")
    )
    packing: bool = key(
        False, "Put several training samples into one row of `max_length` tokens. Batch sizes then count rows.",
        id_if_changed=True,
    )  # fmt: skip
    bucketing: bool = key(
        False, "Make training batches of samples of similar length, and pad them to the longest one.",
        id_if_changed=True,
    )  # fmt: skip
    image_size: int | None = key(None, "Height and width of an image.", unit="pixels", at_least=1)
    num_classes: int | None = key(None, "Number of image classes of synthetic data.", at_least=1)
    num_workers: int = key(0, "DataLoader processes of each worker, at most 256.", at_least=0, below=257)
    cache: str | None = key(
        None, "Memory for all decoded images. They are then augmented on the device. `none`: decode each one again.",
        choices=("none", "cpu", "gpu"), reference="none", id_if_changed=True,
    )  # fmt: skip
    keys: list[str] = key([], "Keys that this dataset has. Any other key of this section is an error.")
    options: dict[str, Any] = key({}, "Keys of a custom dataset.")


@dataclass
class DDPConfig:
    """Options of `strategy=ddp`, as in `DistributedDataParallel`."""

    bucket_cap_mb: float | None = key(None, "Size of a gradient bucket.", unit="MB", above=0, below=1e6, reference=25.0)
    static_graph: bool = key(False, "Whether every step uses the same autograd graph.")
    find_unused_parameters: bool = key(False, "Whether to search for parameters without a gradient.")
    gradient_as_bucket_view: bool = key(
        True, "Keep gradients in the buckets, without a second copy.", id_if_changed=True
    )
    communication: str = key(
        "fp32", "Data type in which gradients are sent.", choices=("fp32", "bf16"), id_if_changed=True
    )


@dataclass
class FSDPConfig:
    """Options of `strategy=fsdp`, that is, FSDP2 (`fully_shard`)."""

    sharding: str | None = key(
        None, "What is sharded. `sharding=` sets this key and the strategy.",
        choices=("full_shard", "shard_grad_op", "hybrid_shard", "no_shard"), null="full_shard",
    )  # fmt: skip
    replicas: int | None = key(None, "Replicas of a hybrid mesh.", null="one per node")
    wrap: str = key(
        "auto", "`auto`: each block is a unit. `none`: the whole model. Else class names of the units, as `\"'A,B'\"`."
    )
    forward_prefetch: int = key(0, "Blocks to all-gather ahead in the forward pass.", at_least=0)
    backward_prefetch: int = key(1, "Blocks to all-gather ahead in the backward pass.", at_least=0)
    blocks_per_unit: int | str | None = key(
        None, "Blocks that are sharded and gathered together. `auto`: units of at least 30M parameters.",
        choices=("auto",), at_least=1, reference=1, id_if_changed=True,
    )  # fmt: skip
    sync_module_states: bool = key(True, "Broadcast the initial weights of rank 0.")


@dataclass
class DeepSpeedConfig:
    """Options of `strategy=deepspeed`. Null keys keep the defaults of DeepSpeed."""

    zero_stage: int | None = key(
        None, "ZeRO stage. `zero_stage=` sets this key and the strategy.", choices=(0, 1, 2, 3),
        null="the stage of `config_file`, or 2",
    )  # fmt: skip
    config_file: str | None = key(
        None, 'A `ds_config.json`. "auto" values are filled in. Conflicts are errors.', path="file"
    )
    reduce_bucket_size: int | None = key(None, "Bucket of the gradient reduction.", unit="elements", at_least=1)
    allgather_bucket_size: int | None = key(None, "Bucket of the parameter all-gather.", unit="elements", at_least=1)
    stage3_prefetch_bucket_size: int | None = key(None, "Parameters to prefetch.", unit="elements", at_least=1)
    stage3_param_persistence_threshold: int | None = key(
        None, "Smaller parameters are not partitioned.", unit="elements", at_least=1
    )
    stage3_max_live_parameters: int | None = key(None, "Most parameters gathered at once.", unit="elements", at_least=1)
    overlap_comm: bool | None = key(
        None, "Overlap the gradient reduction with the backward pass.",
        null="the value of `config_file`, or true at stage 3 only", id_of_null=False,
    )  # fmt: skip
    check_overflow: bool | None = key(
        None, "Skip steps with infinite gradients. bf16 needs no such check.", reference=True, id_if_changed=True
    )
    async_update: bool | None = key(
        None, "Clip and update without waiting for the GPU: with bf16 at stages 1, 2, native trainer, no offload.",
        reference=False, id_if_changed=True,
    )  # fmt: skip
    cpu_optimizer: str = key(
        "auto", "Optimizer of offloaded states. DeepSpeed compiles its own. `auto`: deepspeed on GPUs, else torch.",
        choices=("auto", "torch", "deepspeed"),
    )  # fmt: skip


@dataclass
class ParallelConfig:
    """Ways to share one model between workers, next to those of the strategy. The other workers have other rows."""

    tensor: int = key(
        1, "Workers of a node that share the matrices of each layer and compute the same rows.",
        at_least=1, id_if_changed=True,
    )  # fmt: skip
    context: int = key(1, "Workers of a node that share the tokens of each row.", at_least=1, id_if_changed=True)
    expert: int = key(1, "Workers that share the experts of each layer.", at_least=1, id_if_changed=True)
    pipeline: int = key(1, "Workers that have the blocks of a model together.", at_least=1, id_if_changed=True)
    schedule: str | None = key(
        None, "Order of the micro-batches in a pipeline. A worker has two stages with the last two.", null="1f1b",
        choices=("gpipe", "1f1b", "interleaved", "zero_bubble"), id_if_changed=True,
    )  # fmt: skip

    @property
    def shares_layers(self) -> bool:
        """Return whether several workers share each layer."""
        return self.tensor > 1

    @property
    def copies(self) -> int:
        """Return how many workers have the same rows."""
        return self.tensor * self.context * self.pipeline


@dataclass
class ChooseConfig:
    """Search for the best configuration, as by `distexp choose`. It does not change the training."""

    objective: str = key(
        "throughput",
        "What is best: most samples per second, least energy or price per sample, or lowest peak of GPU memory.",
        choices=("throughput", "energy", "cost", "memory"),
    )
    budget_min: float = key(
        10.0, "Time for the trials. GPU time = minutes x the largest number of GPUs of a trial.", unit="minutes",
        above=0,
    )  # fmt: skip
    gpus: list[int] = key([], "Numbers of workers to try, over all nodes. Empty: that of the command.", at_least=1)
    space: list[str] = key(
        [],
        "What to vary: keys with the values to try, as in `['strategy=ddp,fsdp']`. A key without values has the usual "
        "ones, and then only the listed keys vary. Empty: all usual keys.",
    )
    dry_run: bool = key(False, "Print the candidates, the planned trials and their cost. Start nothing.")
    output: str = key("table", "Output of `distexp choose`. Its option `--json` sets it.", choices=("table", "json"))


@dataclass
class PlanConfig:
    """Prediction of memory before a run starts, as by `distexp plan`."""

    name: str = key(
        "warn", "`check`: a run that cannot fit is invalid. `warn`: print a warning if the prediction is "
        "cached. `off`: nothing.", choices=("check", "warn", "off"),
    )  # fmt: skip
    gpu: str | None = key(None, "GPU model to predict for, as `a100-80gb`.", null="the GPU of this machine")
    gpu_memory_gb: float | None = key(
        None, "Memory of the GPU to predict for, in GiB.", above=0, null="that of the GPU"
    )
    host_memory_gb: float | None = key(
        None, "Memory of a node to predict for with `cluster.device=cpu`, in GiB.", above=0,
        null="`cluster.memory_gb` on Slurm, else the memory of this machine",
    )  # fmt: skip
    timeout_s: float | None = key(
        900.0, "Longest time of a prediction. After it only the model states are computed.", unit="seconds", above=0,
        null="no limit",
    )  # fmt: skip
    search_timeout_s: float | None = key(
        30.0,
        "Longest time in which `plan=check` searches for changes that make runs fit. The message states how many were "
        "left out.", unit="seconds", above=0, null="no limit",
    )  # fmt: skip
    search: bool = key(
        False, "Let `distexp plan` search the largest micro-batch of one configuration, also if the training fits."
    )
    output: str = key("table", "Output of `distexp plan`. Its option `--json` sets it.", choices=("table", "json"))


@dataclass
class ForecastConfig:
    """Forecast of a profiled run on other numbers of GPUs, by `distexp forecast`."""

    memory: str = key(
        "predict",
        "Memory of each size. `predict`: as `distexp plan`, up to 64 workers. `cached`: only predictions of earlier "
        "commands. `off`: none.", choices=("predict", "cached", "off"),
    )  # fmt: skip
    preflight: str | None = key(
        None, "Directory of a run with a preflight, whose bandwidths are used.",
        null="the bandwidths of the run, or of the last preflight on this machine",
    )  # fmt: skip
    network: str | None = key(
        None,
        "Network between nodes, as `infiniband-ndr-400g` with one card per worker. The workers of a node share one "
        "`ethernet-10g` card. Measured bandwidths take precedence.",
        null="infiniband-hdr-200g for GPUs, ethernet-10g for CPUs",
    )
    rail_optimized: bool | None = key(
        None, "Whether GPUs of the same index share a switch, up to 32 nodes.", null="true"
    )
    oversubscription: float = key(
        1.0,
        "By how much the upper level of the network is slower than the lower one. With `rail_optimized`, only more "
        "than 32 nodes use the upper level.", at_least=1,
    )  # fmt: skip
    output: str = key("table", "Output of `distexp forecast`. Its option `--json` sets it.", choices=("table", "json"))
    run: str | None = key(None, "Directory of the profiled run. Set by `distexp forecast`.", null="none")
