"""The client of the controller's HTTP API, for the command line and the supervisor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import httpx
import msgspec

from policy.config.convert import prepare_decoders
from policy.errors import NotLeader, TidegateError, Unauthorized, Unreachable
from policy.types import FleetSnapshot
from policy.wire.accounting_api import AdminRole, AuditActor, actor_headers
from policy.wire.adapter_catalog import Alias
from policy.wire.controller import (
    ADAPTERS,
    DECISIONS,
    DOCUMENT,
    FLEET,
    GPUS,
    HISTORY,
    LEADER,
    MODE,
    SCALE,
    STATUS,
    STEPS,
    AddAdapterLine,
    AddAdapterRequest,
    Controllers,
    LeaderStatus,
    RollbackRequest,
    adapter_path,
    error_of,
    with_query,
)
from policy.wire.controller_reports import GpuReport
from policy.wire.headers import SECRET_HEADER
from serve.adapters.status import AdaptersStatus
from serve.autoscaler.decision_history import ModelHistory
from serve.autoscaler.step_report_subscribers import StepLine
from serve.controller_api_schema import ControllerStatus, LoggedDecision, ModelStatus
from store.os_process import local_user

T = TypeVar("T")

# Maximum silence of a stream, which has a line at least once a second.
SILENT_S = 30.0

# A supervisor asks in several threads.
prepare_decoders(FleetSnapshot, LeaderStatus, ControllerStatus, StepLine)


class ControllerClient:
    """A blocking client of the controller's internal HTTP API.

    Raises :class:`policy.errors.Unreachable` without an answer, and the errors that the controller reports.
    Of several controllers the one that leads is asked.
    """

    def __init__(
        self,
        addresses: str,
        secret: str,
        timeout_s: float = 10.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """``addresses`` is ``HOST:PORT[,HOST:PORT]``; ``transport`` replaces the network, for tests."""
        self._http = httpx.Client(
            timeout=timeout_s, trust_env=False, transport=transport,
            headers={SECRET_HEADER: secret, **actor_headers(AuditActor(local_user(), AdminRole.ADMIN))},
        )  # fmt: skip
        self._controllers = Controllers(addresses)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def hangs(self) -> bool:
        """Whether there is a controller that does not answer in time; where none listens there is none."""
        try:
            self._http.get(f"http://{self._controllers.first}/livez")
        except (httpx.ReadTimeout, httpx.WriteTimeout):
            return True
        except httpx.HTTPError:
            return False
        return False

    def leaders(self) -> dict[str, LeaderStatus | None]:
        """What each of the controllers knows of their election; ``None`` for one that does not answer."""
        found: dict[str, LeaderStatus | None] = dict.fromkeys(self._controllers.all)
        for address in self._controllers.all:
            with contextlib.suppress(Unreachable):
                found[address] = self._ask(address, "GET", LEADER, None, LeaderStatus)
        return found

    def fleet(self) -> FleetSnapshot:
        """The current snapshot."""
        return self._call("GET", FLEET, None, FleetSnapshot)

    def status(self) -> ControllerStatus:
        """The status of each model."""
        return self._call("GET", STATUS, None, ControllerStatus)

    def document(self) -> dict[str, Any]:
        """The deployment file in force, as JSON."""
        return self._call("GET", DOCUMENT, None, dict[str, Any])

    def gpus(self) -> dict[str, GpuReport]:
        """The last report on the GPUs of each replica that has some, by its id."""
        return self._call("GET", GPUS, None, dict[str, GpuReport])

    def scale(self, model: str, replicas: int | None, for_s: float | None = None) -> ModelStatus:
        """Override the replica count for ``for_s`` seconds or until cleared; ``None`` clears the override."""
        wanted = {"model": model, "replicas": "auto" if replicas is None else replicas, "for_s": for_s}
        return self._call("POST", SCALE, wanted, ModelStatus)

    def mode(self, model: str, mode: str | None, for_s: float | None = None) -> ModelStatus:
        """Override the mode for ``for_s`` seconds or until cleared; ``None`` clears the override."""
        wanted = {"model": model, "mode": "auto" if mode is None else mode, "for_s": for_s}
        return self._call("POST", MODE, wanted, ModelStatus)

    def decisions(
        self, model: str | None = None, last: int = 1, at: float | None = None
    ) -> tuple[LoggedDecision, ...]:
        """The ``last`` decisions, newest first: of one ``model``, up to the instant ``at`` (Unix seconds)."""
        path = with_query(DECISIONS, model=model, last=last, at=at)
        return self._call("GET", path, None, tuple[LoggedDecision, ...])

    def history(self, since: float, step_s: float) -> tuple[ModelHistory, ...]:
        """The history of every model from ``since`` (Unix seconds) on, in rows of ``step_s`` seconds."""
        return self._call(
            "GET", with_query(HISTORY, since=since, step_s=step_s), None, tuple[ModelHistory, ...]
        )

    def steps(self, model: str) -> Iterator[StepLine]:
        """Endless step reports of the engines of ``model``: at least one line a second, the first empty."""
        for raw in self._stream("GET", with_query(STEPS, model=model)):
            yield msgspec.json.decode(raw, type=StepLine)

    def apply(self, document: object) -> ControllerStatus:
        """Apply a deployment, whole or not at all."""
        return self._call("POST", "/apply", document, ControllerStatus)

    def adapters(self) -> AdaptersStatus:
        """The status of all adapters: placement and usage."""
        return self._call("GET", ADAPTERS, None, AdaptersStatus)

    def add_adapter(self, wanted: AddAdapterRequest, progress: Callable[[AddAdapterLine], None]) -> Alias:
        """Add or replace an adapter; returns its durable alias. It continues if the caller disconnects."""
        hint = "; `tidegate adapters` shows what came of it"
        for raw in self._stream("POST", ADAPTERS, msgspec.json.encode(wanted), hint):
            line = msgspec.json.decode(raw, type=AddAdapterLine)
            if line.error is not None:
                raise error_of(msgspec.structs.asdict(line.error))
            if line.alias is not None:
                return line.alias
            progress(line)
        raise Unreachable(f"the controller at {self._controllers.first} ended before it was done")

    def remove_adapter(self, model: str, name: str) -> None:
        """Remove a name: requests for it are answered 404."""
        self._call("DELETE", adapter_path(model, name), None, dict[str, Any])

    def split_adapter(self, model: str, name: str, weights: dict[str, float]) -> Alias:
        """Split a name over its versions ``v1`` and so on, by weight."""
        return self._call("POST", adapter_path(model, name, "split"), weights, Alias)

    def rollback_adapter(self, model: str, name: str, to: str | None = None) -> Alias:
        """Return a name to its previous split, or to the version ``to`` alone."""
        return self._call("POST", adapter_path(model, name, "rollback"), RollbackRequest(to=to), Alias)

    def _call(self, method: str, path: str, body: object, kind: type[T]) -> T:
        failures: list[Unreachable] = []
        for address in self._controllers.in_turn():
            try:
                answer = self._ask(address, method, path, body, kind)
            except Unauthorized:
                raise
            except Unreachable as error:
                # One that was asked for a change, and did not answer, may still carry it out.
                if not isinstance(error, NotLeader) and not _may_ask_again(method, error.__cause__):
                    raise
                failures.append(error)
            else:
                self._controllers.answered(address)
                return answer
        raise failures[0] if len(failures) == 1 else Unreachable("; ".join(map(str, failures)))

    def _ask(self, address: str, method: str, path: str, body: object, kind: type[T]) -> T:
        content = None if body is None else msgspec.json.encode(body)
        try:
            answer = self._http.request(method, f"http://{address}{path}", content=content)
        except httpx.HTTPError as error:
            raise Unreachable(f"the controller at {address} does not answer: {error}") from error
        if answer.status_code == 200:
            return msgspec.json.decode(answer.content, type=kind)
        raise _refusal(answer)

    def _stream(self, method: str, path: str, body: bytes | None = None, hint: str = "") -> Iterator[bytes]:
        """The lines of an NDJSON answer; ``hint`` ends the message of an interruption."""
        if len(self._controllers.all) > 1:
            self.status()  # finds the one that leads
        address = self._controllers.first
        try:
            with self._http.stream(
                method, f"http://{address}{path}", content=body, timeout=SILENT_S
            ) as answer:
                if answer.status_code != 200:
                    answer.read()
                    raise _refusal(answer)
                yield from _lines(answer.iter_bytes())
        except httpx.HTTPError as error:
            message = f"the controller at {address} stopped answering: {error}{hint}"
            raise Unreachable(message) from error


def _may_ask_again(method: str, cause: BaseException | None) -> bool:
    """Whether another controller may be asked after ``cause``: nothing was changed."""
    return method == "GET" or isinstance(cause, (httpx.ConnectError, httpx.ConnectTimeout))


def _lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of NDJSON; httpx would also split at other line separators of Unicode."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines


def _refusal(answer: httpx.Response) -> TidegateError:
    try:
        return error_of(answer.json()["error"])
    except (ValueError, KeyError):
        return Unreachable(f"the controller answered {answer.status_code}: {answer.text[:200]}")
