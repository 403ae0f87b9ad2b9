"""One fallback provider in one worker: its key, connections, breaker and spend cap."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from msgspec import Raw

from gateway.http.http1_client import ConnectionPool
from gateway.protocol.body import RequestBody
from gateway.protocol.json_decoders import ABSENT
from gateway.protocol.json_splice import JsonEdit, UpstreamRequestBody, edited_body, locate, set_model
from gateway.protocol.paths import ProxyRoute
from gateway.protocol.prompt_features import limit_of
from gateway.protocol.usage import TokenUsage
from gateway.request_context import RequestContext
from gateway.telemetry.structured_log import StructuredLog
from policy.admission.provider_spend_cap import SpendCap, SpendReservation, cost
from policy.config.deployment import Deployment, FallbackProviderConfig
from policy.request import Request
from policy.routing.replica_health import AttemptResult, CircuitBreaker, CircuitBreakerState
from policy.types import Runner
from store.key_derivation import read_key

# Routes that an OpenAI-compatible endpoint serves.
PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"})
# Reserved output tokens for an answer that its request does not bound.
ASSUMED_OUTPUT_TOKENS = 1024
# Of English text, on the low side: more is reserved than is likely used.
BYTES_PER_TOKEN = 3

_COMMA = re.compile(rb"\s*,")


class FallbackProvider:
    """One provider. A worker spends at most its equal part of the cap, and reads the key for each call."""

    def __init__(self, upstream: FallbackProviderConfig, deployment: Deployment, log: StructuredLog) -> None:
        self.label = b"upstream:" + upstream.name.encode()
        self.pool = ConnectionPool(upstream.url, deployment.gateway.connect_timeout_s)
        self.breaker = CircuitBreaker(deployment.gateway.eject)
        self.spend_cap = SpendCap(0.0)
        self._base = (urlsplit(upstream.url).path.rstrip("/") or "/v1").encode()
        self._log = log
        self._key = b""
        self._key_problem = ""
        self.read(upstream, deployment)

    def read(self, upstream: FallbackProviderConfig, deployment: Deployment) -> None:
        """Apply the deployment's settings, except the URL."""
        self.upstream = upstream
        self.pool.connect_timeout_s = deployment.gateway.connect_timeout_s
        self.breaker.configure(deployment.gateway.eject)
        self.spend_cap.cap = upstream.cost_cap_per_h / deployment.gateway.workers

    def serves(self, route: ProxyRoute, name: str) -> bool:
        """Whether it serves such requests for the model or adapter ``name``."""
        return route.path in PATHS and name in self.upstream.models

    def open(self, at: float) -> bool:
        """Whether its breaker admits a request now; one that is due for a probe admits one."""
        if self.breaker.due(at):
            self.breaker.half_open()
        return self.breaker.state is CircuitBreakerState.CLOSED or self.breaker.take_probe()

    def note(self, result: AttemptResult, at: float, draw: float) -> None:
        if self.breaker.state is CircuitBreakerState.CLOSED:
            self.breaker.note(result, at)
            if result is AttemptResult.BAD and self.breaker.failing(at):
                self.breaker.open(at, draw)
        else:
            self.breaker.probed(result, at, draw)

    def hold(
        self, request: Request, route: ProxyRoute, body: RequestBody, at: float
    ) -> SpendReservation | None:
        """Reserve what the request may cost; ``None`` when the spend cap forbids it."""
        prompt = request.prompt_tokens or request.size // BYTES_PER_TOKEN
        output = 0
        if route.runner is Runner.GENERATE:
            output = (limit_of(body) or ASSUMED_OUTPUT_TOKENS) * body.choices
        return self.spend_cap.hold(cost(self.upstream.price, prompt, output), at)

    def bill(self, hold: SpendReservation, usage: TokenUsage | None) -> float:
        """The cost of an answer by its usage; without usage, all that was reserved."""
        if usage is None:
            return hold.amount
        spent = cost(self.upstream.price, usage.prompt, usage.completion)
        # The usage of a cut answer lacks the prompt, which was read.
        return spent if usage.exact else max(spent, hold.amount)

    def head(self, call: RequestContext, size: int) -> bytes:
        """The request's head, with the provider's key and without Tidegate's or the client's keys."""
        head = b"POST %b%b HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\n" % (
            self._base,
            call.route.path.removeprefix("/v1").encode(),
            self.pool.host_header,
        )
        if self._key:
            head += b"authorization: Bearer %b\r\n" % self._key
        accept = call.headers.get(b"accept")
        if accept is not None and accept.isascii() and b"\n" not in accept:
            head += b"accept: %b\r\n" % accept
        return head + b"content-length: %d\r\n\r\n" % size

    def outgoing(self, route: ProxyRoute, name: str, body: RequestBody, raw: bytes) -> UpstreamRequestBody:
        """``raw`` with the provider's model name, usage at the end of streams, and no ``cache_salt``."""
        edits = [set_model(raw, body, self.upstream.models[name])]
        if body.cache_salt is not ABSENT:
            edits.append(_without(raw, body.cache_salt))
        return edited_body(route, body, raw, edits)

    @property
    def has_key(self) -> bool:
        """Whether the provider's key, if it has one, can be read now."""
        self._key, problem = read_key(self.upstream.key_file, self.upstream.key_env)
        if problem and problem != self._key_problem:
            self._log.error("upstream_key_unusable", upstream=self.upstream.name, error=problem)
        self._key_problem = problem
        return not problem


def _without(raw: bytes, value: Raw) -> JsonEdit:
    """Remove the member of ``raw`` whose ``value`` this is, with one comma; ``model`` is another member."""
    begin, end = locate(raw, value)
    begin = raw.rindex(b'"', 0, raw.rindex(b'"', 0, begin))
    if after := _COMMA.match(raw, end):
        return JsonEdit(begin, after.end(), b"")
    return JsonEdit(raw.rindex(b",", 0, begin), end, b"")
