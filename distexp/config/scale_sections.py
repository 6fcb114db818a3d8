"""The sections of the schema with the size of a run: limits that shrink it, and growth with its workers."""

from __future__ import annotations

from dataclasses import dataclass

from distexp.config.field_info import key


@dataclass
class ScaleConfig:
    """Upper limits that shrink a run, for example a preset on a laptop. Null means no limit."""

    name: str = key("full", "Name of the scale.")
    shrink: int | None = key(None, "Divisor of the widths of a model.")
    layers: int | None = key(None, "Layers of a model, or of each stage of a ResNet.")
    heads: int | None = key(None, "Attention heads.")
    vocab_size: int | None = key(None, "Rows of the embedding.")
    max_length: int | None = key(None, "Length of a text.", unit="tokens")
    image_size: int | None = key(None, "Height and width of an image.", unit="pixels")
    train_size: int | None = key(None, "Training examples.")
    eval_size: int | None = key(None, "Evaluation examples.")
    micro_batch_size: int | None = key(None, "Samples per worker and forward pass.")
    gradient_accumulation_steps: int | None = key(None, "Micro-batches per optimizer step.")
    workers: int | None = key(None, "Workers on all nodes. A cell with more is invalid.")
    workers_per_node: int = key(2, "Workers per node in the presets for several nodes.")


@dataclass
class ScalingConfig:
    """How the work changes with the number of workers."""

    name: str = key("fixed", "Scaling rule.", choices=("fixed", "weak_data", "weak_model", "weak_model_workshop"))
    samples_per_worker: int | None = key(None, "`weak_data`: training examples per worker.", at_least=1)
    base_workers: int | None = key(
        None, "`weak_model`: workers at which layers and micro-batch size are as configured.", at_least=1
    )
