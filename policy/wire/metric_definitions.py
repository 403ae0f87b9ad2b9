"""Every metric that Tidegate exposes: name, type, unit, labels and meaning.

Gateways and the controller declare their metrics by this table, and `docs/metrics.md` is generated from it.
Counters are named without the suffix ``_total`` here.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NamedTuple

# Samples of a process that answers to a gateway, by metric: values of the labels, and the value.
Samples = dict[str, list[tuple[tuple[str, ...], float]]]

# The part of names that metrics of engines have; they are re-exported under their own names.
ENGINE_PREFIX: Final = "vllm:"


class MetricType(StrEnum):
    """The type of a metric, as in OpenMetrics."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Metric(NamedTuple):
    """One metric. ``when`` says since when or where it has samples, if it has none at first."""

    name: str
    kind: MetricType
    unit: str
    text: str
    labels: tuple[str, ...] = ()
    when: str = ""

    @property
    def series(self) -> str:
        """The name of its samples; those of histograms have further suffixes."""
        return f"{self.name}_total" if self.kind is MetricType.COUNTER else self.name


class MetricGroup(NamedTuple):
    """Metrics on one topic, and where they are counted."""

    title: str
    source: str
    metrics: tuple[Metric, ...]


_C, _G, _H = MetricType.COUNTER, MetricType.GAUGE, MetricType.HISTOGRAM
_MODEL = ("model",)
_REPLICA = ("model", "replica")
_ADAPTER = ("model", "adapter")
_OPERATION = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")
WORKERS: Final = "All gateway workers of the host."
_CONTROLLER = "The controller."

# Without it, nothing of the kind has happened.
_FIRST = "after the first"
_GPU = "with NVML"
# A replica that sleeps has no KV cache, and has lent its GPUs to another one.
_AWAKE = "unless it sleeps"
_AWAKE_GPU = f"{_GPU}, {_AWAKE}"

