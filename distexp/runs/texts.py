"""Sentences about a record: why a run failed, what was in memory, slow ranks, and its model."""

import builtins
import errno
import os
import re
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from distexp.exceptions import ConfigError, file_size_hint, memory_limit_hint, text_of
from distexp.runs.record import RunRecord
from distexp.runs.record_sections import RunError
from distexp.runs.run_dir import CHECKPOINTS, DISK_RESERVE, directory_key
from distexp.system.files import FULL, FULL_BYTES, REFUSALS, find_refusal, free_bytes, lacks_inodes
from distexp.system.typed_values import number_of, texts_of

NOT_WRITABLE = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
"""Numbers of the errors of a folder that the user must not write."""


def is_full_disk(error: BaseException, *, by_number: bool = False) -> bool:
    """Return whether an error states that a file system refuses to write: full, quota, size of a file, read-only.

    ``by_number`` ignores texts without the number of a system error, which custom code may use for something else.
    """
    return (_number_of(error) in REFUSALS) if by_number else refusal_number(error) is not None


def _number_of(error: BaseException) -> int | None:
    """Return the number of an error of the system. One of a data loader process only has a message."""
    if not isinstance(error, OSError):
        return None
    numbers = re.findall(r"\[Errno (\d+)\]", text_of(error))
    return error.errno if error.errno is not None or not numbers else int(numbers[-1])


def refusal_number(error: BaseException) -> int | None:
    """Return the number of the system error with which a file system refused to write; None for another error."""
    number = _number_of(error)
    if number is not None:
        return number if number in REFUSALS else None
    if not is_system_type(type(error).__name__, text_of(error)):
        return None
    # torch, after the system took only a part of a checkpoint
    if "unexpected pos " in text_of(error) and resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
        return errno.EFBIG
    return next((number for number in REFUSALS if os.strerror(number) in text_of(error)), None)


LOST_WRITE = re.compile(r"iostream error|PytorchStreamWriter failed|unexpected pos ")
"""Errors of torch that could not write a file. They have neither the number of the system's error nor the file."""


def explain_lost_write(error: BaseException, run_dir: Path) -> BaseException:
    """Return why torch could not write a file of a checkpoint; another error as it is.

    The system may refuse a small file next to it with a number. If it does not, the message gets the folder.
    """
    if not LOST_WRITE.search(text_of(error)) or type(error) is not RuntimeError or is_full_disk(error):
        return error
    folder = next((run_dir / CHECKPOINTS).glob(".step-*.tmp"), run_dir)
    if refusal := find_refusal(folder):
        return refusal
    reason = f"torch could not write a file in {folder}: check the quota of its disk, and how much is free"
    return RuntimeError(f"{reason} ({text_of(error)})")


def full_disk_error(
    error: BaseException, run_dir: Path, phase: str, rank: int | None = None, place: str | None = None
) -> RunError:
    """Return the error for the record of a run that ended because a file system refused to write.

    ``place`` is the line of custom code that the error came through. It may write to any disk.
    """
    # A ConfigError already names its folder, such as that of the cache, and the hint.
    message = str(error) if isinstance(error, ConfigError) else _full_disk_message(error, run_dir, phase, place)
    return RunError("DiskFull", message, phase, rank, place=place)


