"""Users' own scaling policies: found, loaded and kept from doing harm.

``custom: "module:Class"`` names a module of the Python path, or a file: ``/path/file.py:Class``. The command
line writes the second where the module lies beside the deployment document.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import math
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from policy.config.control import Choice
from policy.errors import ConfigError
from policy.scaling.policies.registry import PolicyChoice
from policy.scaling.view import Policy, Proposal, View

# Of decisions: a policy that takes longer is not waited for, and not asked again before it has answered.
PATIENCE_S = 1.0

_lock = threading.Lock()
_loaded: dict[tuple[Path, int], Any] = {}
_stamps: dict[str, int] = {}


def beside(choice: Choice, folder: Path) -> Choice:
    """The choice with a module that lies in ``folder``, where the document is, written as its file."""
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
    """The policy that was ``chosen`` at ``path`` of the document, made of its parameters.

    Raises :class:`policy.errors.ConfigError`. Imports what it is told to: not for an event loop.
    """
    where = chosen.class_path
    module, _, name = where.rpartition(":")
    try:
        found = getattr(_module(module), name, None)
    except (Exception, SystemExit) as error:
        # Whatever their module raises when it is imported is what they have to know; nor may it end us.
        raise ConfigError(path, where, f"a module that can be imported ({_said(error)})") from error
    if not isinstance(found, type) or not callable(getattr(found, "decide", None)):
        raise ConfigError(path, where, f"a class {name!r} in {module} with a method decide(view, memory)")
    try:
        made = found(**chosen.arguments)
    except (Exception, SystemExit) as error:
        raise ConfigError(path, chosen.arguments, f"parameters that {name} takes ({_said(error)})") from error
    return cast(Policy, made)


class GuardedPolicy:
    """A policy: where it raises, or answers what is no proposal, the count stays, and that is an event.

    One that somebody else wrote (``alone``) is asked in a thread of its own, with a copy of its memory:
    whatever it does there, the others are decided on, and the log says what it was asked.
    """

    def __init__(self, policy: Policy, event: Callable[[str], None], *, alone: bool = False) -> None:
        self._policy = policy
        self._event = event
        self._alone = alone
        self._asked: threading.Thread | None = None
        self._trouble = ""

    def decide(self, view: View, memory: Any) -> Proposal:
        """What the policy proposes, or as many as there are."""
        try:
            answer = self._ask(view, memory) if self._alone else self._policy.decide(view, memory)
            proposal, trouble = _understood(answer)
        except Exception as error:  # noqa: BLE001 - whatever it is, the fleet must stand it
            proposal, trouble = None, f"raised {_said(error)}"
        if trouble and trouble != self._trouble:
            self._event(f"{view.model}: the policy {type(self._policy).__name__} {trouble}; the count stays")
        self._trouble = trouble
        if proposal is None:
            return Proposal(count=view.count, reason=f"the policy {trouble}", memory=memory)
        return proposal

    def _ask(self, view: View, memory: Any) -> Any:
        """What it answers in time; raises what it raises, and ``TimeoutError``."""
        answers: list[Any] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                answers.append(self._policy.decide(view, copy.deepcopy(memory)))
            except BaseException as error:  # noqa: BLE001 - one that ends its thread has not answered either
                errors.append(error)

        if self._asked is None or not self._asked.is_alive():
            self._asked = threading.Thread(target=run, name="policy", daemon=True)
            self._asked.start()
            self._asked.join(PATIENCE_S)
        if errors:
            raise errors[0] if isinstance(errors[0], Exception) else RuntimeError(_said(errors[0]))
        if not answers:
            raise TimeoutError(f"no answer within {PATIENCE_S:g} s")
        return answers[0]


def _understood(answer: object) -> tuple[Proposal | None, str]:
    """The proposal as the log will have it, from which the next decision is made, or why there is none."""
    if trouble := _wrong(answer):
        return None, trouble
    try:
        return msgspec.json.decode(msgspec.json.encode(answer), type=Proposal), ""
    except (TypeError, ValueError, RecursionError) as error:
        return None, f"wants to remember what JSON has no word for ({_said(error)})"


def _wrong(proposal: object) -> str:
    """Why it is no proposal, or an empty string."""
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
    if not name.endswith(".py"):
        return _imported(name)
    file = Path(name)
    key = (file, file.stat().st_mtime_ns)
    with _lock:
        if key not in _loaded:
            spec = importlib.util.spec_from_file_location(f"tidegate_policy_{file.stem}", file)
            assert spec is not None
            assert spec.loader is not None
            made = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(made)
            _loaded[key] = made
        return _loaded[key]


def _imported(name: str) -> Any:
    """A module by its name, as its file is now: a document that is applied again takes what was saved."""
    with _lock:
        module = importlib.import_module(name)
        file = getattr(module, "__file__", None)
        stamp = Path(file).stat().st_mtime_ns if file else 0
        if _stamps.setdefault(name, stamp) != stamp:
            module = importlib.reload(module)
            _stamps[name] = stamp
        return module


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]
