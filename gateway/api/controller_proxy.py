"""The controller, asked by the admin port on an operator's behalf; its errors in our ports' envelope.

``param`` is where the value stands that an error is about, as far as the controller says it. Status and code
follow from the error's class, whatever status the controller gave it:

    AdapterRefused      400 its own code: why the adapter was not admitted (``rank``, ``not_finite``, ...)
    ConfigError         400 ``bad_value``: a value of the request that is never allowed
    BadRequest          400 ``bad_request``: a body that is no such request
    AdapterUnknown      404 ``adapter_not_found``
    TargetError         409 ``not_allowed``: what the state of things does not allow now
    Unreachable         503 ``unreachable``: its database does not answer, or it is ending
    PreconditionFailed  503 ``precondition_failed``: something on its machine is in the way, as a full disk
    any other           502 ``controller_failed``

An error that carries a code of its own is told by that one. A controller that does not answer at all is 503
``controller_unreachable``, a deployment that has none 409 ``no_controller``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import quote, urlencode

import httpx
import msgspec

from gateway.protocol.errors import Refused
from policy.config.deployment import Deployment
from policy.errors import Refusal
from policy.wire.headers import SECRET_HEADER

# An add that goes on says so once a second.
SILENT_S = 30.0
CONNECT_S = 2.0
# By the class of a controller's error, where it names no code of its own.
_ERRORS = {
    "AdapterRefused": (400, "refused"),
    "ConfigError": (400, "bad_value"),
    "BadRequest": (400, "bad_request"),
    "AdapterUnknown": (404, "adapter_not_found"),
    "TargetError": (409, "not_allowed"),
    "Unreachable": (503, "unreachable"),
    "PreconditionFailed": (503, "precondition_failed"),
}


class ControllerProxy:
    """What of the controller's HTTP API the admin port hands on. ``deployment`` says where it is."""

    def __init__(self, secret: str, deployment: Callable[[], Deployment]) -> None:
        self._secret = secret
        self._deployment = deployment
        self._http: httpx.AsyncClient | None = None

    async def ask(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The body of a good answer; raises :class:`gateway.protocol.errors.Refused` for any other."""
        http, url = self._client(), self._url(path)
        try:
            answer = await http.request(method, url, content=body)
        except httpx.HTTPError as error:
            raise self._away(type(error).__name__) from error
        if answer.status_code != 200:
            raise _refusal(answer.content)
        return answer.content

    async def lines(self, path: str, body: bytes, end: str) -> AsyncIterator[dict[str, Any]]:
        """The lines of an answer that reports progress, of which the last one has the member ``end``.

        Raises :class:`gateway.protocol.errors.Refused` in its place, and where the controller goes meanwhile.
        """
        http, url = self._client(), self._url(path)
        try:
            async with http.stream("POST", url, content=body) as answer:
                if answer.status_code != 200:
                    raise _refusal(await answer.aread())
                rest = b""
                async for data in answer.aiter_bytes():
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        said = msgspec.json.decode(line, type=dict[str, Any])
                        if "error" in said:
                            raise _refusal(line)
                        yield said
                        if end in said:
                            return
        except (httpx.HTTPError, msgspec.DecodeError) as error:
            raise self._away(type(error).__name__) from error
        raise self._away("its answer has no end")

    def _url(self, path: str) -> str:
        deployment = self._deployment()
        if not deployment.needs_controller:
            raise Refused(
                Refusal.UNSUPPORTED,
                "There is no controller: neither the servers here nor their adapters are Tidegate's.",
                status=409,
                code="no_controller",
            )
        return f"http://{deployment.cluster.controller}{path}"

    def _client(self) -> httpx.AsyncClient:
        """One for all: to make it reads certificates, for as long as many requests take."""
        if self._http is None:
            self._http = httpx.AsyncClient(
                headers={SECRET_HEADER: self._secret, "content-type": "application/json"},
                timeout=httpx.Timeout(SILENT_S, connect=CONNECT_S),
                limits=httpx.Limits(max_keepalive_connections=0),
                trust_env=False,
            )
        return self._http

    def _away(self, why: str) -> Refused:
        address = self._deployment().cluster.controller
        return Refused(
            Refusal.NO_REPLICA,
            f"The controller at {address} does not answer ({why}); what it was asked for may be done"
            " nevertheless.",
            code="controller_unreachable",
        )


def adapter_path(model: str, name: str, change: str = "") -> str:
    """The controller's path for an adapter, or for a ``change`` of it."""
    return f"/adapters/{quote(model, safe='')}/{quote(name, safe='')}{'/' + change if change else ''}"


def decisions_path(**asked: str | float | None) -> str:
    """The controller's path for what it decided, of the kind that is asked for."""
    given = {name: value for name, value in asked.items() if value is not None}
    return "/decisions" + (f"?{urlencode(given)}" if given else "")


def _refusal(body: bytes) -> Refused:
    """A controller's error, as it stands in an answer or in the last line of one."""
    try:
        said: dict[str, Any] = msgspec.json.decode(body)["error"]
        kind, message = str(said["type"]), str(said["message"])
    except (ValueError, LookupError, TypeError):
        said, kind, message = {}, "", "The controller answered what nobody understands."
    status, code = _ERRORS.get(kind, (502, "controller_failed"))
    return Refused(
        Refusal.UPSTREAM_FAILED if status >= 500 else Refusal.BAD_REQUEST,
        message,
        param=str(said.get("path") or "") or None,
        status=status,
        code=str(said.get("code") or code),
    )
