"""Loading of checkpoints as data: pickles that would run code, which torch and DeepSpeed would load, are refused."""

import io
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from distexp.exceptions import ConfigError
from distexp.system.environment_variables import variable_set

METADATA_CLASSES = frozenset(
    {
        "collections.OrderedDict",
        "pathlib.PosixPath",
        "pathlib._local.PosixPath",
        "torch.Size",
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.distributed.checkpoint.metadata.BytesStorageMetadata",
        "torch.distributed.checkpoint.metadata.ChunkStorageMetadata",
        "torch.distributed.checkpoint.metadata.Metadata",
        "torch.distributed.checkpoint.metadata.MetadataIndex",
        "torch.distributed.checkpoint.metadata.StorageMeta",
        "torch.distributed.checkpoint.metadata.TensorProperties",
        "torch.distributed.checkpoint.metadata.TensorStorageMetadata",
        "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
        "torch.serialization._get_layout",
    }
)
"""All classes and functions that a metadata file may name, besides the dtypes of torch."""


class DataReader(FileSystemReader):
    """A reader of torch.distributed.checkpoint that refuses metadata with code by ConfigError."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        path = folder / ".metadata"
        with refused_as_config_error(path):
            metadata = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
            if not isinstance(metadata, Metadata):
                raise pickle.UnpicklingError(f"GLOBAL {type(metadata).__name__} is not Metadata")
        self._metadata = metadata

    def read_metadata(self) -> Metadata:
        """Return the metadata. Torch reads files of single ranks only if this method has keyword arguments."""
        return self._metadata


class _MetadataUnpickler(pickle.Unpickler):
    """An unpickler that knows only the classes of metadata."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of metadata. Raise UnpicklingError if the name is another one."""
        full_name = f"{module}.{name}"
        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if is_dtype or full_name in METADATA_CLASSES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"GLOBAL {full_name} is not allowed")


@contextmanager
def weights_only_loading(folder: Path) -> Iterator[None]:
    """Make ``torch.load`` accept only tensors and plain values. Raise ConfigError if a checkpoint has others."""
    with variable_set("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1"), refused_as_config_error(folder):
        yield


@contextmanager
def refused_as_config_error(path: Path) -> Iterator[None]:
    """Raise the refusals of an unpickler as ConfigError."""
    try:
        yield
    except (pickle.UnpicklingError, CheckpointException) as error:
        # torch.distributed.checkpoint wraps the errors of all ranks.
        causes = [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
        refusal = next((cause for cause in causes if isinstance(cause, pickle.UnpicklingError)), None)
        if refusal is None:
            raise
        found = re.search(r"GLOBAL (\S+)", str(refusal))
        name = found[1] if found else f"an invalid pickle ({str(refusal).splitlines()[0]})"
        raise ConfigError(
            f"{path} contains {name}, which is not data and could run code: "
            "use a checkpoint that you or your group wrote"
        ) from None
