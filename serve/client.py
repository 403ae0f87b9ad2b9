"""Talk to the controller: what the command line and the supervisor use."""

from __future__ import annotations

from typing import Any, TypeVar

import httpx
import msgspec

from policy.errors import ConfigError, SwitchRefused, TargetError, Unreachable
from policy.types import Fleet
from store.state import SECRET_HEADER

T = TypeVar("T")


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A model as the controller sees it; ``phase`` says what it is doing and ``note`` why."""

    name: str
    engine: str
    mode: str
    shape: str
    generation: int
    target: int
    ready: int
    phase: str
    note: str = ""


class ControllerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The controller's own view: which actuator, since when, each model, the last events."""

    actuator: str
    epoch: float
    pid: int
    models: tuple[ModelStatus, ...]
    events: tuple[str, ...] = ()


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
        return self._call("GET", "/fleet", None, Fleet)

    def status(self) -> ControllerStatus:
        """What each model is doing."""
        return self._call("GET", "/status", None, ControllerStatus)

    def scale(self, model: str, replicas: int) -> ModelStatus:
        """Set the count of the model's current mode; raises :class:`policy.errors.TargetError`."""
        return self._call("POST", "/scale", {"model": model, "replicas": replicas}, ModelStatus)

    def mode(self, model: str, mode: str) -> ModelStatus:
        """Switch the model's mode; raises :class:`policy.errors.SwitchRefused` with the reason."""
        return self._call("POST", "/mode", {"model": model, "mode": mode}, ModelStatus)

    def apply(self, document: object) -> ControllerStatus:
        """Replace the deployment document, whole or not at all."""
        return self._call("POST", "/apply", document, ControllerStatus)

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


def _refusal(answer: httpx.Response) -> Exception:
    try:
        body: dict[str, Any] = answer.json()["error"]
    except (ValueError, KeyError):
        return Unreachable(f"the controller answered {answer.status_code}: {answer.text[:200]}")
    if body["type"] == "ConfigError":
        return ConfigError(body["path"], body["value"], body["expected"])
    kinds: dict[str, type[Exception]] = {"TargetError": TargetError, "SwitchRefused": SwitchRefused}
    return kinds.get(body["type"], Unreachable)(body["message"])
