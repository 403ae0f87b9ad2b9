"""Whether an adapter may be served: what an engine would stumble over is found before any replica sees it.

What vLLM refuses or ignores is taken from its ``lora/peft_helper.py`` and ``lora/worker_manager.py``
(0.32), which would say so in the middle of an engine's step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from policy.errors import AdapterRefused
from store.adapters.tensors import Tensor, is_finite, tensors

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
FILES = (CONFIG, WEIGHTS)
PICKLES = frozenset({".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"})
MAX_CONFIG_BYTES = 1024 * 1024
# What changes the meaning of the weights and no engine of ours implements, when it is set.
UNSUPPORTED = (
    "modules_to_save", "lora_bias", "layer_replication", "use_qalora", "use_bdlora", "alora_invocation_tokens",
    "target_parameters", "fan_in_fan_out", "trainable_token_indices", "megatron_config", "arrow_config",
)  # fmt: skip
# Ways to start a training that leave a plain adapter behind; the others change the base model's weights.
PLAIN_STARTS = frozenset({"gaussian", "eva", "orthogonal", "mica", "lora_ga"})
FLOATS = frozenset({"F16", "BF16", "F32"})
# Engines keep these in tables of their own.
NOT_LINEAR = frozenset({"embed_tokens", "lm_head", "wte", "wpe"})
_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
# Without repetitions: a pattern comes from outside, and some take for ever to match.
_PLAIN = re.compile(r"\^?[A-Za-z0-9_.]+\$?")
_LAYER = re.compile(r"(?:^|\.)(layers|h|blocks)\.\d+\..*")


class Limits(NamedTuple):
    """The largest rank, and how many bytes the files may have together."""

    max_rank: int
    max_bytes: int


class Facts(NamedTuple):
    """What is worth knowing of an adapter that was admitted: its rank, and the bytes of its files."""

    rank: int
    size: int


class Base:
    """The linear modules of a base model and their shapes, [outputs, inputs]."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._linear = {
            name.removesuffix(".weight"): shape
            for name, shape in shapes.items()
            if name.endswith(".weight") and len(shape) == 2
        }
        # A checkpoint may call the trunk otherwise than the model's classes do; its layers are called alike.
        self._tails = {tail: shape for name, shape in self._linear.items() if (tail := _tail(name))}

    @classmethod
    def of(cls, directory: Path) -> Base:
        """The model in ``directory``; raises :class:`policy.errors.AdapterRefused` if it cannot be read."""
        shapes: dict[str, tuple[int, ...]] = {}
        for file in sorted(directory.glob("*.safetensors")):
            shapes |= {name: tensor.shape for name, tensor in tensors(file).items()}
        return cls(shapes)

    def shape(self, module: str) -> tuple[int, ...] | None:
        """The shape of a module's weight, ``None`` where there is no such."""
        found = self._linear.get(module)
        return found if found is not None else self._tails.get(_tail(module))

    def has(self, ending: str) -> bool:
        """Whether the name of a linear module ends so."""
        return any(name == ending or name.endswith("." + ending) for name in self._linear)


def admit(
    directory: Path, base: Base | None, limits: Limits, progress: Callable[[float], None] = lambda part: None
) -> Facts:
    """Check the adapter in ``directory``, whose files nobody else may change any more.

    Without a ``base`` (the simulated engine has no weights) its modules are not compared. ``progress`` is told
    the fraction of the numbers that were looked at. Raises :class:`policy.errors.AdapterRefused`.
    """
    size = _sizes(directory, limits.max_bytes)
    config = _config(directory / CONFIG)
    rank = _check_config(config, limits.max_rank)
    found = tensors(directory / WEIGHTS)
    pairs = _pairs(found)
    targets = config.get("target_modules")
    if base is not None and isinstance(targets, list):
        for target in targets:
            if not isinstance(target, str) or not base.has(target):
                raise AdapterRefused(
                    "target_module", f"target_modules has {target!r}, which the base model lacks"
                )
    for module, (down, up) in pairs.items():
        _check_pair(module, down, up, _rank_of(module, config, rank), base)
    _check_numbers(directory / WEIGHTS, found, progress)
    return Facts(max([rank, *_patterns(config).values()]), size)


def _sizes(directory: Path, most: int) -> int:
    names = {path.name for path in directory.iterdir()}
    if missing := [name for name in FILES if name not in names]:
        if WEIGHTS in missing and (pickles := [name for name in names if Path(name).suffix in PICKLES]):
            raise AdapterRefused(
                "pickle",
                f"the weights are a pickle, which can run code ({sorted(pickles)[0]}); expected {WEIGHTS}",
            )
        raise AdapterRefused("not_an_adapter", f"there is no {missing[0]}; expected {' and '.join(FILES)}")
    size = sum((directory / name).stat().st_size for name in FILES)
    if size > most:
        raise AdapterRefused("too_large", f"its files have {size} bytes; expected at most {most}")
    return size


