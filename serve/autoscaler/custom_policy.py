"""Users' own scaling policies: found, loaded, and isolated from the other policies.

``custom: "module:Class"`` names a module of the Python path, or a file: ``/path/file.py:Class``. The command
line writes the second form if the module is in the folder of the deployment file.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import math
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec

from policy.config.control import Choice
from policy.errors import ConfigError
from policy.hashing import hash_name
from policy.scaling.policies.registry import PolicyChoice
from policy.scaling.view import Policy, Proposal, View

# Maximum duration of a decision. A policy that takes longer is not called again before it has returned.
PATIENCE_S = 1.0

# One for each module: an import that hangs must not keep other policies from being loaded.
_locks: dict[str, threading.Lock] = {}
# Threads that still import or make a policy, by class and parameters.
_loading: dict[tuple[str, str], threading.Thread] = {}
_loaded: dict[tuple[Path, int], Any] = {}
_stamps: dict[str, int] = {}
_decode_proposal = msgspec.json.Decoder(Proposal).decode


def beside(choice: Choice, folder: Path) -> Choice:
    """The choice, with the path of its module if that is in ``folder``, the one of the deployment file."""
    given = choice.get("custom") if isinstance(choice, Mapping) else None
    where = given.get("class") if isinstance(given, Mapping) else given
    if not isinstance(where, str) or where.startswith("/"):
        return choice
    module, colon, name = where.rpartition(":")
    named = Path(module) if module.endswith(".py") else Path(*module.split(".")).with_suffix(".py")
    file = (folder / named.expanduser()).resolve()
    if not colon or not module or not file.is_file():
        return choice
    found = f"{file}:{name}"
    return {"custom": {**given, "class": found} if isinstance(given, Mapping) else found}


def load(chosen: PolicyChoice, path: str) -> Policy:
    """The chosen policy; raises :class:`policy.errors.ConfigError` for ``path``. Not for an event loop."""
    where = chosen.class_path
    module, _, name = where.rpartition(":")
    try:
        found = getattr(_module(module), name, None)
    except (Exception, SystemExit) as error:
        # Any error of a user's module is reported, and must not end this process.
        raise ConfigError(path, where, f"a module that can be imported ({_describe(error)})") from error
    if not isinstance(found, type) or not callable(getattr(found, "decide", None)):
        raise ConfigError(path, where, f"a class {name!r} in {module} with a method decide(view, memory)")
    try:
        made = found(**chosen.arguments)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            path, chosen.arguments, f"parameters that {name} takes ({_describe(error)})"
        ) from error
    return cast(Policy, made)


def load_within(patience_s: float, chosen: PolicyChoice, path: str) -> Policy:
    """As :func:`load`, but refused if that takes longer."""
    found: list[Policy | BaseException] = []

    def run() -> None:
        try:
            found.append(load(chosen, path))
        except BaseException as error:  # noqa: BLE001 - it is raised where the thread is waited for
            found.append(error)

    key = chosen.class_path, repr(chosen.arguments)
    before = _loading.pop(key, None)
    if before is None or not before.is_alive():
        before = threading.Thread(target=run, name="a custom policy is loaded", daemon=True)
        before.start()
    before.join(patience_s)
    if before.is_alive():
        _loading[key] = before
    if not found:
        raise ConfigError(
            path, chosen.class_path, f"a policy that is imported and made within {patience_s:g} s"
        )
    (outcome,) = found
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


@dataclass(eq=False)
class GuardedPolicy:
    """A policy whose failures, and invalid proposals, are events that leave the replica count unchanged.

    A user's policy runs in a thread of its own (``alone``) with a copy of its memory, so that it can neither
    delay the decisions on other models nor change the input that the journal records. It may take
    ``patience_s``.
    """

    policy: Policy
    event: Callable[[str], None]
    alone: bool = False
    patience_s: float = PATIENCE_S
    _running: threading.Thread | None = field(default=None, init=False)
    _error: str = field(default="", init=False)

    @property
    def is_running(self) -> bool:
        """Whether a decision in a thread of its own has not ended."""
        return self._running is not None and self._running.is_alive()

    def decide(self, view: View, memory: Any) -> Proposal:
        """The proposal of the policy, or the present count."""
        proposal, error = self.propose(view, memory)
        if error and error != self._error:
            self.event(f"{view.model}: the policy {type(self.policy).__name__} {error}; the count stays")
        self._error = error
        return proposal or Proposal(count=view.count, reason=f"the policy {error}", memory=memory)

    def propose(self, view: View, memory: Any) -> tuple[Proposal | None, str]:
        """The proposal of the policy, or what is wrong with it."""
        try:
            return _checked(self._call(view, memory) if self.alone else self.policy.decide(view, memory))
        except Exception as raised:  # noqa: BLE001 - no error may stop the control loop
            return None, f"raised {_describe(raised)}{_place(raised, type(self.policy).__module__)}"

    def _call(self, view: View, memory: Any) -> Any:
        """The result of the policy; raises its errors, and ``TimeoutError``."""
        answers: list[Any] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                answers.append(self.policy.decide(view, copy.deepcopy(memory)))
            except BaseException as error:  # noqa: BLE001 - SystemExit ends only its thread
                errors.append(error)

        if not self.is_running:
            self._running = threading.Thread(target=run, name="policy", daemon=True)
            self._running.start()
            self._running.join(self.patience_s)
        if errors:
            raise errors[0] if isinstance(errors[0], Exception) else RuntimeError(_describe(errors[0]))
        if not answers:
            raise TimeoutError(f"no answer within {self.patience_s:g} s")
        return answers[0]


def _checked(answer: object) -> tuple[Proposal | None, str]:
    """The proposal as it is journaled, with which the next decision is made, or why it is invalid."""
    if error := _invalid(answer):
        return None, error
    try:
        return _decode_proposal(msgspec.json.encode(answer)), ""
    except (TypeError, ValueError, RecursionError) as raised:
        return None, f"returned a memory that JSON cannot express ({_describe(raised)})"


def _invalid(proposal: object) -> str:
    """Why it is no valid proposal, or an empty string."""
    if not isinstance(proposal, Proposal):
        return f"answered {proposal!r:.100}, which is no Proposal"
    if type(proposal.count) is not int or proposal.count < 0:
        return f"asked for {proposal.count!r:.100} replicas"
    if not isinstance(proposal.reason, str):
        return f"gave {proposal.reason!r:.100} as its reason"
    numbers = {"forecast": proposal.forecast, "forecast_high": proposal.forecast_high, **proposal.terms}
    for name, value in numbers.items():
        if value is not None and not (isinstance(value, int | float) and math.isfinite(value)):
            return f"answered {value!r:.100} for {name!r:.100}"
    return ""


def _module(name: str) -> Any:
    with _locks.setdefault(name, threading.Lock()):
        return _of_file(Path(name)) if name.endswith(".py") else _imported(name)


def _of_file(file: Path) -> Any:
    """The module of a file, executed again if it has changed."""
    key = (file, file.stat().st_mtime_ns)
    if key not in _loaded:
        # Other files, and the same one after a change, have other names.
        name = f"tidegate_policy_{file.stem}_{hash_name(str(key)):x}"
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        made = importlib.util.module_from_spec(spec)
        # Data classes and structures look for the module of their annotations there.
        sys.modules[name] = made
        try:
            spec.loader.exec_module(made)
        except BaseException:
            del sys.modules[name]
            raise
        _loaded[key] = made
    return _loaded[key]


def _imported(name: str) -> Any:
    """A module by its name, reloaded if its file has changed."""
    module = importlib.import_module(name)
    file = getattr(module, "__file__", None)
    stamp = Path(file).stat().st_mtime_ns if file else 0
    if _stamps.setdefault(name, stamp) != stamp:
        module = importlib.reload(module)
        _stamps[name] = stamp
    return module


def _place(error: BaseException, module: str) -> str:
    """The last line of ``module``, the policy's, on the way to ``error``; empty if it was not reached."""
    places = [
        f" ({Path(frame.f_code.co_filename).name}:{line})"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__") == module
    ]
    return places[-1] if places else ""


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]
