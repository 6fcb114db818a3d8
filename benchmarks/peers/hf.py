"""``transformers.Trainer``: at its best, with batches of similar length, or as in the workshop."""

from __future__ import annotations

import os
import tempfile
from typing import Any

from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

from benchmarks.peers.common import (
    PaddedSamples,
    StepRecorder,
    TrimmedSamples,
    build_bloom,
    measure,
    pad_to_longest,
    start_worker,
)
from benchmarks.peers.settings import CLIPPING, LEARNING_RATE, WEIGHT_DECAY, Settings


class Clock(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """A callback that marks the ends of the steps."""

    def __init__(self, recorder: StepRecorder) -> None:
        self.recorder = recorder

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock."""
        self.recorder.start()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Mark the end of a step."""
        self.recorder.end_step()


def fast_arguments(settings: Settings) -> dict[str, Any]:
    """Return the arguments with which the Trainer is fastest."""
    arguments: dict[str, Any] = {
        "torch_compile": settings.compile,
        "logging_nan_inf_filter": False,  # it would wait for the device after every micro-batch
    }
    if settings.peer == "trainer_grouped":
        arguments["train_sampling_strategy"] = "group_by_length"
    if settings.device == "cuda":
        arguments["optim"] = "adamw_torch_fused"
    if settings.strategy == "ddp":
        arguments["ddp_find_unused_parameters"] = False
    if settings.strategy == "fsdp":
        # Hooks of FSDP break the graph of a whole model. TrainingArguments has no option for this.
        os.environ["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = "true"
        arguments["fsdp"] = True
        arguments["fsdp_config"] = {
            "version": 2,
            "reshard_after_forward": True,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": ["BloomBlock"],
        }
    return arguments


def train(settings: Settings) -> dict[str, object]:
    """Train and return the result."""
    device = start_worker(settings, join=False)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=settings.total_steps,
            per_device_train_batch_size=settings.micro_batch,
            gradient_accumulation_steps=settings.accumulation,
            learning_rate=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            max_grad_norm=CLIPPING,
            lr_scheduler_type="constant",
            bf16=settings.precision == "bf16",
            fp16=settings.precision == "fp16",
            use_cpu=settings.device == "cpu",
            logging_strategy="no",
            save_strategy="no",
            eval_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **({} if settings.peer == "workshop" else fast_arguments(settings)),
        )
        recorder = StepRecorder(settings, device)
        grouped = settings.peer == "trainer_grouped"
        samples = TrimmedSamples(settings) if grouped else PaddedSamples(settings)
        trainer = Trainer(
            model=build_bloom(settings, device),
            args=arguments,
            data_collator=pad_to_longest if grouped else default_data_collator,
            train_dataset=samples,
            callbacks=[Clock(recorder)],
        )
        output = trainer.train()
    # With several workers this is the loss of rank 0, weighted with its share of the targets.
    loss = output.training_loss if settings.workers == 1 else None
    return recorder.result(loss, None if grouped else samples.padding_share)


if __name__ == "__main__":
    measure(train)
