"""The TrainingArguments of a run."""

from __future__ import annotations

import os

import torch
from transformers import TrainingArguments

from distexp.config import Config
from distexp.distributed.context import Context
from distexp.engines.hf_adapters import HFAdapter

CONFLICTING_PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
"""Environment variables of ``accelerate launch``, or of an earlier training in this process; they change a run."""


def training_arguments(config: Config, context: Context, total_steps: int, adapter: HFAdapter) -> TrainingArguments:
    """Return the arguments of a run, and set accelerate's process-wide state.

    Args:
        config: the configuration of the run.
        context: this worker.
        total_steps: number of optimizer steps of the whole training.
        adapter: the adapter of the strategy.
    """
    train = config.train
    for name in [name for name in os.environ if name.startswith(CONFLICTING_PREFIXES)]:
        del os.environ[name]
    # Without this variable, accelerate would set the number of threads.
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    with adapter.argument_context():
        arguments = TrainingArguments(
            output_dir=str(context.run_dir),
            per_device_train_batch_size=train.micro_batch,
            gradient_accumulation_steps=train.gradient_accumulation_steps,
            max_steps=total_steps,
            learning_rate=train.learning_rate,
            lr_scheduler_type="constant",  # on_step_begin sets the learning rate
            max_grad_norm=train.gradient_clipping or 0.0,
            seed=train.seed,
            bf16=adapter.precision == "bf16",
            fp16=adapter.precision == "fp16",
            use_cpu=context.device.type == "cpu",
            average_tokens_across_devices=True,
            # MetricsLogger writes the logs. The filter would wait for the device after every micro-batch.
            logging_strategy="no",
            logging_nan_inf_filter=False,
            save_strategy="no",
            eval_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **adapter.arguments(),
        )
    adapter.configure_arguments(arguments)
    return arguments