def _full_disk_message(error: BaseException, run_dir: Path, phase: str, place: str | None) -> str:
    named = error.filename if isinstance(error, OSError) else None
    folder = run_dir if named is None else Path(os.fsdecode(named)).parent
    written = f"the folder that {place} writes to" if place and named is None else folder
    elsewhere = f"start again on another disk with {directory_key(run_dir)}"
    number = refusal_number(error) or errno.ENOSPC
    if number == errno.EFBIG:
        largest = f"a file in {written} would exceed the largest size of a file"
        limit = file_size_hint()
        return f"{largest}: {limit}" if limit else f"{largest} on its disk: {elsewhere}"
    if number == errno.EROFS:
        return f"the disk of {written} can no longer be written (read-only file system): {elsewhere}"
    if number == errno.ENOSPC and lacks_inodes(folder):
        return f"the disk of {folder} has no inodes left, so it takes no new file: delete files, or {elsewhere}"
    free = 0
    with suppress(OSError):
        free = free_bytes(folder)
    has_room = number == errno.ENOSPC and named is None and free >= FULL_BYTES
    if has_room and phase != "save":
        return (
            f"a disk is full, but not that of {run_dir} ({free // 2**20:,} MiB free): make room in "
            f"{tempfile.gettempdir()}, in /dev/shm and in the folders of caches"
            + (f", or where {place} writes" if place else "")
        )
    if number == errno.EDQUOT:
        return f"the disk quota of {written} is exhausted: make room, or {elsewhere}"
    # A run saves to its own disk. The libraries do not name it, and what they have written is removed at once.
    removed = " after the incomplete files were removed" if has_room else ""
    other = f" or of {written}" if has_room and place else ""
    return f"the disk of {folder}{other} is full ({free // 1024:,} KiB free{removed}): make room, or {elsewhere}"


def describe_disk_error(error: OSError) -> str:
    """Return why the files of a report cannot be written, and what to do."""
    reason = error.strerror or str(error)
    if error.errno in NOT_WRITABLE:
        return f"{reason}. Copy the folder to a place that you can write, and give that folder"
    if limit := file_size_hint(error.errno):
        return f"{reason}: {limit}"
    if is_full_disk(error):
        return f"{os.strerror(error.errno or errno.ENOSPC)}. Free space and repeat the command"
    return reason


@contextmanager
def name_folder(folder: Path) -> Iterator[None]:
    """Add the folder to the errors of a full disk in the block that name no file."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL and error.filename is None:
            error.filename = str(folder)
        raise


def release_reserve(run_dir: Path) -> None:
    """Delete the files that keep space for the end of a run."""
    shutil.rmtree(run_dir / DISK_RESERVE, ignore_errors=True)


def write_despite_full_disk(run_dir: Path, write: Callable[[], None]) -> None:
    """Write a file of a run. If the disk is full, release the reserve and write again."""
    try:
        write()
    except OSError as error:
        if error.errno not in FULL:
            raise
        release_reserve(run_dir)
        write()


def print_despite_full_disk(text: str) -> None:
    """Print a line to stderr, unless it is on a full disk: ``print`` would fail again when the process ends."""
    with suppress(OSError):
        os.write(2, f"{text}\n".encode())


MAX_MESSAGE = 300
"""Characters of an error message on the screen. The record and the log have the whole message."""

TORCH_CHECK = re.compile(r"\[enforce fail at [^\]]*\]\s*(?:err == 0)?\.?\s*")
"""Source line of a check of torch, at the start of its message."""


def join_errors(errors: Iterable[str]) -> str:
    """Join the errors of an invalid cell."""
    return " | ".join(errors)


def failure_text(record: RunRecord) -> str:
    """Return why a run failed: ``ValueError in phase train: bad value``; empty if the record has no error.

    The message of an invalid run is returned as it is, and a message of a library is shortened.
    """
    error = record.error
    if error is None:
        return ""
    if record.status == "invalid":
        return error.message
    phase = f" in phase {error.phase}" if error.phase else ""
    place = f" at {error.place}" if error.place else ""
    return f"{error.type}{phase}{place}: {shorten_message(error)}"


def shorten_message(error: RunError, limit: int = MAX_MESSAGE) -> str:
    """Return the first meaningful line of an error message, and of a traceback in it the error at its end.

    A ConfigError is a list of short messages already.
    """
    lines = [line.rstrip() for line in error.message.splitlines() if line.strip()]
    starts = [position for position, line in enumerate(lines) if "Traceback (most recent call last)" in line]
    if starts:
        inner = [line for line in lines[starts[-1] + 1 :] if not line.startswith(" ")]
        text = _first_statement(inner or lines)
        # Leave out the module, and a class that the record names.
        if found := re.fullmatch(r"(?:\w+\.)*(\w+): (.+)", text):
            text = found[2] if found[1] == error.type else f"{found[1]}: {found[2]}"
    elif error.type == "ConfigError":
        return error.message
    else:
        text = _first_statement(lines)
    text = TORCH_CHECK.sub("", text)
    return text if len(text) <= limit else f"{text[: limit - 1].rpartition(' ')[0] or text[: limit - 1]}…"


def _first_statement(lines: Sequence[str]) -> str:
    """Return the first line. If it ends with a colon, the lines that it announces follow up to the next full line."""
    taken = list(lines[:1])
    for line in lines[1:]:
        if not taken[-1].endswith(":"):
            break
        taken.append(line.strip())
    return " ".join(taken)


MAX_TENSORS = 3

GPU_IS_FULL = re.compile(
    r"OutOfMemoryError|Tried to allocate|STATUS_ALLOC_FAILED|(?i:(cuda|nccl|hip)\b[^\n]*out of memory)"
)
"""Texts of torch's allocator, also inside of an error of its compiler; of cuBLAS and cuDNN; and of CUDA and NCCL."""

