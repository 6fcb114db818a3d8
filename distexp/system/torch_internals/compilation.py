"""Private APIs of torch.compile and of C++ extensions."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from distexp.system.torch_internals.tensors import explained, private_module, replaced


def on_compilation(start: Callable[[bool], None], end: Callable[[], None]) -> Callable[[], None]:
    """Call functions at the start and the end of each compilation; return a function that ends this.

    ``start`` gets whether the same code was compiled before, for example for another shape.
    """
    with explained("torch._dynamo.callback"):
        from torch._dynamo.callback import CallbackTrigger, callback_handler

        def is_recompilation(event: Any) -> bool:
            number = str(event.compile_id).rpartition("/")[2].partition("_")[0]
            return event.callback_trigger is CallbackTrigger.DYNAMO and int(number) > 0

        started = callback_handler.register_start_callback(lambda event: start(is_recompilation(event)))
        ended = callback_handler.register_end_callback(lambda event: end())

    def remove() -> None:
        callback_handler.remove_start_callback(started)
        callback_handler.remove_end_callback(ended)

    return remove


def compile_counters() -> dict[str, int]:
    """Return the counts of torch.compile in this process."""
    with explained("torch._dynamo.utils.counters"):
        from torch._dynamo.utils import counters

        inductor = counters["inductor"]
        return {
            "graphs": counters["stats"]["unique_graphs"],
            "cache_hits": inductor["fxgraph_cache_hit"],
            "cache_misses": inductor["fxgraph_cache_miss"],
            "cuda_graph_skips": inductor["cudagraph_skips"],
        }


def compiler_settings(module: torch.nn.Module) -> dict[str, Any] | None:
    """Return the settings with which ``forward`` of a module is compiled, possibly inside of a checkpoint.

    None if it is not compiled. The settings are those of inductor, and empty for another backend.
    """
    forward = vars(module).get("forward")
    inner: Any = forward
    while isinstance(inner, partial) and inner.args:
        inner = inner.args[0]
    if not hasattr(inner, "get_compiler_config"):
        return None
    with explained("get_compiler_config of a compiled function"):
        read: Any = inner.get_compiler_config
        return dict(read() or {})


def allow_graphs_per_function(count: int) -> None:
    """Let torch compile a function at least so many times, each for other shapes, before it runs it uncompiled."""
    config = private_module("torch._dynamo.config", "recompile_limit")
    config.recompile_limit = max(config.recompile_limit, count)


def split_graphs_for_ddp(is_split: bool) -> None:
    """Set whether torch splits later graphs where the buckets of DDP end. By default it does.

    A split graph of a whole model lets the reduction of a bucket overlap with the backward pass. The graph of a block
    would be split too, as soon as a block has more parameters than a bucket. Then the backward pass needs more stored
    activations, and no cache keeps the graphs. Blocks need no split, because each has its own backward pass.
    """
    private_module("torch._dynamo.config", "optimize_ddp").optimize_ddp = is_split


def limit_stored_activations(share: float | None) -> None:
    """Set which share of the activations later compiled graphs store; None: what the compiler chooses."""
    config = private_module("torch._functorch.config", "activation_memory_budget")
    config.activation_memory_budget = 1.0 if share is None else share


def read_activation_budget() -> float:
    """Return the share of ``limit_stored_activations``."""
    return float(private_module("torch._functorch.config", "activation_memory_budget").activation_memory_budget)


def cache_autograd_functions() -> None:
    """Let the cache of torch also keep graphs with a ``torch.autograd.Function``, such as the GELU of BLOOM.

    By default each process traces and partitions such a graph again, and only its kernels are from the cache. The keys
    of the cache have the code of both passes of the function, with its constants.
    """
    config = private_module("torch._functorch.config")
    if hasattr(config, "autograd_cache_allow_custom_autograd_functions"):
        config.autograd_cache_allow_custom_autograd_functions = True


def compile_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions of code that does not compile: dynamo's, and those of the backend that it wraps."""
    module = private_module("torch._dynamo.exc", "TorchDynamoException", "FailOnRecompileLimitHit")
    return module.TorchDynamoException, module.FailOnRecompileLimitHit


def import_compiler() -> None:
    """Import inductor, and compute the hashes of the sources of torch and triton, which the compiler keeps.

    This starts no process and no thread, and does not initialize CUDA. So workers can be forked from this process.
    """
    with explained("torch._inductor"):
        import torch._inductor.compile_fx  # noqa: F401
        from torch._inductor.codecache import torch_key
        from torch.utils._triton import has_triton_package

        torch_key()
        if has_triton_package():
            from torch._inductor.runtime.triton_compat import triton_key

            triton_key()


CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""Variable of torch with the folder of compiled code."""


def default_compile_cache() -> str:
    """Return the folder in which inductor keeps compiled code by default. Inductor writes it to the environment."""
    module = private_module("torch._inductor.runtime.cache_dir_utils", "default_cache_dir")
    return str(Path(module.default_cache_dir()).absolute())


def graph_backend(compile_graph: Callable[[torch.fx.GraphModule], Any]) -> Any:
    """Return a backend of ``torch.compile`` that partitions graphs as inductor does, and generates no code.

    ``compile_graph`` returns a function for a forward or backward graph, which takes a list of the graph's inputs.
    """
    with explained("torch._functorch.partitioners, torch._inductor"):
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.partitioners import min_cut_rematerialization_partition
        from torch._guards import detect_fake_mode
        from torch._inductor.decomposition import select_decomp_table
        from torch._inductor.fx_passes.joint_graph import joint_graph_passes
        from torch._inductor.virtualized import V

    def partition(joint: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        with V.set_fake_mode(detect_fake_mode(inputs)):  # The passes create the seeds of random numbers.
            joint_graph_passes(joint)
        return min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **options)

    return aot_autograd(
        fw_compiler=lambda graph, _: compile_graph(graph),
        bw_compiler=lambda graph, _: compile_graph(graph),
        partition_fn=partition,
        decompositions=select_decomp_table,
    )


def flex_attention_on_cpu() -> AbstractContextManager[None]:
    """Let ``flex_attention`` be captured for training on a CPU during the block. Its kernels cannot run there."""
    return replaced("torch.nn.attention.flex_attention", "_validate_device", lambda _: lambda *_: None)


def extension_build_dir(name: str) -> Path:
    """Return the folder in which PyTorch builds a C++ extension; PyTorch creates it."""
    module = private_module("torch.utils.cpp_extension", "_get_build_directory")
    return Path(module._get_build_directory(name, verbose=False))