REQUESTS = (
    Metric("tidegate_requests", _C, "requests", "Requests by outcome.", ("model", "route", "outcome")),
    Metric("tidegate_in_flight", _G, "requests", "Requests in the gateway.", _MODEL),
    Metric("tidegate_replica_attempts", _C, "attempts", "Attempts on replicas.", ("model", "outcome")),
    Metric("tidegate_retries", _C, "requests",
           "Requests that could have gone to another replica, by what came of it.", ("model", "outcome"),
           _FIRST),
    Metric("tidegate_replicas_up", _G, "replicas", "Replicas that traffic may go to.", _MODEL),
    Metric("tidegate_breakers", _G, "replicas", "Replicas by the state of their circuit breaker.",
           ("model", "state")),
    Metric("tidegate_ejections", _C, "ejections", "Replicas taken out of rotation, by why.",
           ("model", "reason"), _FIRST),
    Metric("tidegate_probes", _C, "probes", "Probes of replicas that are out of rotation, by how they went.",
           ("model", "outcome"), _FIRST),
    Metric("tidegate_contradicting_answers", _C, "answers",
           "Answers whose token counts contradict their request, by the count; nothing is learned from them.",
           ("model", "count"), _FIRST),
    Metric("tidegate_coalesced_calls", _C, "calls", "Calls that several requests shared.", _MODEL),
    Metric("tidegate_coalesced_requests", _C, "requests", "Requests answered out of a shared call.", _MODEL),
    Metric("tidegate_spillover_attempts", _C, "attempts",
           "Attempts on fallback providers; cost_cap: the money was spent.",
           ("model", "upstream", "outcome"), _FIRST),
    Metric("tidegate_spillover_cost", _C, "money", "Money spent at fallback providers.", ("upstream",),
           _FIRST),
)  # fmt: skip
LATENCY = (
    Metric("tidegate_queue_wait_seconds", _H, "seconds", "Time in the queue.", _MODEL),
    Metric("tidegate_ttft_seconds", _H, "seconds", "Time to the first body byte.", _MODEL),
    Metric("tidegate_itl_seconds", _H, "seconds", "Gap between chunks of a stream.", _MODEL),
    Metric("tidegate_e2e_seconds", _H, "seconds", "Time of a served request.", _MODEL),
    Metric("tidegate_ttft_part_seconds", _H, "seconds",
           "The parts of the time to first token of served streams: queue; network, what the last attempt "
           "took without the engine (external servers: the smallest round trip); engine; gateway, all else.",
           ("model", "part")),
    Metric("tidegate_e2e_part_seconds", _H, "seconds",
           "The same parts of the time of a served request. The engine's has the time for which the client "
           "did not read.", ("model", "part")),
    Metric("tidegate_itl_part_seconds", _H, "seconds",
           "The mean gap of a served stream in the engine; what it grew by on the network; and the mean time "
           "of an event in the gateway, which delays all alike. Not of external servers.", ("model", "part")),
    Metric("tidegate_served_streams", _C, "streams",
           "Served streams by time to the first byte and mean gap: the limits of the buckets.",
           ("model", "ttft_le", "itl_le")),
    Metric("tidegate_slo_judged", _C, "streams", "Complete streams that were judged by the SLO.", _MODEL),
    Metric("tidegate_slo_met", _C, "streams",
           "Streams within the SLO's limit of ttft, of itl, and of both (the goodput).", ("model", "target")),
    Metric("tidegate_ttft_prediction_error_seconds", _H, "seconds",
           "Predicted minus actual time from a replica's request to its first token.", _MODEL),
    Metric("tidegate_ttft_prediction_error_ratio", _H, "ratio",
           "Absolute error of the predicted time to the first token, as a fraction of the actual.", _MODEL),
    Metric("tidegate_replica_stalls", _C, "stalls",
           "Times that nothing of a stream came for 2 s although the replica's engine stepped and the client "
           "read.", _REPLICA, _FIRST),
    Metric("tidegate_replica_resets", _C, "connections",
           "Connections to a replica that were reset or closed before the answer was complete.", _REPLICA,
           _FIRST),
    Metric("tidegate_round_trip_seconds", _G, "seconds",
           "The smallest round trip between this gateway and a replica in some minutes, by TCP.", _REPLICA),
    Metric("tidegate_external_servers", _G, "servers",
           "Servers of external models by shape, mode and whether they serve (`ready`) or not (`stopped`).",
           ("model", "shape", "mode", "state"), "with external models"),
    Metric("tidegate_external_server_adapters", _G, "servers",
           "Servers of an external model that serve an adapter.", _ADAPTER, "with external models"),
)  # fmt: skip
TOKENS = (
    Metric("tidegate_tokens", _C, "tokens", "Tokens of answers; what was cached is a part of the prompt.",
           ("model", "kind")),
    Metric("tidegate_cached_prompt_tokens", _C, "tokens",
           "Prompt tokens that routing predicted to be cached, and those that the engine reported.",
           ("model", "kind"), _FIRST),
    Metric("tidegate_cached_prompt_tokens_error", _C, "tokens",
           "By how many tokens a prompt's predicted cached tokens were above or below the reported.",
           ("model", "sign"), _FIRST),
)  # fmt: skip
QUEUE = (
    Metric("tidegate_queue_depth", _G, "requests", "Requests that wait for a replica.",
           ("model", "priority")),
    Metric("tidegate_queue_bytes", _G, "bytes", "Bytes of the requests that wait.", _MODEL),
    Metric("tidegate_queue_refused", _C, "requests", "Requests that the queue rejected.",
           ("model", "reason"), _FIRST),
    Metric("tidegate_queue_displaced", _C, "requests", "Waiting requests that made room for others.", _MODEL),
    Metric("tidegate_queue_foreseen", _C, "requests", "Requests whose wait was predicted and then measured.",
           _MODEL),
    Metric("tidegate_queue_foresight_error_seconds", _C, "seconds",
           "By how much predicted waits were too long or short.", ("model", "sign")),
)  # fmt: skip
TENANTS = (
    Metric("tidegate_tenant_requests", _C, "requests",
           "Requests of a tenant by outcome: ok, cancelled, or the reason of a rejection.",
           ("tenant", "outcome")),
    Metric("tidegate_tenant_queue_seconds", _C, "seconds",
           "Time that a tenant's requests spent in the queue, rejected ones included.", ("tenant",)),
    Metric("tidegate_tenant_tokens", _C, "tokens",
           "Tokens of answers to a tenant; what was cached is a part of the prompt.", ("tenant", "kind")),
    Metric("tidegate_limit_exceeded", _C, "requests",
           "Requests over a limit of their tenant or key (of), by the limit: refused, or counted in dry_run.",
           ("tenant", "limit", "of", "outcome"), _FIRST),
    Metric("tidegate_usage_unrecorded_requests", _C, "requests",
           "Requests that are in no ledger: there was no room to record their usage, as on a full disk."),
    Metric("tidegate_ledger_waiting_requests", _G, "requests",
           "Recorded requests that are not in the ledger yet, those in flight included."),
    Metric("tidegate_ledger_behind_seconds", _G, "seconds",
           "Since all that was complete was in the ledger: over a second when the database is away."),
    Metric("tidegate_ledger_lost_requests", _G, "requests",
           "Recorded requests whose tenant a power failure lost; since the accounting process started."),
)  # fmt: skip
GATEWAY_ADAPTERS = (
    Metric("tidegate_adapter_requests", _C, "requests", "Requests for an adapter by outcome.",
           ("model", "adapter", "outcome")),
    Metric("tidegate_adapter_tokens", _C, "tokens",
           "Tokens of answers of an adapter; what was cached is a part of the prompt.",
           ("model", "adapter", "kind")),
    Metric("tidegate_adapter_ttft_seconds", _H, "seconds",
           "Time to the first body byte of an adapter's streams.", _ADAPTER),
)  # fmt: skip
GEN_AI = (
    Metric("gen_ai_server_request_duration_seconds", _H, "seconds",
           "gen_ai.server.request.duration: time of a request; error_type is the reason of one that failed.",
           (*_OPERATION, "error_type")),
    Metric("gen_ai_server_time_to_first_token_seconds", _H, "seconds",
           "gen_ai.server.time_to_first_token: of served streams.", _OPERATION),
    Metric("gen_ai_server_time_per_output_token_seconds", _H, "seconds",
           "gen_ai.server.time_per_output_token: mean gap between the events of a served stream.",
           _OPERATION),
    Metric("gen_ai_client_token_usage", _H, "tokens",
           "gen_ai.client.token.usage: tokens of a served request, input or output.",
           (*_OPERATION, "gen_ai_token_type")),
)  # fmt: skip
CONTROL = (
    Metric("tidegate_replicas_desired", _G, "replicas", "What the policy proposes, before guardrails.",
           _MODEL),
    Metric("tidegate_replicas_target", _G, "replicas", "The count in force, which replicas are moved to.",
           _MODEL),
    Metric("tidegate_replicas_min", _G, "replicas", "The lower bound of the count in the mode.", _MODEL),
    Metric("tidegate_replicas_max", _G, "replicas", "The upper bound of the count in the mode.", _MODEL),
    Metric("tidegate_replicas", _G, "replicas", "Replicas by shape and state.", ("model", "shape", "state")),
    Metric("tidegate_mode", _G, "", "1 for the mode in force, 0 for the others.", ("model", "mode")),
    Metric("tidegate_settled", _G, "", "1 once the target was reached, 0 during a switch or a rollout.",
           _MODEL),
    Metric("tidegate_override", _G, "", "1 under a manual override.", _MODEL),
    Metric("tidegate_decisions", _C, "decisions",
           "Decisions by what they change (none, up, down, mode) and by the guardrail that set the count "
           "(policy: none did).", ("model", "change", "rule")),
    Metric("tidegate_decision_age_seconds", _G, "seconds", "Since the last decision.", _MODEL),
    Metric("tidegate_signals_age_seconds", _G, "seconds",
           "Age of the oldest gateway report that decisions use.", _MODEL),
    Metric("tidegate_arrival_rate", _G, "requests per second", "Mean of the last 20 s.", _MODEL),
    Metric("tidegate_forecast_rate", _G, "requests per second",
           "The rate expected when a replica started now is ready, and its upper bound (high).",
           ("model", "bound"), "with a policy that forecasts"),
    Metric("tidegate_forecasts", _C, "forecasts", "Forecasts whose instant has come.", _MODEL,
           "with a policy that forecasts"),
    Metric("tidegate_forecast_error", _C, "requests per second",
           "The regret of forecasts: by how much they were above or below the rate that came, in sum.",
           ("model", "sign"), "with a policy that forecasts"),
    Metric("tidegate_unserved_rate", _G, "requests per second",
           "The load that budgets and bounds leave unserved.", _MODEL),
    Metric("tidegate_replica_capacity_rate", _G, "requests per second",
           "What one replica can serve within the SLO (slo), and without one (max).", ("model", "bound")),
    Metric("tidegate_engine_model_error_ratio", _G, "ratio",
           "Relative error of the engine model on steps that it was not fitted to.", _MODEL),
    Metric("tidegate_engine_model_version", _G, "", "0: as shipped, never fitted.", _MODEL),
    Metric("tidegate_start_seconds", _G, "seconds", "Median of the last starts of a shape, by path.",
           ("model", "shape", "path")),
    Metric("tidegate_start_failures", _G, "starts", "Failed starts in a row of the desired layer.", _MODEL),
    Metric("tidegate_engine_restarts", _C, "restarts", "Engines that were started again in place.", _MODEL),
    Metric("tidegate_control_failing", _G, "", "1 while a part of the control loop fails for the model.",
           _MODEL),
    Metric("tidegate_slo_seconds", _G, "seconds", "The SLO's limits of the 95th percentiles.",
           ("model", "target"), "with an SLO"),
    Metric("tidegate_slo_attainment_ratio", _G, "ratio", "The fraction of streams that must meet the SLO.",
           _MODEL),
    Metric("tidegate_budget", _G, "by resource", "The budget of gpus, cpus, watts and cost_per_h.",
           ("resource",), "with a budget"),
    Metric("tidegate_budget_held", _G, "by resource", "What replicas take of gpus and cpus.", ("resource",)),
    Metric("tidegate_controller_ticks", _C, "ticks", "Iterations of the control loop."),
    Metric("tidegate_controller_tick_seconds", _C, "seconds", "Time spent in them."),
)  # fmt: skip
REPLICAS = (
    Metric("tidegate_replica_running", _G, "requests", "Requests that the engine runs.", _REPLICA),
    Metric("tidegate_replica_waiting", _G, "requests", "Requests that wait in the engine.", _REPLICA),
    Metric("tidegate_replica_deferred", _G, "requests",
           "Of these, requests that were passed over: no adapter slot was free, for example.", _REPLICA),
    Metric("tidegate_replica_in_flight", _G, "requests", "Requests inside the guard.", _REPLICA),
    Metric("tidegate_replica_bound", _G, "requests", "The most that the guard admits.", _REPLICA),
    Metric("tidegate_replica_kv_used_ratio", _G, "ratio", "KV cache in use.", _REPLICA, _AWAKE),
    Metric("tidegate_replica_scheduled_tokens", _C, "tokens", "Tokens in the engine's steps.", _REPLICA),
    Metric("tidegate_replica_preempted", _C, "requests", "Requests that lost their KV cache.", _REPLICA),
    Metric("tidegate_replica_slowness_ratio", _G, "ratio",
           "Time of its steps, divided by that of the engine model.", _REPLICA),
    Metric("tidegate_replica_adapters", _G, "adapters", "Adapters that are loaded.", _REPLICA),
    Metric("tidegate_replica_heartbeat_age_seconds", _G, "seconds", "Since its last heartbeat.", _REPLICA),
    Metric("tidegate_replica_power_watts", _G, "watts", "Power of its GPUs.", _REPLICA, _AWAKE_GPU),
    Metric("tidegate_replica_energy_joules", _C, "joules", "Energy of its GPUs since their driver started.",
           _REPLICA, _AWAKE_GPU),
    Metric("tidegate_energy_joules", _C, "joules",
           "Energy of a model's GPUs by the adapter of the tokens that were computed; _base: without one, "
           "_idle: minutes without a token.", _ADAPTER, _GPU),
    Metric("tidegate_energy_tokens", _C, "tokens",
           "Tokens that this energy was spent on: uncached ones of prompts, and answers.", _ADAPTER, _GPU),
    Metric("tidegate_replica_temperature_celsius", _G, "celsius", "Of the hottest GPU.", _REPLICA, _GPU),
    Metric("tidegate_replica_throttled", _G, "", "1 for each reason for which GPUs are throttled.",
           (*_REPLICA, "reason"), _GPU),
    Metric("tidegate_replica_xid", _G, "", "The last XID error of its GPUs, 0 without one.", _REPLICA, _GPU),
    Metric("tidegate_replica_gpu_clock_hertz", _G, "hertz", "Clock of the slowest GPU.", _REPLICA, _GPU),
    Metric("tidegate_replica_gpu_max_clock_hertz", _G, "hertz", "The most that it can be.", _REPLICA, _GPU),
    Metric("tidegate_replica_gpu_memory_used_bytes", _G, "bytes", "Memory in use on its GPUs.", _REPLICA,
           _GPU),
    Metric("tidegate_replica_gpu_memory_bytes", _G, "bytes", "Memory of its GPUs.", _REPLICA, _GPU),
    Metric("tidegate_replica_gpu_ecc_errors", _C, "errors", "ECC errors of their memory.",
           (*_REPLICA, "kind"), _GPU),
    Metric("tidegate_replica_gpu_link_bytes", _C, "bytes", "Bytes from (tx) and to (rx) its GPUs.",
           (*_REPLICA, "link", "direction"), _GPU),
    Metric("tidegate_replica_gpu_link_errors", _C, "errors", "Errors of PCIe and NVLink.",
           (*_REPLICA, "link"), _GPU),
)  # fmt: skip
ADAPTERS = (
    Metric("tidegate_adapters", _G, "adapters", "Names in the catalog.", _MODEL),
    Metric("tidegate_adapter_replicas", _G, "replicas", "Replicas that have it loaded.", _ADAPTER),
    Metric("tidegate_adapter_loads", _C, "loads", "Loads on all replicas.", _ADAPTER),
    Metric("tidegate_adapter_load_seconds", _G, "seconds", "Mean time of recent loads.", _ADAPTER),
    Metric("tidegate_adapter_hit_ratio", _G, "ratio", "Recent requests that found it loaded.", _ADAPTER),
)  # fmt: skip
PROCESSES = (
    Metric("tidegate_process_cpu_seconds", _C, "seconds", "Processor time; over restarts of gateway workers.",
           ("process",)),
    Metric("tidegate_process_resident_memory_bytes", _G, "bytes", "Resident memory.", ("process",)),
    Metric("tidegate_process_open_fds", _G, "descriptors", "Open file descriptors.", ("process",)),
    Metric("tidegate_process_max_fds", _G, "descriptors", "Their limit.", ("process",)),
    Metric("tidegate_process_start_time_seconds", _G, "seconds", "When it started, in Unix time.",
           ("process",)),
    Metric("tidegate_event_loop_lag_seconds", _G, "seconds",
           "How late the event loop was at most in five seconds.", ("process",)),
    Metric("tidegate_build_info", _G, "", "1, with the version.", ("version",)),
    Metric("tidegate_scrape_missing", _G, "sources",
           "Replicas and controllers that this scrape left out because they did not answer in time.",
           ("source",)),
    Metric("tidegate_scrape_misses", _C, "sources", "The same, over all scrapes.", ("source",)),
)  # fmt: skip

GROUPS: Final = (
    MetricGroup("Requests", WORKERS, REQUESTS),
    MetricGroup("Latency", WORKERS, LATENCY),
    MetricGroup("Tokens", WORKERS, TOKENS),
    MetricGroup("Queue", WORKERS, QUEUE),
    MetricGroup("Tenants", WORKERS, TENANTS),
    MetricGroup("Adapters in the gateway", WORKERS, GATEWAY_ADAPTERS),
    MetricGroup("OpenTelemetry GenAI", WORKERS, GEN_AI),
    MetricGroup("Control", _CONTROLLER, CONTROL),
    MetricGroup("Replicas", _CONTROLLER, REPLICAS),
    MetricGroup("Adapters on replicas", _CONTROLLER, ADAPTERS),
    MetricGroup("Processes and scrapes", "Gateway workers and the controller.", PROCESSES),
)
METRICS: Final = {metric.name: metric for group in GROUPS for metric in group.metrics}
