"""The names of a base model, its linear modules and their shapes, which adapters are validated against."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from policy.errors import AdapterRefused
from store.adapters.tensors import Tensor, tensors
from store.artifact_manifest import read

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.\d+\..*")
# Packed (quantized) weights: their shapes differ from the module's.
_PACKED_NAMES = (".qweight", ".weight_packed")
_PACKED_TYPES = frozenset({"U8", "I32", "F4"})

# A folder of the Hugging Face cache.
_HUB_CACHE = re.compile(r"models--[^/]+?--(?P<name>[^/]+)/snapshots/")
# At the end of the name of a quantized model, which has the adapters of the original.
_QUANTIZATION = re.compile(
    r"([-_.](unsloth|quantized|dynamic|bnb|awq|gptq|fp8|nvfp4|gguf|hf|[48]bit|int[48]|w[48]a(8|16)"
    r"|i?q\d(_[0-9a-z]+)*))+$"
)
# Llama 3's repositories had it before their names, and copies still do.
_OLD_PREFIX = "meta-"

# [outputs, inputs]; None if unknown from the checkpoint.
TensorShape = tuple[int, int] | None


class BaseModelShapes:
    """The linear modules of a base model by their names in the checkpoint, with shapes.

    ``names`` are those that it is known by, the first of them for people; without any it goes by every name.
    """

    def __init__(self, shapes: Mapping[str, TensorShape], names: Sequence[str] = ()) -> None:
        self.title = next(iter(names), "")
        self._names = frozenset(_comparable(name) for name in names) - {""}
        self._linear = shapes
        # Prefixes of names may differ between checkpoint and model classes; names within layers do not.
        # Two towers of a model share those names, so one name may have several shapes.
        self._tails: dict[str, set[TensorShape]] = {}
        self._endings: set[str] = set()
        for name, shape in shapes.items():
            if tail := _tail(name):
                self._tails.setdefault(tail, set()).add(shape)
            parts = name.split(".")
            self._endings.update(".".join(parts[start:]) for start in range(len(parts)))

    @classmethod
    def of(cls, directory: Path, names: Sequence[str] = ()) -> BaseModelShapes:
        """Read the model in ``directory``, known by ``names``, from the headers of its ``*.safetensors``.

        Raises :class:`policy.errors.AdapterRefused` with the code ``base_model`` if they cannot be.
        """
        shapes: dict[str, TensorShape] = {}
        try:
            for file in sorted(directory.glob("*.safetensors")):
                for name, tensor in tensors(file).items():
                    module, shape = _module(name, tensor)
                    if module:
                        shapes[module] = shape
        except (AdapterRefused, OSError) as error:
            raise AdapterRefused("base_model", f"the base model cannot be read: {error}") from None
        if not shapes:
            raise AdapterRefused("base_model", "the base model has no linear modules in *.safetensors")
        return cls(shapes, (*names, *_own_names(directory)))

    def is_called(self, name: str) -> bool:
        """Whether ``name`` may be one of the model's: a repository, path or package, quantized or not."""
        return not self._names or _comparable(name) in self._names | {""}

    def shapes(self, module: str) -> tuple[TensorShape, ...]:
        """The possible shapes of the module with this name; none if there is no such module."""
        if module in self._linear:
            return (self._linear[module],)
        return tuple(self._tails.get(_tail(module), ()))

    def has(self, ending: str) -> bool:
        """Whether the name of a linear module is ``ending``, or ends with it after a dot."""
        return ending in self._endings or _tail(ending) in self._tails


def _own_names(directory: Path) -> Iterator[str]:
    """The names of the model's folder, and of its package and the file in that."""
    yield str(directory)
    if (manifest := read(directory)) is not None:
        yield manifest.package
        yield manifest.package.removeprefix("llm-")
        yield PurePosixPath(manifest.source_file).stem


def _comparable(name: str) -> str:
    """The last part of ``name`` in lower case, without revision, quantization and punctuation."""
    hub = _HUB_CACHE.search(name)
    last = re.split(r"[/\\]", hub["name"] if hub else name.rstrip("/\\"))[-1]
    last = last.removeprefix("package:").partition("@")[0].partition("==")[0].lower()
    last = last.removeprefix(_OLD_PREFIX)
    return re.sub(r"[^a-z0-9]", "", _QUANTIZATION.sub("", last))


def _module(name: str, tensor: Tensor) -> tuple[str, TensorShape]:
    """The linear module of a weight tensor, and its shape; an empty name for other tensors."""
    for ending in _PACKED_NAMES:
        if name.endswith(ending):
            return name.removesuffix(ending), None
    if not name.endswith(".weight") or len(tensor.shape) != 2:
        return "", None
    packed = tensor.dtype in _PACKED_TYPES
    return name.removesuffix(".weight"), None if packed else (tensor.shape[0], tensor.shape[1])


def _tail(module: str) -> str:
    match = _LAYER.search(module)
    return match.group().lstrip(".") if match else ""
