"""One load test from start to exit code: counts, comparison with the gateway, tables and files."""

from __future__ import annotations

import sys
import time
from collections import Counter
from time import perf_counter
from typing import Any

from locust.runners import MasterRunner, WorkerRunner

from loadtests import metrics_check, report
from loadtests.http_client import BlockingHttpConnection
from loadtests.metrics_check import Key, MetricComparison
from loadtests.slo_attainment import RunStatistics
from loadtests.users import ModelUser, RequestFailed, first_model, objective

# Messages: the master ends the users of its workers, and each worker answers with its last counts. The master
# waits for them this much longer than the stop timeout of users.
END_USERS = "tidegate-end-users"
LAST_COUNTS = "tidegate-last-counts"
LAST_COUNTS_S = 5.0


class LocustRun:
    """The listeners of one locust process. Workers only count; the others report as well."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._ledger: RunStatistics = environment.ledger
        self._model = ""
        self._before: Counter[Key] = Counter()
        self._why_not = ""
        self._final_reports = 0
        events = environment.events
        if isinstance(environment.runner, WorkerRunner):
            events.test_start.add_listener(self._begin)
            events.report_to_master.add_listener(self._to_master)
            events.test_stop.add_listener(self._send_last_counts)
            environment.runner.register_message(END_USERS, self._end_users)
            return
        events.test_start.add_listener(self._start)
        events.reset_stats.add_listener(self._begin)
        events.test_stop.add_listener(self._stop)
        events.quitting.add_listener(self._quit)
        if isinstance(environment.runner, MasterRunner):
            events.worker_report.add_listener(self._from_worker)
            environment.runner.register_message(LAST_COUNTS, self._receive_last_counts)
        if environment.web_ui is not None:
            report.add_web_tab(environment.web_ui, self._ledger)

    def _begin(self, **_: object) -> None:
        self._ledger.begin(perf_counter())

    def _start(self, **_: object) -> None:
        self._why_not = ""
        self._final_reports = 0
        self._before = self._gateway()
        self._begin()

    def _stop(self, **_: object) -> None:
        options = self._environment.parsed_options
        if isinstance(self._environment.runner, MasterRunner):
            self._wait_for_workers()
        after = Counter[Key]() if self._why_not else self._gateway()
        if not after and not self._why_not:
            self._why_not = f"its metrics name no model {self._model!r}"
        compared: list[MetricComparison] = []
        if not self._why_not:
            compared = metrics_check.compare(self._before, after, self._ledger, objective(options))
        report.show(self._ledger, objective(options), compared, self._why_not)
        if options.csv_prefix:
            report.save(options.csv_prefix, self._ledger, compared)

    def _quit(self, **_: object) -> None:
        # An interrupted run is stopped after this event; its last requests count as well.
        runner = self._environment.runner
        if isinstance(runner, MasterRunner):
            runner.stop(send_stop_to_client=False)
        else:
            runner.stop()
        total = self._ledger.total()
        wanted = self._environment.parsed_options.slo_attainment
        if not total.requests:
            self._fail("no request has ended")
        elif total.attainment < wanted:
            self._fail(f"{total.attainment:.3f} of the requests met the SLO; expected {wanted:g}")

    def _gateway(self) -> Counter[Key]:
        """The gateway's samples, or none and the reason why."""
        options = self._environment.parsed_options
        if not options.admin_url:
            self._why_not = "no --admin-url"
            return Counter()
        try:
            with BlockingHttpConnection(
                self._environment.host or ModelUser.host, options.api_key
            ) as connection:
                self._model = options.model or first_model(connection)
            with BlockingHttpConnection(options.admin_url) as connection:
                return metrics_check.settled(lambda: self._scrape(connection))
        except (OSError, RequestFailed, ValueError) as error:
            self._why_not = f"{options.admin_url}: {error}"
            return Counter()

    def _scrape(self, connection: BlockingHttpConnection) -> Counter[Key]:
        status, body = connection.get("/metrics")
        if status != 200:
            raise RequestFailed(f"/metrics answered {status}")
        return metrics_check.read(body.decode(), self._model)

    def _to_master(self, *, data: dict[str, Any], **_: object) -> None:
        data["ledger"] = self._ledger.take()

    def _from_worker(self, *, data: dict[str, Any], **_: object) -> None:
        self._ledger.put(data["ledger"], perf_counter())

    def _send_last_counts(self, **_: object) -> None:
        self._environment.runner.send_message(LAST_COUNTS, self._ledger.take())

    def _receive_last_counts(self, *, msg: Any, **_: object) -> None:
        self._ledger.put(msg.data, perf_counter())
        self._final_reports += 1

    def _end_users(self, **_: object) -> None:
        self._environment.runner.stop()

    def _wait_for_workers(self) -> None:
        # Locust's master ends a headless test before its workers have sent all counts.
        self._environment.runner.send_message(END_USERS)
        deadline = perf_counter() + self._environment.stop_timeout + LAST_COUNTS_S
        while self._final_reports < self._environment.runner.worker_count and perf_counter() < deadline:
            time.sleep(0.05)

    def _fail(self, why: str) -> None:
        self._environment.process_exit_code = 1
        sys.stderr.write(f"load test failed: {why}\n")
