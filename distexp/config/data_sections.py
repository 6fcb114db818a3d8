"""The sections of the schema with the model and the dataset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING

from distexp.config.field_info import key


@dataclass
class ModelConfig:
    """The model to train. Keys that an architecture does not have must stay null."""

    _target_: str = key(MISSING, "Function `(model: ModelConfig, num_classes: int) -> torch.nn.Module`.")
    name: str = key(MISSING, "Name of the architecture in distexp, or a Hugging Face name or path.")
    task: str = key(MISSING, "Task of the model.", choices=("causal_lm", "image_classification"))
    path: str | None = key(None, "Hub id or folder of the weights that `init=pretrained` loads.", path="hub")
    init: str = key("random", "Random weights, or pretrained weights from `path`.", choices=("random", "pretrained"))
    tokenizer: str | None = key(
        None,
        "`byte`: trained on the dataset. `auto`: the tokenizer of the model. Else a hub id or a folder.",
        path="hub",
    )
    vocab_size: int | None = key(None, "Rows of the embedding.", at_least=1, null="size of the tokenizer")
    hidden_size: int | None = key(None, "Width of the hidden states.", at_least=1)
    num_layers: int | None = key(None, "Number of transformer blocks.", at_least=1)
    num_heads: int | None = key(None, "Attention heads. They must divide `hidden_size`.", at_least=1)
    ff_dim: int | None = key(None, "Width of the feed-forward layers.", at_least=1)
    seq_length: int | None = key(None, "Most positions of the model.", unit="tokens", at_least=1)
    width: int | None = key(None, "Channels of the first stage of a ResNet.", at_least=1)
    depths: list[int] | None = key(
        None, "Residual blocks in each stage of a ResNet.", length=4, at_least=1, example="[3,4,6,3]"
    )
    bottleneck: bool | None = key(None, "Whether a ResNet uses bottleneck blocks.")
    tie_embeddings: bool | None = key(None, "Whether embedding and output head share one weight.")
    dropout: float | None = key(0.0, "Dropout probability.", at_least=0, below=1, null="default of the architecture")
    attention: str = key(
        "auto", "Implementation of the attention. `auto`: the default of the model. `flash`: only for `model=hf`.",
        choices=("auto", "eager", "sdpa", "flex", "flash"), id_if_changed=True,
    )  # fmt: skip
    keys: list[str] = key([], "Keys that this model has. Any other key of this section is an error.")
    options: dict[str, Any] = key({}, "Keys of a custom model.")


@dataclass
class DatasetConfig:
    """The dataset to train on."""

    _target_: str = key(MISSING, "Function `(dataset: DatasetConfig, model: ModelConfig, seed: int) -> TaskData`.")
    name: str = key(MISSING, "Name of the dataset.")
    task: str = key(
        MISSING,
        "Task of the dataset. Synthetic data has samples for any task.",
        choices=("causal_lm", "image_classification", "any"),
    )
    path: str | None = key(None, "Hub id, or a folder written by `datasets.save_to_disk`.", path="hub")
    train_path: str | None = key(None, "SQuAD v1.1 JSON file to train on.", path="file")
    eval_path: str | None = key(None, "SQuAD v1.1 JSON file to evaluate on.", path="file")
    root: str | None = key(None, "Folder in the official layout of TinyImageNet.", path="folder")
    train_size: int | None = key(None, "Number of training examples, from the first.", at_least=1, null="all")
    eval_size: int | None = key(None, "Number of evaluation examples, from the first.", at_least=1, null="all")
    max_length: int | None = key(None, "Length at which texts are truncated.", unit="tokens", at_least=2)
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
    num_workers: int = key(0, "DataLoader processes of each worker.", at_least=0)
    cache: str | None = key(
        None, "Memory for all decoded images. They are then augmented on the device. `none`: decode each one again.",
        choices=("none", "cpu", "gpu"), reference="none", id_if_changed=True,
    )  # fmt: skip
    keys: list[str] = key([], "Keys that this dataset has. Any other key of this section is an error.")
    options: dict[str, Any] = key({}, "Keys of a custom dataset.")
