"""The simulated users: each sends its next request when the last answer has ended."""

from __future__ import annotations

import random
import time
from time import perf_counter
from typing import Any

import msgspec
from locust import User, constant

from loadtests.http_client import BlockingHttpConnection
from loadtests.options import prompt
from loadtests.slo_attainment import RequestMeasurement, RequestSlo
from tidegate.replay.response_timing import StreamTimings

# Between two attempts to reach a server that is down.
PAUSE_S = 0.2


class RequestFailed(Exception):
    """The error of a request in locust's statistics."""


def first_model(connection: BlockingHttpConnection) -> str:
    """The first id of ``/v1/models``; raises RequestFailed when there is none."""
    status, body = connection.get("/v1/models")
    if status != 200:
        raise RequestFailed(f"/v1/models answered {status}: {body[:200].decode(errors='replace')}")
    models = msgspec.json.decode(body)["data"]
    if not models:
        raise RequestFailed("/v1/models is empty; name a model with --model")
    return str(models[0]["id"])


def objective(options: Any) -> RequestSlo:
    """The SLO in the options."""
    return RequestSlo(ttft_s=options.slo_ttft_s, itl_s=options.slo_itl_s)


class ModelUser(User):  # type: ignore[misc] # locust ships no types that strict mode can follow
    """A user of one route; its outcomes go to the ledger of the run and to locust's statistics."""

    abstract = True
    host = "http://127.0.0.1:8080"
    wait_time = constant(0)
    kind = ""
    path = ""

    def on_start(self) -> None:
        """Connect, and find the name of the model."""
        self._options = self.environment.parsed_options
        self._rng = random.Random()  # noqa: S311 - load, not secrets
        self._connection = BlockingHttpConnection(self.host, self._options.api_key)
        self._model = self._options.model or first_model(self._connection)

    def on_stop(self) -> None:
        self._connection.close()

    def send(self) -> None:
        """Send one request and read its answer."""
        streamed = self._rng.random() < self._options.stream_share
        aborts = self._rng.random() < self._options.abort_share
        body = {"model": self._model, "max_tokens": self._options.max_tokens, **self.question()}
        if streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        raw = msgspec.json.encode(body)
        name = f"{self.kind}, {'streamed' if streamed else 'whole'}"
        began = perf_counter()
        try:
            outcome = self._stream(name, raw, aborts) if streamed else self._whole(name, raw, aborts)
        except OSError as error:
            outcome = RequestMeasurement(
                name, perf_counter() - began, error=f"{type(error).__name__}: {error}"
            )
            time.sleep(PAUSE_S)
        self._report(outcome)

    tasks = [send]  # noqa: RUF012 - locust reads this attribute

    def question(self) -> dict[str, Any]:
        """The part of the body that depends on the route."""
        raise NotImplementedError

    def _prompt(self) -> str:
        return prompt(self._options.prompt_tokens, self._rng.getrandbits(32))

    def _stream(self, name: str, raw: bytes, aborts: bool) -> RequestMeasurement:
        timings = StreamTimings()
        connection = self._connection
        leave_after = self._rng.randint(1, max(1, self._options.max_tokens // 2)) if aborts else 0

        def sink(data: bytes, at: float) -> bool:
            new = timings.first_event_at is None
            timings.feed(data, at)
            if new and timings.first_event_at is not None:
                self._first(name, timings.first_event_at - connection.began)
            return not leave_after or timings.events < leave_after

        answer = connection.post(self.path, raw, sink)
        timings.end(answer.status)
        first_at = timings.first_event_at
        return RequestMeasurement(
            name,
            connection.ended - connection.began,
            ttft_s=first_at - connection.began if first_at is not None else None,
            itl_s=timings.itl_s() or 0.0,
            gap_s=timings.gap_s(),
            gaps=tuple(timings.gaps),
            prompt_tokens=timings.input_tokens,
            tokens=timings.output_tokens,
            error=_error(answer.status, timings) if answer.complete else "",
            aborted=not answer.complete,
        )

    def _whole(self, name: str, raw: bytes, aborts: bool) -> RequestMeasurement:
        timings = StreamTimings()
        body = bytearray()

        def sink(data: bytes, at: float) -> bool:
            body.extend(data)
            return True

        connection, began = self._connection, perf_counter()
        leave_s = {"timeout_s": self._rng.uniform(0.001, self._options.slo_ttft_s)} if aborts else {}
        try:
            answer = connection.post(self.path, raw, sink, **leave_s)
        except TimeoutError:
            if not aborts:
                raise
            return RequestMeasurement(name, perf_counter() - began, aborted=True)
        timings.take(bytes(body), connection.ended)
        timings.end(answer.status)
        return RequestMeasurement(
            name,
            connection.ended - connection.began,
            prompt_tokens=timings.input_tokens,
            tokens=timings.output_tokens,
            error=_error(answer.status, timings),
        )

    def _first(self, name: str, ttft_s: float) -> None:
        # Counted at the first event, as in the gateway, also if the stream fails later.
        self.environment.ledger.first_event(name, ttft_s)
        self.environment.stats.get(name, "TTFT").log(1000 * ttft_s, 0)

    def _report(self, outcome: RequestMeasurement) -> None:
        self.environment.ledger.end(outcome, objective(self._options), perf_counter())
        # Without the request event: locust's totals count requests, not tokens.
        for gap in outcome.gaps:
            self.environment.stats.get(outcome.user, "ITL").log(1000 * gap, 0)
        if not outcome.aborted:
            self.environment.events.request.fire(
                request_type="E2E",
                name=outcome.user,
                response_time=1000 * outcome.e2e_s,
                response_length=outcome.tokens,
                exception=RequestFailed(outcome.error) if outcome.error else None,
                context={},
            )


class ChatUser(ModelUser):
    """Sends chat completions."""

    weight = 3
    kind = "chat"
    path = "/v1/chat/completions"

    def question(self) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": self._prompt()}]}


class CompletionUser(ModelUser):
    """Sends completions."""

    weight = 1
    kind = "completion"
    path = "/v1/completions"

    def question(self) -> dict[str, Any]:
        return {"prompt": self._prompt()}


def _error(status: int, timings: StreamTimings) -> str:
    return timings.error if status == 200 else f"{status}: {timings.error}"
