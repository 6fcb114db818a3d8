"""Small configurations of many architectures of transformers, and the cells that train them with each strategy."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from distexp.config.keys import set_value
from distexp.runs.record import RunRecord
from distexp.runs.run_dir import RECORD
from tests.helpers.forked_cli import TIMEOUT_S
from tests.helpers.grid import read_lines
from tests.helpers.runs import RANKS, make_spec, run_module

VOCABULARY = 300
TOKENS: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
HIDDEN: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE: dict[str, Any] = {**TOKENS, **HIDDEN, "intermediate_size": 64, "max_position_embeddings": 64}
GROUPED: dict[str, Any] = {**WIDE, "num_key_value_heads": 2}
HEADS_OF_8: dict[str, Any] = {**GROUPED, "head_dim": 8}
GPT: dict[str, Any] = {**TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
UNDROPPED = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
BERT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTER = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
QWEN_EXPERTS = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1},
    "shared_expert_intermediate_size": 32,
}
LATENT = {
    **{"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 2, "topk_group": 1},
    **{"first_k_dense_replace": 1, "moe_intermediate_size": 16, "num_key_value_heads": 4},
}
MAMBA = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2}
MAMBA_HEADS = {**MAMBA, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_chunk_size": 8}

TRANSFORMERS = tuple(int(part) for part in metadata.version("transformers").split(".")[:2])
"""Version of transformers. 5.17, the oldest one, has bugs that tests leave out."""

CAUSAL: dict[str, dict[str, Any]] = {
    "apertus": GROUPED,
    "arcee": GROUPED,
    "bamba": {**GROUPED, **MAMBA_HEADS, "attn_layer_indices": [1]},
    "biogpt": {**WIDE, **BERT_DROPOUT, "activation_dropout": 0.0, "layerdrop": 0.0},
    "bitnet": GROUPED,
    "bloom": {**TOKENS, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "codegen": {**GPT, **UNDROPPED, "rotary_dim": 4, "n_ctx": 64},
    "cohere": GROUPED,
    "cohere2": {**HEADS_OF_8, "sliding_window": 8},
    "ctrl": {**TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 64, "n_positions": 64, **UNDROPPED},
    "dbrx": {
        **{**TOKENS, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64, "resid_pdrop": 0.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "deepseek_v2": {**WIDE, **LATENT},
    "deepseek_v3": {**WIDE, **LATENT},
    "ernie4_5": HEADS_OF_8,
    "exaone4": {**GROUPED, "sliding_window": 8},
    "falcon": {**TOKENS, **HIDDEN, "alibi": True, "new_decoder_architecture": False, "multi_query": True},
    "falcon_h1": {**GROUPED, **MAMBA_HEADS, "mamba_d_ssm": 64},
    "falcon_mamba": {**TOKENS, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2},
    "gemma": HEADS_OF_8,
    "gemma2": {**HEADS_OF_8, "query_pre_attn_scalar": 8, "sliding_window": 8},
    "gemma3_text": {**HEADS_OF_8, "query_pre_attn_scalar": 8, "sliding_window": 8},
    "glm": {**HEADS_OF_8, **NO_DROPOUT},
    "glm4": {**HEADS_OF_8, **NO_DROPOUT},
    "gpt2": {**GPT, **UNDROPPED},
    "gpt_bigcode": {**GPT, **UNDROPPED},
    "gpt_neo": {
        **{**TOKENS, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64},
        **{"attention_types": [[["global", "local"], 1]], "window_size": 8},
        **{"embed_dropout": 0.0, "attention_dropout": 0.0, "resid_dropout": 0.0},
    },
    "gpt_neox": {**WIDE, **NO_DROPOUT},
    "gpt_neox_japanese": {**WIDE, **NO_DROPOUT},
    "gpt_oss": {**HEADS_OF_8, **EXPERTS, "sliding_window": 8},
    "gptj": {**GPT, **UNDROPPED, "rotary_dim": 4},
    "granite": GROUPED,
    "granitemoe": {**GROUPED, **EXPERTS},
    "helium": HEADS_OF_8,
    "jamba": {
        **{**GROUPED, **MAMBA, "num_experts": 2, "num_experts_per_tok": 1, "use_mamba_kernels": False},
        **{"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    },
    "llama": GROUPED,
    "mamba": {**TOKENS, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2},
    "mamba2": {
        **{**TOKENS, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2},
        **{"num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 8},
    },
    "ministral": {**HEADS_OF_8, "sliding_window": 8},
    "mistral": {**GROUPED, "sliding_window": 8},
    "mixtral": {**GROUPED, **EXPERTS},
    "mixtral_router": {**GROUPED, **EXPERTS, **ROUTER, "model_type": "mixtral"},
    "moshi": {**HEADS_OF_8, "ffn_dim": 64},
    "mpt": {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
    "nemotron": HEADS_OF_8,
    "olmo": GROUPED,
    "olmo2": GROUPED,
    "olmoe": {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2},
    "openai-gpt": {**GPT, **UNDROPPED},
    "opt": {
        **{**TOKENS, **HIDDEN, "ffn_dim": 64, "word_embed_proj_dim": 16, "max_position_embeddings": 64},
        **{"dropout": 0.0, "layerdrop": 0.0},
    },
    "persimmon": {**WIDE, **NO_DROPOUT},
    "phi": WIDE,
    "phi3": {**GROUPED, "resid_pdrop": 0.0},
    "phimoe": {**GROUPED, **EXPERTS, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    "qwen2": {**GROUPED, "tie_word_embeddings": True},
    "qwen2_moe": {**GROUPED, **QWEN_EXPERTS},
    "qwen3": {**HEADS_OF_8, "tie_word_embeddings": True},
    "qwen3_moe": {**HEADS_OF_8, **QWEN_EXPERTS},
    "qwen3_moe_router": {**HEADS_OF_8, **QWEN_EXPERTS, **ROUTER, "model_type": "qwen3_moe"},
    "recurrent_gemma": {**HEADS_OF_8, "lru_width": 32, "attention_window_size": 8, "num_hidden_layers": 3},
    "rwkv": {**TOKENS, "hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2, "context_length": 64},
    "seed_oss": {**HEADS_OF_8, "attention_dropout": 0.0, "residual_dropout": 0.0},
    "smollm3": GROUPED,
    "stablelm": {**GROUPED, **NO_DROPOUT},
    "starcoder2": {**GROUPED, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    "xglm": {
        **{**TOKENS, "d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4},
        **{"max_position_embeddings": 64, "dropout": 0.0, "attention_dropout": 0.0, "layerdrop": 0.0},
    },
    "zamba2": {
        **{
            **GROUPED,
            "mamba_d_state": 8,
            "n_mamba_heads": 4,
            "mamba_headdim": 16,
            "chunk_size": 8,
            "num_mem_blocks": 1,
        },
        **{"layers_block_type": ["mamba", "hybrid"], "layer_types": ["mamba", "hybrid"]},
    },
}
"""Small configurations of causal LMs by ``model_type``, without dropout, whose masks differ between the workers."""

STRATEGIES: dict[str, tuple[str, ...]] = {
    "ddp": ("strategy=ddp",),
    "full_shard": ("sharding=full_shard",),
    "hybrid_shard": ("sharding=hybrid_shard", "fsdp.replicas=2"),
    "zero1": ("zero_stage=1",),
    "zero2": ("zero_stage=2",),
    "zero3": ("zero_stage=3",),
}
"""The strategies of a model, each on two workers."""

IN_TURN = ("hybrid_shard", "zero1", "zero2")
"""Strategies of which each architecture is trained with one. Their parts are those of the others."""


def cells_of(kind: str) -> frozenset[str]:
    """Return the strategies with which the tests train an architecture."""
    left_out = {*IN_TURN} - {IN_TURN[list(CAUSAL).index(kind) % len(IN_TURN)]}
    return frozenset(STRATEGIES) - left_out


COMMON = (
    *("dataset=synthetic", "dataset._target_=zoo_ranks.load", "dataset.train_size=16", "dataset.eval_size=4"),
    *("dataset.max_length=24", "train.micro_batch_size=2", "train.max_steps=3", "train.num_epochs=2"),
    *("train.log_every=1", "train.learning_rate=1e-3", "train.measure_after_step=1", "train.save_model=false"),
    "cluster.device=cpu",
)
TRUSTED = "trusted_packages=[zoo_ranks,odd_models]"


def hugging_face(folder: Path, kind: str) -> tuple[str, ...]:
    """Write the ``config.json`` of a small causal LM; return the overrides that train it with random weights."""
    return ("model=hf", f"model.name={write_config(folder, kind)}", "model.init=random", "model.tokenizer=byte")


def write_config(folder: Path, kind: str) -> Path:
    """Write the ``config.json`` of a small causal LM into a folder of its own."""
    path = folder / "configs" / kind
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"model_type": kind, **CAUSAL[kind]}))
    return path


def train_all(folder: Path, *cells: Any) -> None:
    """Write cells with ``write_cells``, which takes the arguments, and train them."""
    write_cells(folder, *cells)
    train_written(folder)


def write_cells(
    folder: Path,
    base: Sequence[str],
    models: Mapping[str, Mapping[str, Any]],
    cells: Mapping[str, tuple[str, ...]],
    chosen: Callable[[str], Iterable[str]] | None = None,
) -> None:
    """Write the runs of each model on one worker and, in each cell, on two or its own number.

    All have the same global batch. A model has values of keys, which are set in the configuration that the overrides
    ``base`` and those of a cell give. It is trained in the ``chosen`` cells, or in all.
    """
    single = ("strategy=single", "cluster.workers_per_node=1")
    for cell, strategy in {SINGLE: single, **cells}.items():
        spec = make_spec(*base, *COMMON, TRUSTED, "cluster.workers_per_node=2", *strategy)
        spec.config.train.gradient_accumulation_steps = 4 // spec.config.data_parallel
        for name, values in models.items():
            if chosen is not None and cell not in {SINGLE, *chosen(name)}:
                continue
            run = folder / f"{name}-{spec.world_size}" / cell
            run.mkdir(parents=True)
            own = copy.deepcopy(spec)
            for key, value in values.items():
                set_value(own.config, key, value)
            own.write(run)


def train_written(folder: Path) -> None:
    """Train all cells that were written below a folder. They are forks of one process that has the libraries."""
    done = run_module("tests.helpers.zoo_ranks", str(folder), timeout=2 * TIMEOUT_S, env=RANKS)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


SINGLE = "single"
"""Name of the cell whose losses the others must have."""


def outcomes(folder: Path, name: str) -> dict[str, float | str]:
    """Return the largest difference from ``single``, or the error, by the cell of a model.

    It is that of a loss, or of the logarithm of a gradient norm, which is its relative difference.
    """
    expected = read_outcome(folder / f"{name}-1" / SINGLE)
    assert isinstance(expected, list), expected
    found: dict[str, float | str] = {}
    for run in sorted(folder.glob(f"{name}-[248]/*")):
        if run.is_dir():
            losses = read_outcome(run)
            pairs = zip(losses, expected, strict=True)
            found[run.name] = losses if isinstance(losses, str) else max(abs(one - other) for one, other in pairs)
    return found


def check_outcomes(folder: Path, name: str, *cells: str, bound: float = 1e-5) -> None:
    """Check that a model trained in exactly these cells, with no difference from ``single`` above a bound."""
    found = outcomes(folder, name)
    assert found.keys() == {*cells}
    for cell, outcome in found.items():
        assert isinstance(outcome, float), (name, cell, outcome)
        assert outcome < bound, (name, cell)


Variants = Mapping[str, Mapping[str, Any]]
"""Values of keys by the name of a variant of a model."""


class Halves:
    """The variants of models: those that the slow tests train, and the others, which are left to a release."""

    def __init__(self, models: Mapping[str, Variants], slow: Mapping[str, Sequence[str]]) -> None:
        self._models, self._slow = models, slow

    def cases(self, *models: str) -> list[Any]:
        """Return model and names for tests of some models, with their marks."""
        found = [(model, half, tuple(self.variants(model, half))) for model in models for half in ("slow", "release")]
        return [
            pytest.param(model, names, id=f"{model}-{half}", marks=getattr(pytest.mark, half))
            for model, half, names in found
            if names
        ]

    def variants(self, model: str, half: str) -> Variants:
        """Return the variants of a half."""
        return {name: values for name, values in self._models[model].items() if self.half(model, name) == half}

    def half(self, model: str, name: str) -> str:
        """Return the half of a variant."""
        return "slow" if name in self._slow.get(model, ()) else "release"

    def runs(
        self, make_folder: Callable[[str], Path], write: Callable[[Path, str, Variants], None]
    ) -> Callable[[str, str], Path]:
        """Return a function that trains a variant with all others of its half, and returns the folder of its model.

        ``write`` writes the runs of variants of a model below a folder.
        """

        @cache
        def train(half: str) -> Path:
            root = make_folder(half)
            for model in self._models:
                if variants := self.variants(model, half):
                    write(root / model, model, variants)
            train_written(root)
            return root

        return lambda model, name: train(self.half(model, name)) / model


def check_types(folder: Path, kinds: Sequence[str], cells: Mapping[str, tuple[str, ...]], *overrides: str) -> None:
    """Train each type of transformers in cells, and check that no difference from ``single`` is above the bound."""
    models = {kind: {"model.name": str(write_config(folder, kind))} for kind in kinds}
    train_all(folder, (*hugging_face(folder / "base", kinds[0]), *overrides), models, cells)
    for kind in models:
        check_outcomes(folder, kind, *cells)


def read_outcome(run: Path) -> list[float] | str:
    """Return the losses of the steps and evaluations and the logarithms of the norms of a run, or its error."""
    error = run / "error.txt"
    if error.exists():
        return error.read_text()
    lines = read_lines(run / "metrics.jsonl")
    trained = [line[key] for key in ("loss", "router_loss") for line in lines if key in line]
    trained += [math.log(line["grad_norm"]) for line in lines]  # so that differences are relative
    return [*trained, *RunRecord.read(run / RECORD).metrics.eval_losses]