HOST_IS_FULL = re.compile(
    r"MemoryError|std::bad_alloc|\[Errno 12\]|Memory allocation still failed|"
    r"(?i:(can't|cannot) allocate memory(?! in static TLS)|out of memory)"
)

SYSTEM_ERRORS = (MemoryError, OSError, RuntimeError, SystemError, ImportError)
"""Types with which Python and the libraries pass on an error of the system."""

INNER_TYPE = {"ConfigError": r"\braised (\w+)", "WorkerDied": r"^(?:\w+\.)*(\w+)(?:: |$)"}
"""Patterns of the type of an error that the message of another one names: of custom code, and of a printed error."""


def is_system_type(error_type: str, message: str = "") -> bool:
    """Return whether an error of this type may be one of the system. ValueError, KeyError and the like never are."""
    pattern = INNER_TYPE.get(error_type)
    if pattern and (found := re.search(pattern, message)):
        error_type = found[1]
    kind = getattr(builtins, error_type, Exception)  # Libraries also raise Exception itself.
    return kind is Exception or not isinstance(kind, type) or issubclass(kind, SYSTEM_ERRORS)


def out_of_memory_status(error_type: str, message: str) -> str | None:
    """Return ``oom_gpu`` or ``oom_host`` for an error that means that memory is full; None for another error."""
    if not is_system_type(error_type, message):
        return None
    text = f"{error_type}: {message}"
    if GPU_IS_FULL.search(text):
        return "oom_gpu"
    # A library can also not be mapped from a file system that is mounted with noexec.
    is_unmapped = "failed to map segment" in text and bool(memory_limit_hint())
    return "oom_host" if is_unmapped or HOST_IS_FULL.search(text) else None


