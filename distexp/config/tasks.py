"""What a task is: its inputs, its labels, how they are compared with the logits, and its class of transformers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Task:
    """The properties of a task that distexp trains."""

    inputs: tuple[str, ...]  # names of the inputs that the datasets of distexp have. A custom dataset may have others
    auto_class: str  # class of transformers that builds its models
    endings: tuple[str, ...]  # ends of the names of its architectures in transformers
    models: str  # examples of ``model=`` for messages
    datasets: str  # examples of ``dataset=`` for messages
    is_text: bool = True  # its inputs are tokens, else images
    is_causal: bool = False  # the logits at a position predict the next label, so labels are shifted in the loss
    labels_tokens: bool = True  # labels have the shape (batch, length), else (batch,)
    has_classes: bool = False  # labels are classes, whose accuracy is counted. Others are tokens of the vocabulary.

    @property
    def is_image(self) -> bool:
        """Return whether the inputs are images."""
        return not self.is_text


TOKENS = ("input_ids", "attention_mask")

DECODER_LABELS = "decoder_labels"
"""Input name of seq2seq models: the labels, which the model shifts for its decoder as its architecture does."""

TASKS: Mapping[str, Task] = {
    "causal_lm": Task(
        TOKENS,
        "AutoModelForCausalLM",
        ("ForCausalLM", "LMHeadModel"),
        "bloom_tiny, gpt_tiny or another text model",
        "squad_sample, squad, text, chat or synthetic",
        is_causal=True,
    ),
    "seq2seq_lm": Task(
        (*TOKENS, DECODER_LABELS),
        "AutoModelForSeq2SeqLM",
        ("ForConditionalGeneration", "MTModel", "EncoderDecoderModel", "ForTextToText"),
        "hf with model.task=seq2seq_lm and a model such as T5 or BART",
        "chat or synthetic",
    ),
    "masked_lm": Task(
        TOKENS,
        "AutoModelForMaskedLM",
        ("ForMaskedLM", "BertForPreTraining"),
        "hf with model.task=masked_lm and a model such as BERT",
        "text or synthetic",
    ),
    "sequence_classification": Task(
        TOKENS,
        "AutoModelForSequenceClassification",
        ("ForSequenceClassification",),
        "hf with model.task=sequence_classification",
        "text or synthetic",
        labels_tokens=False,
        has_classes=True,
    ),
    "token_classification": Task(
        TOKENS,
        "AutoModelForTokenClassification",
        ("ForTokenClassification",),
        "hf with model.task=token_classification",
        "text or synthetic",
        has_classes=True,
    ),
    "image_classification": Task(
        ("images",),
        "AutoModelForImageClassification",
        ("ForImageClassification", "ForImageClassificationWithTeacher"),
        "resnet_tiny or resnet50",
        "tinyimagenet_sample, tinyimagenet, image_folder or synthetic",
        is_text=False,
        labels_tokens=False,
        has_classes=True,
    ),
}

DATASET_KINDS: Mapping[str, tuple[str, ...]] = {
    "any": tuple(TASKS),
    "text": ("causal_lm", "masked_lm", "sequence_classification", "token_classification"),
    "chat": ("causal_lm", "seq2seq_lm"),
}
"""Tasks of the datasets that have several, by ``dataset.task``."""


def tasks_of_dataset(kind: str) -> tuple[str, ...]:
    """Return the tasks for which a dataset has samples, by its ``dataset.task``."""
    return DATASET_KINDS.get(kind, (kind,))


AUTO = "auto"
"""Value of ``model.task``: the task of the architecture that the model's config.json names."""


def task_of(name: str) -> Task:
    """Return the properties of a task. Raise ValueError for an unknown one."""
    if name not in TASKS:
        raise ValueError(f"task={name} must be one of {', '.join(TASKS)}")
    return TASKS[name]


def task_of_architecture(architecture: Mapping[str, Any]) -> str:
    """Return the task of a model by the content of its config.json; ``causal_lm`` if that does not name one task."""
    names = map(str, architecture.get("architectures") or ())
    found = {task for name in names for task, known in TASKS.items() if name.endswith(known.endings)}
    # Models of images and texts have the same ending as seq2seq models.
    found -= set() if architecture.get("is_encoder_decoder") else {"seq2seq_lm"}
    return found.pop() if len(found) == 1 else "causal_lm"