def _config(path: Path) -> dict[str, Any]:
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise AdapterRefused("config_unreadable", f"{CONFIG} has more than {MAX_CONFIG_BYTES} bytes")
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (ValueError, RecursionError) as error:
        raise AdapterRefused("config_unreadable", f"{CONFIG} is no JSON object: {error}") from None


def _check_config(config: dict[str, Any], max_rank: int) -> int:
    """Refuse what would be served wrongly; returns the rank."""
    if str(config.get("peft_type", "")).upper() != "LORA":
        raise AdapterRefused("not_lora", f"peft_type is {config.get('peft_type')!r}; expected 'LORA'")
    if config.get("use_dora"):
        raise AdapterRefused("dora", "use_dora is set; the engine serves plain LoRA alone")
    for key in UNSUPPORTED:
        if config.get(key):
            raise AdapterRefused(
                "unsupported_feature", f"{key} is {config[key]!r:.100}; the engine has no such"
            )
    if config.get("bias", "none") != "none":
        raise AdapterRefused("unsupported_feature", f"bias is {config['bias']!r}; expected 'none'")
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower() not in PLAIN_STARTS:
        raise AdapterRefused(
            "unsupported_feature", f"init_lora_weights is {start!r}, which changes the base model's weights"
        )
    if not _positive(config.get("lora_alpha")):
        raise AdapterRefused(
            "config_unreadable", f"lora_alpha is {config.get('lora_alpha')!r}; expected a number"
        )
    if not isinstance(config.get("target_modules"), list | str):
        raise AdapterRefused(
            "config_unreadable", "target_modules is missing; expected a list of module names"
        )
    rank = config.get("r")
    for value in (rank, *_patterns(config).values()):
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= max_rank:
            raise AdapterRefused("rank", f"the rank is {value!r}; expected 1 to {max_rank}")
    assert isinstance(rank, int)
    return rank


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e9


def _patterns(config: dict[str, Any]) -> dict[str, Any]:
    found = config.get("rank_pattern") or {}
    if not isinstance(found, dict):
        raise AdapterRefused("config_unreadable", "rank_pattern is no mapping of module names to ranks")
    return found


def _rank_of(module: str, config: dict[str, Any], rank: int) -> int:
    """The rank of ``module``: a pattern matches the end of its name, as PEFT has it, the first one wins."""
    for pattern, value in _patterns(config).items():
        if _PLAIN.fullmatch(pattern) is None:
            raise AdapterRefused("unsupported_feature", f"rank_pattern has {pattern!r:.80}, more than a name")
        if re.match(rf"(.*\.)?({pattern})$", module):
            return int(value)
    return rank


def _pairs(found: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """The two halves of each module; nothing else may be there."""
    sides: dict[str, dict[str, Tensor]] = {}
    for name, tensor in found.items():
        if "lora_magnitude_vector" in name:
            raise AdapterRefused("dora", f"{name:.200} belongs to DoRA; the engine serves plain LoRA alone")
        match = _NAME.fullmatch(name)
        if match is None:
            raise AdapterRefused("unsupported_feature", f"{name:.200} is no half of a LoRA module")
        if tensor.dtype not in FLOATS:
            raise AdapterRefused("unsupported_feature", f"{name:.200} has the type {tensor.dtype}")
        sides.setdefault(match["module"], {})[match["side"]] = tensor
    if not sides:
        raise AdapterRefused("tensor_missing", f"{WEIGHTS} holds no tensors")
    for module, halves in sides.items():
        if len(halves) < 2:
            lacking = "A" if "B" in halves else "B"
            raise AdapterRefused("tensor_missing", f"{module:.200} has no lora_{lacking}")
    return {module: (halves["A"], halves["B"]) for module, halves in sides.items()}


def _check_pair(module: str, down: Tensor, up: Tensor, rank: int, base: Base | None) -> None:
    if module.rpartition(".")[2] in NOT_LINEAR:
        raise AdapterRefused("target_module", f"{module:.200} is a table of tokens; expected linear modules")
    if len(down.shape) != 2 or len(up.shape) != 2 or (down.shape[0], up.shape[1]) != (rank, rank):
        raise AdapterRefused(
            "tensor_shape", f"{module:.200} has {down.shape} and {up.shape}; expected the rank {rank} in both"
        )
    if base is None:
        return
    shape = base.shape(module)
    if shape is None:
        raise AdapterRefused("base_model", f"the base model has no linear module {module:.200}")
    if (up.shape[0], down.shape[1]) != shape:
        raise AdapterRefused(
            "tensor_shape",
            f"{module:.200} adapts {(up.shape[0], down.shape[1])}; the base model's is {shape}",
        )


def _check_numbers(path: Path, found: Mapping[str, Tensor], progress: Callable[[float], None]) -> None:
    whole = sum(tensor.end - tensor.begin for tensor in found.values()) or 1
    seen = 0
    for name, tensor in found.items():
        if not is_finite(path, tensor):
            raise AdapterRefused("not_finite", f"{name:.200} holds numbers that are none (NaN or infinite)")
        seen += tensor.end - tensor.begin
        progress(seen / whole)


def _tail(module: str) -> str:
    match = _LAYER.search(module)
    return match.group().lstrip(".") if match else ""