def memory_lines(memory: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield name and text of the numbers, the parts, the largest tensors, and what would fit or the command for it.

    For example ``2,048 MiB requested at x.py:3 in forward, 500 of 81,559 MiB free, ...``, and of the tensors
    ``2 x 960 MiB x.py:3 in forward, 980 MiB lm_head.weight (parameters)``.
    """
    place = f" at {memory['line']}" if memory.get("line") else ""
    requested, free, total, allocated, reserved = (
        _format_mib(memory, f"{name}_mib") for name in ("requested", "free", "total", "allocated", "reserved")
    )
    numbers = f"{requested} MiB requested{place}, {free} of {total} MiB free, {allocated} allocated by torch"
    yield "GPU memory", f"{numbers}, {reserved} reserved"
    parts, listed, changes = memory.get("parts"), memory.get("largest"), memory.get("would_fit")
    sizes_mib = {key: number_of(parts, key) for key in parts} if isinstance(parts, dict) else {}
    known_mib = {key: mib for key, mib in sizes_mib.items() if mib is not None}
    if largest_first := sorted(known_mib, key=lambda key: -known_mib[key]):
        yield "in memory", ", ".join(f"{_part_title(key)} {known_mib[key]:,.0f}" for key in largest_first)
    tensors = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    if tensors:
        yield "largest", ", ".join(map(_describe_tensor, tensors[:MAX_TENSORS]))
    if isinstance(changes, list) and changes:
        yield "would fit", f"{' '.join(map(str, changes))} (predicted before)"
    elif memory.get("command"):
        yield "would fit", f"type {memory['command']}"


def _describe_tensor(entry: Mapping[str, Any]) -> str:
    count, part = entry.get("count"), entry.get("part")
    times = f"{count} x " if isinstance(count, int) and count > 1 else ""
    label = f" ({str(part).replace('_', ' ')})" if part and part not in ("unknown", "rest") else ""
    return f"{times}{_format_mib(entry, 'mib')} MiB {entry.get('line') or 'without a name'}{label}"


def _part_title(key: str) -> str:
    """Return the title of a key of ``parts``, as in ``optimizer states`` for ``optimizer_states_mib``."""
    part = key.removesuffix("_mib").replace("_", " ")
    return "activations and temporaries" if part == "rest" else part


def _format_mib(entry: Mapping[str, Any], key: str) -> str:
    mib = number_of(entry, key)
    return "unknown" if mib is None else f"{mib:,.0f}"


def describe_straggler(entry: Mapping[str, Any]) -> str:
    """Return an entry of ``metrics.stragglers`` as a sentence without its period.

    For example: ``Rank 3 (GPU 3 of node07) is 12% slower: its SM clock is 1,200 MHz, that of the others 1,755 MHz``.
    """
    gpu, host, slower_pct = entry.get("gpu"), entry.get("host"), number_of(entry, "slower_by_pct")
    place = " of ".join(filter(None, [None if gpu is None else f"GPU {gpu}", None if host is None else str(host)]))
    text = f"Rank {entry.get('rank')}" + (f" ({place})" if place else "")
    if slower_pct is None:
        text += " has a problem"
    else:
        text += f" is {'up to ' if entry.get('is_upper_bound') is True else ''}{slower_pct:.0f}% slower"
    evidence = "; ".join(texts_of(entry, "evidence"))
    return f"{text}: {evidence}" if evidence else text


def missing_costs(record: RunRecord) -> Iterator[str]:
    """Yield why a run has no price or no CO2e, although the user set what they are computed from."""
    if record.built is None:
        return
    cluster, energy = record.config.get("cluster") or {}, record.metrics.energy or {}
    on_cpu = cluster.get("device") == "cpu"
    if on_cpu and cluster.get("price_per_gpu_hour") is not None:
        yield "no price: cluster.price_per_gpu_hour is for GPUs, and the run used CPUs"
    if cluster.get("gco2_per_kwh") is not None and energy.get("co2e_g") is None:
        device = "CPUs (RAPL; on most systems only root can read it)" if on_cpu else "GPUs (NVML)"
        is_off = (record.config.get("measure") or {}).get("enabled") is False
        yield f"no CO2e: {'measure.enabled=false' if is_off else f'the energy of the {device} is unknown'}"


STAND_IN = "stand-in for"


def model_label(name: str, scale: str) -> str:
    """Return the end of a model's name or folder; ``tiny stand-in for bloom_560m`` if its sizes were made small."""
    short = Path(name).name if Path(name).is_absolute() else name
    return short if scale == "full" or short.endswith(f"_{scale}") else f"{scale} {STAND_IN} {short}"


def record_model_label(record: RunRecord) -> str:
    """Return the label of a record's model; see ``model_label``."""
    scale = (record.config.get("scale") or {}).get("name") or "full"
    return model_label(str(record.config["model"]["name"]), scale)
