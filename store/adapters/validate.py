"""Validation of an adapter: everything that an engine would refuse or serve wrongly is refused on import.

The rules follow vLLM's ``lora/peft_helper.py``, ``lora/lora_model.py`` and ``lora/utils.py`` (0.32), which
would raise in the middle of an engine's step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import msgspec

from policy.errors import AdapterRefused
from store.adapters import CONFIG, FILES, WEIGHTS
from store.adapters.base_model_shapes import BaseModelShapes
from store.adapters.tensors import Tensor, is_finite, tensors
from store.model_weights.package_source import PICKLES

_unsupported = partial(AdapterRefused, "unsupported_feature")
_unreadable = partial(AdapterRefused, "config_unreadable")
_wrong_target = partial(AdapterRefused, "target_module")
_wrong_shape = partial(AdapterRefused, "tensor_shape")
MAX_CONFIG_BYTES = 1024 * 1024
# Maximum number of patterns; each is matched with every module.
MAX_PATTERNS = 512
# Options that change the meaning of the weights and that engines do not implement.
UNSUPPORTED = (
    "modules_to_save", "lora_bias", "layer_replication", "use_qalora", "use_bdlora", "target_parameters",
    "alora_invocation_tokens", "fan_in_fan_out", "trainable_token_indices", "megatron_config",
    "arrow_config",
)  # fmt: skip
# Initialisations that result in a plain adapter; others change the base model's weights.
PLAIN_STARTS = frozenset({"gaussian", "eva", "orthogonal", "mica", "lora_ga"})
FLOATS = frozenset({"F16", "BF16", "F32"})
# Engines handle embeddings separately.
NOT_LINEAR = frozenset({"embed_tokens", "lm_head", "wte", "wpe"})
# vLLM removes the prefix anywhere in a name, so that two names could become equal.
_PREFIX = "base_model.model."
_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
# Without repetitions: patterns are untrusted, and some take exponential time.
_PLAIN = re.compile(r"\^?[A-Za-z0-9_.]+\$?")


class ValidationLimits(NamedTuple):
    """The limits of rank and of the sum of file sizes in bytes; ``any_base``: any name of a base is taken."""

    max_rank: int
    max_bytes: int
    any_base: bool = False


class AdapterFacts(NamedTuple):
    """Facts about a valid adapter: its rank, and the size of its files in bytes."""

    rank: int
    size: int


class _Ranks(NamedTuple):
    """The default rank, and the ranks of modules by the end of their names."""

    whole: int
    patterns: Mapping[str, int]

    def of(self, module: str) -> int:
        """The rank of a module, as in PEFT: the first pattern that matches the end of its name."""
        for pattern, rank in self.patterns.items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                return rank
        return self.whole


def validate(
    directory: Path,
    base: BaseModelShapes | None,
    limits: ValidationLimits,
    progress: Callable[[float], None] = lambda part: None,
) -> AdapterFacts:
    """Check the adapter in ``directory``, whose files no other process can change.

    Without a ``base`` (the simulated engine has no weights) modules are not compared. ``progress`` receives
    the fraction of the numbers that were checked. Raises :class:`policy.errors.AdapterRefused` with a code
    of a closed list: those here, in :mod:`store.adapters.tensors` and in the modules that fetch.
    """
    check_names(path.name for path in directory.iterdir())
    size = sum((directory / name).stat().st_size for name in FILES)
    if size > limits.max_bytes:
        raise AdapterRefused("too_large", f"its files have {size} bytes; expected at most {limits.max_bytes}")
    config = _config(directory / CONFIG)
    ranks = _check_config(config, limits.max_rank)
    found = tensors(directory / WEIGHTS)
    pairs = _pairs(found)
    if base is not None:
        if not limits.any_base:
            _check_base(config, base)
        _check_targets(config["target_modules"], base)
    for module, (down, up) in pairs.items():
        _check_pair(module, down, up, ranks.of(module), base)
    _check_numbers(directory / WEIGHTS, found, progress)
    return AdapterFacts(max([ranks.whole, *ranks.patterns.values()]), size)


def check_names(names: Iterable[str]) -> None:
    """Refuse an adapter with these file names if a required file is missing."""
    there = sorted(names)
    missing = [name for name in FILES if name not in there]
    if WEIGHTS in missing and (pickles := [name for name in there if PurePosixPath(name).suffix in PICKLES]):
        raise AdapterRefused(
            "pickle", f"the weights are a pickle, which can run code ({pickles[0]:.100}); expected {WEIGHTS}"
        )
    if missing:
        raise AdapterRefused("not_an_adapter", f"there is no {missing[0]}; expected {' and '.join(FILES)}")


def base_name(directory: Path) -> str:
    """The base model that the adapter in ``directory`` names; empty if it names none."""
    named = _config(directory / CONFIG).get("base_model_name_or_path")
    return named if isinstance(named, str) else ""


def _config(path: Path) -> dict[str, Any]:
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise _unreadable(f"{CONFIG} has more than {MAX_CONFIG_BYTES} bytes")
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (ValueError, RecursionError) as error:
        raise _unreadable(f"{CONFIG} is no JSON object: {error}") from None


def _check_config(config: dict[str, Any], max_rank: int) -> _Ranks:
    """Refuse options that would be served wrongly; the ranks."""
    kind = config.get("peft_type")
    if not isinstance(kind, str) or kind.upper() != "LORA":
        raise AdapterRefused("not_lora", f"peft_type is {kind!r:.100}; expected 'LORA'")
    if config.get("use_dora"):
        raise AdapterRefused("dora", "use_dora is set; the engine serves plain LoRA alone")
    for key in UNSUPPORTED:
        if config.get(key):
            raise _unsupported(f"{key} is {config[key]!r:.100}; the engine has no such")
    if config.get("bias", "none") != "none":
        raise _unsupported(f"bias is {config['bias']!r:.100}; expected 'none'")
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower() not in PLAIN_STARTS:
        raise _unsupported(f"init_lora_weights is {start!r:.100}, which changes the base model's weights")
    targets = config.get("target_modules")
    names = [targets] if isinstance(targets, str) else targets
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _unreadable(f"target_modules is {targets!r:.100}; expected a list of module names")
    for name in names:
        if name.rpartition(".")[2] in NOT_LINEAR:
            raise _wrong_target(f"{name:.200} is a table of tokens; expected linear modules")
    for alpha in (config.get("lora_alpha"), *_patterns(config, "alpha_pattern").values()):
        if not _is_positive(alpha):
            raise _unreadable(f"lora_alpha is {alpha!r:.100}; expected a positive number")
    patterns = _patterns(config, "rank_pattern")
    for rank in (config.get("r"), *patterns.values()):
        if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= max_rank:
            raise AdapterRefused("rank", f"the rank is {rank!r:.100}; expected 1 to {max_rank}")
    return _Ranks(config["r"], patterns)


def _check_base(config: dict[str, Any], base: BaseModelShapes) -> None:
    """Refuse an adapter that was made for another model, even if its shapes fit."""
    named = config.get("base_model_name_or_path")
    if isinstance(named, str) and not base.is_called(named):
        raise AdapterRefused(
            "base_model",
            f"base_model_name_or_path is {named!r:.200}; expected {base.title}, "
            "or --force for an adapter that was made for that model nevertheless",
        )


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e9


def _patterns(config: dict[str, Any], key: str) -> dict[str, Any]:
    """Per-module values by the end of names; other patterns are refused."""
    found = config.get(key) or {}
    if not isinstance(found, dict):
        raise _unreadable(f"{key} is {found!r:.100}; expected a mapping of names")
    if len(found) > MAX_PATTERNS:
        raise _unsupported(f"{key} has more than {MAX_PATTERNS} entries")
    for pattern in found:
        if _PLAIN.fullmatch(pattern) is None:
            raise _unsupported(f"{key} has {pattern!r:.100}; expected a plain name")
    return found


def _pairs(found: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """The A and B tensors of each module; any other tensor is refused."""
    sides: dict[str, dict[str, Tensor]] = {}
    for name, tensor in found.items():
        if "lora_magnitude_vector" in name:
            raise AdapterRefused("dora", f"{name:.200} belongs to DoRA; the engine serves plain LoRA alone")
        match = _NAME.fullmatch(name)
        if match is None or _PREFIX in match["module"]:
            raise _unsupported(f"{name:.200} is no half of a LoRA module")
        if tensor.dtype not in FLOATS:
            expected = ", ".join(sorted(FLOATS))
            raise _unsupported(f"{name:.200} is of {tensor.dtype}; expected one of {expected}")
        sides.setdefault(match["module"], {})[match["side"]] = tensor
    if not sides:
        raise AdapterRefused("tensor_missing", f"{WEIGHTS} holds no tensors")
    for module, halves in sides.items():
        if len(halves) < 2:
            lacking = "A" if "B" in halves else "B"
            raise AdapterRefused("tensor_missing", f"{module:.200} has no lora_{lacking}")
    return {module: (halves["A"], halves["B"]) for module, halves in sides.items()}


def _check_targets(targets: list[str] | str, base: BaseModelShapes) -> None:
    """Check a list of target modules. A pattern (text) is not evaluated: the weights name them."""
    for target in targets if isinstance(targets, list) else ():
        if not base.has(target):
            raise _wrong_target(f"target_modules has {target!r:.200}, which the base model lacks")


def _check_pair(module: str, down: Tensor, up: Tensor, rank: int, base: BaseModelShapes | None) -> None:
    if module.rpartition(".")[2] in NOT_LINEAR:
        raise _wrong_target(f"{module:.200} is a table of tokens; expected linear modules")
    if len(down.shape) != 2 or len(up.shape) != 2 or (down.shape[0], up.shape[1]) != (rank, rank):
        raise _wrong_shape(f"{module:.200} has {down.shape} and {up.shape}; expected the rank {rank} in both")
    if base is None:
        return
    shapes = base.shapes(module)
    if not shapes:
        raise AdapterRefused("base_model", f"the base model has no linear module {module:.200}")
    adapted = (up.shape[0], down.shape[1])
    if adapted not in shapes and None not in shapes:
        expected = " or ".join(map(str, shapes))
        raise _wrong_shape(f"{module:.200} adapts {adapted}; the base model's is {expected}")


def _check_numbers(path: Path, found: Mapping[str, Tensor], progress: Callable[[float], None]) -> None:
    whole = sum(tensor.end - tensor.begin for tensor in found.values()) or 1
    seen = 0
    with path.open("rb") as file:
        for name, tensor in found.items():
            if not is_finite(file, tensor):
                raise AdapterRefused(
                    "not_finite", f"{name:.200} holds numbers that are not finite (NaN or infinite)"
                )
            seen += tensor.end - tensor.begin
            progress(seen / whole)
