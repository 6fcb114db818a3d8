"""The bugs of the museum: where each one was found in public, and the cause that ``distexp verify`` must name."""

from __future__ import annotations

from typing import NamedTuple


class Bug(NamedTuple):
    """A bug that the tests rebuild."""

    source: str  # a public report of this bug, or of one that does the same
    cause: str  # identifier of the cause


TEXT_BUGS = {
    "summed": Bug("https://github.com/pytorch/pytorch/issues/160285", "summed"),
    "averaged_twice": Bug("https://github.com/unslothai/unsloth-zoo/pull/1023", "averaged_twice"),
    "not_reduced": Bug("https://github.com/jingyaogong/minimind/issues/853", "not_reduced"),
    "norm_not_reduced": Bug("https://github.com/moojink/openvla-oft/issues/160", "not_reduced"),
    "embedding_not_reduced": Bug("https://github.com/kohya-ss/sd-scripts/pull/989", "not_reduced"),
    "layer_scaled": Bug("https://github.com/pytorch/torchtitan/issues/1793", "averaged_twice"),
    "reduced_in_bf16": Bug("https://github.com/facebookresearch/fairscale/pull/1152", "rounded"),
    "accumulation_summed": Bug("https://github.com/verl-project/verl/pull/3332", "accumulation_summed"),
    "last_micro_batch_only": Bug("https://github.com/pytorch/torchtitan/pull/3575", "micro_batches_lost"),
    "last_reduced_only": Bug("https://github.com/karpathy/build-nanogpt/pull/30", "partly_reduced"),
    "mean_per_micro_batch": Bug("https://github.com/huggingface/transformers/issues/34191", "mean_of_means"),
    "not_cleared": Bug("https://github.com/meta-pytorch/torchforge/pull/71", "not_cleared"),
    "decay_everywhere": Bug("https://github.com/verl-project/verl/issues/5070", "weight_decay"),
    "other_betas": Bug("https://github.com/NovaSky-AI/SkyRL/pull/1649", "hyperparameter"),
    "schedule_per_rank": Bug("https://github.com/huggingface/transformers/pull/24088", "schedule_per_rank"),
    "local_clip_norm": Bug("https://github.com/pytorch/pytorch/issues/72548", "norm_local"),
    "partial_norm": Bug("https://github.com/NVIDIA/Megatron-LM/issues/5916", "norm_partial"),
    "norm_of_replicas": Bug("https://github.com/mindspore-ai/hyper-parallel/issues/526", "norm_repeated"),
    "clipped_one_by_one": Bug("https://github.com/huggingface/transformers/pull/614", "clip_not_global"),
    "not_clipped": Bug("https://github.com/axolotl-ai-cloud/axolotl/issues/1381", "not_clipped"),
    "skipped_on_one_rank": Bug("https://github.com/NVIDIA-NeMo/Automodel/pull/2468", "rank_diverges"),
    "other_initial_weights": Bug("https://github.com/pytorch/torchtitan/issues/166", "initial_ranks"),
    "untied": Bug("https://github.com/verl-project/verl/issues/7834", "untied"),
    "resumed_without_states": Bug("https://github.com/huggingface/transformers/issues/25849", "resume_state"),
    "logged_loss_of_one_rank": Bug("https://github.com/huggingface/transformers/pull/13681", "loss"),
    "same_samples": Bug("https://github.com/k2-fsa/icefall/issues/1616", "samples_same"),
    "same_epochs": Bug("https://github.com/kan-bayashi/ParallelWaveGAN/issues/177", "samples_epoch"),
    "shifted_labels": Bug("https://github.com/huggingface/transformers/pull/47395", "samples_labels"),
    "not_normalized": Bug("https://github.com/pytorch/torchtitan/issues/2972", "not_normalized"),
    "replicas_in_norm": Bug("https://github.com/NVIDIA-NeMo/RL/pull/3788", "norm_repeated"),
    "padded_vocabulary": Bug("https://github.com/unslothai/unsloth/pull/10616", "forward"),
    "uninitialized_buffer": Bug("https://github.com/EvolvingLMMs-Lab/lmms-engine/pull/185", "initial_ranks"),
    "resumed_first_order": Bug("https://github.com/modelscope/ms-swift/issues/10050", "resume_samples"),
    "resumed_schedule_twice": Bug("https://github.com/THUDM/slime/pull/1547", "resume_lr"),
}
"""Bugs of language models, by name. ``mutations.py`` and ``models.py`` rebuild them."""

IMAGE_BUGS = {
    "buffers_not_broadcast": Bug("https://github.com/open-mmlab/mmdetection/pull/4582", "buffers_of_ranks"),
    "training_mode_in_evaluation": Bug("https://github.com/princeton-vl/pytorch_stacked_hourglass/issues/44", "mode"),
}
"""Bugs of models with batch norms."""

OWN_BUGS = {
    "updated_twice": "updated_twice",
    "rate_times_workers": "rate_scaled",
    "stale_rate": "learning_rate",
    "late_schedule": "schedule_shifted",
    "clipped_before_reduction": "clipped_early",
    "other_parameters": "update_skipped",
    "wrong_seed": "initial",
    "frozen_trained": "gradient_missing",
    "resumed_without_weights": "resume_weights",
    "stale_evaluation": "evaluation",
    "overlapping_shares": "samples_shared",
    "dropped_batch": "samples_steps",
    "one_step_late": "stale",
    "adam_instead_of_adamw": "decay_in_gradient",
    "gathered_in_bf16": "weights_rounded",
    "half_gathered": "partly_updated",
    "stale_clip_norm": "old_norm",
    "states_cleared": "no_states",
    "row_lost": "gradient_lost",
    "accumulated_in_bf16": "rounded",
}
"""Further bugs, which are common and were not looked up, with their causes."""
