"""The sections of the schema with the size of a run: limits that shrink it, and growth with its workers."""

from __future__ import annotations

from dataclasses import dataclass

from distexp.config.field_info import key


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
