"""Talk to the controller: what the command line and the supervisor use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import httpx
import msgspec

from policy.errors import TidegateError, Unreachable
from policy.types import Fleet
from policy.wire.catalog import Alias
from policy.wire.controller import (
    ADAPTERS,
    DECISIONS,
    FLEET,
    STATUS,
    STEPS,
    AddLine,
    AddRequest,
    adapter_path,
    error_of,
    with_query,
)
from policy.wire.headers import SECRET_HEADER
from serve.adapters.status import AdaptersStatus
from serve.autoscaler.step_feed import StepLine
from serve.controller_api import ControllerStatus, LoggedDecision, ModelStatus

T = TypeVar("T")

# An add that goes on says so at least once a second.
SILENT_S = 30.0


class ControllerClient:
    """A blocking client of the controller's internal HTTP API.

    Raises :class:`policy.errors.Unreachable` when nobody answers, and the controller's own
    refusals as the error they are.
    """

    def __init__(self, address: str, secret: str, timeout_s: float = 10.0) -> None:
        self._http = httpx.Client(
            base_url=f"http://{address}", headers={SECRET_HEADER: secret}, timeout=timeout_s, trust_env=False
        )
        self._address = address

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def fleet(self) -> Fleet:
        """The current snapshot."""
        return self._call("GET", FLEET, None, Fleet)

    def status(self) -> ControllerStatus:
        """What each model is doing."""
        return self._call("GET", STATUS, None, ControllerStatus)

    def scale(self, model: str, replicas: int | None, for_s: float | None = None) -> ModelStatus:
        """Set the count of the model's current mode by hand, ``None`` to let the policy decide again.

        For so many seconds, or until it is taken back. Raises :class:`policy.errors.TargetError`.
        """
        wanted = {"model": model, "replicas": "auto" if replicas is None else replicas, "for_s": for_s}
        return self._call("POST", "/scale", wanted, ModelStatus)

    def mode(self, model: str, mode: str | None, for_s: float | None = None) -> ModelStatus:
        """Switch the model's mode by hand, ``None`` to let load decide again.

        Raises :class:`policy.errors.SwitchRefused` with the reason.
        """
        wanted = {"model": model, "mode": "auto" if mode is None else mode, "for_s": for_s}
        return self._call("POST", "/mode", wanted, ModelStatus)

    def decisions(
        self, model: str | None = None, last: int = 1, at: float | None = None
    ) -> tuple[LoggedDecision, ...]:
        """The ``last`` decisions, newest first: of one ``model``, up to the instant ``at`` (Unix seconds)."""
        path = with_query(DECISIONS, model=model, last=last, at=at)
        return self._call("GET", path, None, tuple[LoggedDecision, ...])

    def steps(self, model: str) -> Iterator[StepLine]:
        """What the engines of ``model`` tell of their steps from when the first comes, which says nothing.

        It ends with the caller's patience: something comes at least once a second. Raises
        :class:`policy.errors.TargetError` for a model that is none.
        """
        try:
            with self._http.stream("GET", with_query(STEPS, model=model), timeout=SILENT_S) as answer:
                if answer.status_code != 200:
                    answer.read()
                    raise _refusal(answer)
                for raw in _lines(answer.iter_bytes()):
                    yield msgspec.json.decode(raw, type=StepLine)
        except httpx.HTTPError as error:
            raise Unreachable(f"the controller at {self._address} stopped answering: {error}") from error

    def apply(self, document: object) -> ControllerStatus:
        """Replace the deployment document, whole or not at all."""
        return self._call("POST", "/apply", document, ControllerStatus)

    def adapters(self) -> AdaptersStatus:
        """Which adapters there are, where they live and how they are used."""
        return self._call("GET", ADAPTERS, None, AdaptersStatus)

    def add_adapter(self, wanted: AddRequest, progress: Callable[[AddLine], None]) -> Alias:
        """Add or replace an adapter; returns what its name stands for once that is durable.

        The controller goes on when the caller leaves. Raises :class:`policy.errors.AdapterRefused`.
        """
        try:
            with self._http.stream(
                "POST", ADAPTERS, content=msgspec.json.encode(wanted), timeout=SILENT_S
            ) as answer:
                if answer.status_code != 200:
                    answer.read()
                    raise _refusal(answer)
                for raw in _lines(answer.iter_bytes()):
                    line = msgspec.json.decode(raw, type=AddLine)
                    if line.error is not None:
                        raise error_of(msgspec.structs.asdict(line.error))
                    if line.alias is not None:
                        return line.alias
                    progress(line)
        except httpx.HTTPError as error:
            raise Unreachable(
                f"the controller at {self._address} stopped answering: {error}; `tidegate adapters` shows"
                " what came of it"
            ) from error
        raise Unreachable(f"the controller at {self._address} ended before it was done")

    def remove_adapter(self, model: str, name: str) -> None:
        """Take a name away: requests for it are 404 from now on."""
        self._call("DELETE", adapter_path(model, name), None, dict[str, Any])

    def split_adapter(self, model: str, name: str, weights: dict[str, float]) -> Alias:
        """Let a name stand for several of its versions, called ``v1`` and so on, by weight."""
        return self._call("POST", adapter_path(model, name, "split"), weights, Alias)

    def rollback_adapter(self, model: str, name: str) -> Alias:
        """Let a name stand for what it stood for before."""
        return self._call("POST", adapter_path(model, name, "rollback"), None, Alias)

    def _call(self, method: str, path: str, body: object, kind: type[T]) -> T:
        try:
            answer = self._http.request(
                method, path, content=None if body is None else msgspec.json.encode(body)
            )
        except httpx.HTTPError as error:
            raise Unreachable(f"the controller at {self._address} does not answer: {error}") from error
        if answer.status_code == 200:
            return msgspec.json.decode(answer.content, type=kind)
        raise _refusal(answer)


def _lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of NDJSON; httpx would also end one at characters that stand in text."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines


def _refusal(answer: httpx.Response) -> TidegateError:
    try:
        return error_of(answer.json()["error"])
    except (ValueError, KeyError):
        return Unreachable(f"the controller answered {answer.status_code}: {answer.text[:200]}")
