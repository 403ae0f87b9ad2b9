"""A deployment document is accepted whole or refused with path, value and expectation."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from policy.config.deployment import Deployment, ReplicaBounds
from policy.config.media_hosts import allowed_hosts
from policy.deployment_file.parse import parse
from policy.errors import ConfigError, TargetError
from tests.policy.example_documents import EXTERNAL, GOOD, TENANTS, changed

DEPLOYMENTS = sorted((Path(__file__).parents[3] / "deployments").glob("*.yaml"))

NIGHT = {"start": "0 22 * * *", "end": "0 6 * * *"}
SCALE, BY_PRIORITY = "models[0].control.scale", "models[0].control.slo_by_priority"
# What is changed, to what, what is expected there, and where it is refused: by default where it was changed,
# with a dot or a bracket first relative to it.
Rows = list[tuple[Any, ...]]
REFUSED: Rows = [
    (SCALE, {"schedules": [NIGHT | {"end": "0 6 * *"}]}, "five fields", ".schedules[0].end"),
    (BY_PRIORITY, {"hurry": {}}, "one of: critical, standard", ".hurry"),
    (SCALE, {"schedules": [NIGHT]}, "min or max", ".schedules[0]"),
    (SCALE, {"schedules": [NIGHT | {"min": 99}]}, "the largest replicas.max", ".schedules[0].min"),
    (SCALE, {"schedules": [NIGHT | {"min": 2, "max": 1}]}, "at least 2", ".schedules[0].max"),
    (SCALE, {"rates_up": [{"period_s": 60}]}, "exactly one of replicas and fraction", ".rates_up[0]"),
    ("modells", [], "did you mean 'models'"), ("models", [], "length >= 1"), ("models", "m", "array"),
    ("models", GOOD["models"] * 2, "", "[1].name"),
    ("models[0].adapters", {"sources": [{"name": "a", "path": "p"}, {"name": "a", "path": "q"}]},
     "no other adapter", ".sources[1].name"),
    ("models[0].adapters", {"sources": [{"name": "a", "path": "p", "tenants": ["acme"]}]},
     "none are in the deployment file", ".sources[0].tenants[0]"),
    ("models[0].name", ..., "required"), ("models[0].name", "../etc", "matches"),
    ("models[0].name", 7, "str"), ("models[0].engin", "vllm", "did you mean 'engine'"),
    ("models[0].engine", "vlm", "vllm, sim, external"), ("models[0].runner", "draw", "generate, pooling"),
    ("models[0].source", "", "package:NAME"), ("models[0].urls", ["http://h:1"], "engine: external"),
    ("models[0].shapes", {}, "at least one"), ("models[0].modes", {}, "at least one"),
    ("models[0].mode", "huge", "single-large, multi-replica"),
    ("models[0].shapes.Big", {"cpus": 1}, "shape name"), ("models[0].shapes.small", {}, "at least 1"),
    ("models[0].shapes.small.cpus", "one", "int"), ("models[0].shapes.small.cpus", -1, ">= 0"),
    ("models[0].shapes.large.cpus", 3, "budget.cpus = 2"),
    ("models[0].shapes.large.gpu", 3, "did you mean 'gpus'"),
    ("models[0].shapes.large.tensor_parallel", 2, "without GPUs"),
    ("models[0].shapes.large", {"gpus": 0.5, "tensor_parallel": 2}, "fraction", ".tensor_parallel"),
    ("models[0].shapes.large", {"gpus": 1.5}, "< 1", ".gpus"),
    ("models[0].shapes.large", {"gpus": 0.5, "engine_args": {"gpu_memory_utilization": 0.6}}, "at most 0.5",
     ".engine_args.gpu_memory_utilization"),
    ("models[0].shapes.large", {"cpus": 1, "accelerator_type": "H100"}, "without GPUs", ".accelerator_type"),
    ("models[0].shapes.large", {"gpus": 1, "resources": {"GPU": 1}}, "keys of their own", ".resources.GPU"),
    ("models[0].shapes.large.max_in_flight", 0, ">= 1"),
    ("models[0].modes.auto", {"shape": "small"}, "other than auto"),
    ("models[0].modes.single-large.shape", "huge", "large, small"),
    ("models[0].modes.single-large.replicas", 0, ">= 1"),
    ("models[0].modes.multi-replica.replicas", {"min": 3, "max": 2}, "replicas.max = 2", ".min"),
    ("models[0].modes.multi-replica.replicas", {"min": 1, "max": 3}, "at most 2"),
    ("models[0].modes.multi-replica.replicas", {"most": 3}, "min, max", ".most"),
    ("models[0].engine_args", {"port": 80}, "does not set itself", ".port"),
    ("models[0].engine_args", {"api-key": "x"}, "does not set itself", ".api-key"),
    ("models[0].engine_args", {"max-model-len": 1}, "snake_case", ".max-model-len"),
    ("models[0].engine_args", {"max_num_seq": 1}, "mean 'max_num_seqs'", ".max_num_seq"),
    ("models[0].engine_args", {"frobnicate": 1}, "an argument of vLLM", ".frobnicate"),
    ("models[0].engine_args", {"config": "f.yaml"}, "does not set itself", ".config"),
    *(("models[0].engine_args", {name: value}, "one engine on one node", f".{name}") for name,
     value in [("pipeline_parallel_size", 2), ("nnodes", 2), ("data_parallel_size_local", 2), ("node_rank",
     0), ("distributed_executor_backend", "ray")]),
    ("models[0].shapes.large.engine_args", {"model": "x"}, "does not set itself", ".model"),
    ("models[0].env", {"VLLM_SERVER_DEV_MODE": "1"}, "does not guard", ".VLLM_SERVER_DEV_MODE"),
    ("models[0].env", {"A": 1}, "str", ".A"), ("models[0].control.mode.drain_timeout_s", 0, "> 0"),
    ("models[0].control.start_timeout_s", "soon", "float"),
    *(("tracing.endpoint", url, "OTLP over HTTP") for url in ("127.0.0.1:4318", "http://h:4318?a",
        "grpc://h:1")),
    ("tracing.sample_ratio", 1.5, "<= 1"), ("tracing.max_rate", 0, ">= 1"), ("tracing.slow_s", 0, "> 0"),
    ("budget.cpus", 1, "budget.cpus = 1", "models[0].shapes.large.cpus"),
    ("budget.gpu", 1, "did you mean 'gpus'"),
    *(("cluster.controller", at, "HOST:PORT")
      for at in ("7070", "h:99999", "h:0", "h:1,h", "h:1,", "10.0.0.256:7070", "xn--a:7070")),
    ("cluster.controller", "h:1,h:1", "each address once"),
    ("cluster.controller", "h:1,h:2", "a database that all controllers use", "store"),
    ("cluster.leader_election", {"lease_s": 0.5}, ">= 1", "cluster.leader_election.lease_s"),
    ("cluster.leader_election", {}, "a database that all controllers use", "store"),
    ("cluster.address", "10.0.0.1:6379", "cluster.address = '10.0.0.1:6379'", "cluster.controller"),
    *(("cluster.address", at, "every node of cluster.address", "cluster.controller")
     for at in ("ray://head:10001", "auto")),
    ("gateway.port", 70_000, "<= 65535"),
    ("gateway.port", 8081, "other than gateway.port = 8081", "gateway.admin_port"),
    ("gateway", {"port": 8081, "host": "0.0.0.0"}, "other than gateway.port = 8081", ".admin_port"),
    ("gateway.port", 7070, "other than gateway.port = 7070", "cluster.controller"),
    ("gateway.admin_port", 65_536, "<= 65535"),
    ("cluster.gcs_port", 16_379, "other than 10002 to 19999, which Ray's workers take"),
    ("cluster.gcs_port", 8265, "other than cluster.gcs_port = 8265", "cluster.dashboard_port"),
    ("cluster.gcs_port", 80, ">= 1024"), ("cluster.dashboard_port", 19_999, "which Ray's workers take"),
    ("cluster.controller", "localhost:8080", "other than gateway.port = 8080"),
    ("cluster.controller", "127.0.0.1:10002", "which Ray's workers take"),
    *(("gateway.admin_allowed_hosts", ["ops", host], "without a port", "[1]") for host in ("",
     "ops.example:80", "http://ops.example", "*")),
    *(("gateway.cors", ["*", origin], "SCHEME://HOST", "[1]") for origin in ("", "app.example",
     "https://app.example/", "https://App.example", "https://*.example")),
    ("gateway.workers", 0, ">= 1"), ("gateway.worker", 2, "did you mean 'workers'"),
    ("gateway.coalesce.window_s", 1.5, "<= 1"), ("gateway.coalesce.max_inputs", 1, ">= 2"),
    ("gateway.coalesce.windows_s", 1, "did you mean 'window_s'"),
    ("gateway.eject.base_s", 400.0, "gateway.eject.max_s = 300"), ("gateway.eject.max_fraction", 1.5, "<= 1"),
    ("gateway.retry.budget", -1, ">= 0"),
    ("gateway", {"queue_timeout_s": 0.5, "coalesce": {"window_s": 0.5}}, "gateway.queue_timeout_s = 0.5",
     ".coalesce.window_s"),
    ("models[0].profile", "l5-8b", "l4-8b"), ("models[0].sim", {"profile": "huge"}, "sim-small", ".profile"),
    ("models[0].control.slo", {"ttft_p95_s": 0}, "> 0", ".ttft_p95_s"),
    ("models[0].control.guard", {"stale_s": 0.5}, ">= 3", ".stale_s"),
    *(("models[0].adapters", {"private_hosts": [host]}, "10.0.0.0/8", ".private_hosts[0]") for host in ("",
     "10.0.0.0/33", "http://minio", "minio:9000")),
    ("models[0].adapters.slots_per_replica", 0, ">= 1"),
    ("store", "mysql://h/d", "sqlite:///PATH or postgresql://HOST/NAME"),
    *(("store", url, "sqlite:///PATH") for url in ("tidegate.db", "sqlite://", "sqlite:///",
     "sqlite:///x.db?mode=memory")),
    *(("store", url, "postgresql://HOST/NAME") for url in ("postgresql://", "postgresql://h/d e")),
]  # fmt: skip
REFUSED_EXTERNAL: Rows = [
    ("models[0].urls", [], "at least one"),
    ("models[0].urls", ["http://user:key@h:1"], "http(s)://HOST:PORT", "[0]"),
    ("models[0].urls", ["ftp://h:1"], "http(s)://HOST:PORT", "[0]"),
    ("models[0].urls", ["http://h:1", "http://h:2/v2"], "http(s)://HOST:PORT", "[1]"),
    ("models[0].urls", ["http://h:1", {"url": "http://h:x"}], "http(s)://HOST:PORT", "[1].url"),
    *(("models[0].urls", [f"http://{host}:1"], "http(s)://HOST:PORT", "[0]") for host in ("10.0.0.256",
     "192.168.010.5")),
    ("models[0].urls", ["http://h:1", {"url": "http://h:1/v1"}], "models[0].urls[0]", "[1].url"),
    ("models[0].urls", [{"model": "m"}], "required", "[0].url"),
    ("models[0].urls", [{"url": "http://h:1", "key": 1}], "model, key_file", "[0].key"),
    ("models[0].urls", [{"url": "http://h:1", "key_file": "f", "key_env": "K"}], "nothing: key_file is set",
     "[0].key_env"),
    ("models[0].urls", [{"url": "http://h:1", "ca_file": "f"}], "not https", "[0].ca_file"),
    ("models[0].urls", [{"url": "http://h:1", "kv_events_port": 0}], ">= 1", "[0].kv_events_port"),
    (
        "models[0].urls",
        [{"url": "http://h:1", "kv_events_replay_port": 1}],
        "kv_events_port is not set",
        "[0].kv_events_replay_port",
    ),
    (
        "models[0].urls",
        [{"url": "http://h:1", "kv_events_port": 1, "kv_events_replay_port": 1}],
        "another port than kv_events_port",
        "[0].kv_events_replay_port",
    ),
    ("models[0].source", "package:x", "does not deploy"),
    ("models[0].mode", "m", "does not deploy"),
    ("models[0].shapes", {"s": {"cpus": 1, "engine_args": {"seed": 1}}}, "its pods have theirs",
     ".s.engine_args"),
    ("models[0].shapes", {"s": {"gpus": 2}}, "one rank per GPU", ".s.tensor_parallel"),
    ("models[0].shapes", {"s": {"cpus": 1, "workload": "deployment/s"}}, "a mode", "models[0].modes"),
    ("models[0].modes", {"m": {"shape": "s"}}, "one of the shapes", ".m.shape"),
    ("models[0].urls", [{"url": "http://h:1", "shape": "s"}], "declares no shapes", "[0].shape"),
    ("models[0].urls", ["http://h:1", {"url": "http://h:2", "mode": "m"}], "declares no modes", "[1].mode"),
    ("models[0].discovery", {"dns": "h:1", "shape": "s"}, "declares no shapes", ".shape"),
]  # fmt: skip
REFUSED_TENANTS: Rows = [
    ("tenants[0].name", "a b", "matches"), ("tenants[1].name", "acme", "no other tenant"),
    ("tenants[0].keys_sha256", ["A" * 64], "64 hex digits", "[0]"),
    ("tenants[1].keys_sha256[1]", "a" * 64, "tenant 'acme' has it"),
    ("tenants[1].keys_sha256[1]", "b" * 64, "tenant 'bits' has it"), ("tenants[0].weight", 0, "> 0"),
    ("tenants[0].priority", "urgent", "critical, standard, sheddable, batch"),
    ("tenants[0].keys", [], "one of the keys: rpm_limit"), ("tenants[0].rpm_limit", 0, ">= 1"),
    ("tenants[0].models", ["nope"], "one of the models", "[0]"),
    ("tenants[0].dry_run", ["tpm_limit"], "a limit that is set: none is", "[0]"),
    ("tenants[0].dry_run", ["rpm"], "rpm_limit, tpm_limit", "[0]"),
    ("tenants[0].features", ["video"], "tools, images", "[0]"),
    ("tenants[0].budget_duration", "7d", "nothing without max_budget"),
    ("tenants[0]", {"name": "acme", "max_budget": 1, "budget_duration": "7 days"}, "such as 1mo",
     ".budget_duration"),
    ("tenants[0].metadata", {"a": "b" * 20_000}, "at most 16384 bytes of JSON", "tenants[0]"),
    ("upstreams[0].name", "", "matches"),
    *(("upstreams[0].url", url, "http(s)://HOST") for url in ("ftp://h", "https://", "https://h:0/v1",
     "https://h:x/v1", "https://h/v1?key=1", "https://h/v1\r\nx: y")),
    ("upstreams[0].models", {}, "length >= 1"),
    ("upstreams[0].models", {"n": "x"}, "or MODEL:ADAPTER: m", ".n"),
    ("upstreams[0].models", {"m": ""}, "the upstream calls it", ".m"),
    ("upstreams[0].models", {"m": 3}, "str", ".m"),
    ("upstreams[0].price", {"input": 1}, "required", ".output"), ("upstreams[0].cost_cap_per_h", -1, ">= 0"),
    ("upstreams[0].cost_cap_per_h", ..., "required"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("document", "row"),
    [
        *((GOOD, row) for row in REFUSED),
        *((EXTERNAL, row) for row in REFUSED_EXTERNAL),
        *((TENANTS, row) for row in REFUSED_TENANTS),
    ],
)
def test_refusals_explain(document: dict[str, Any], row: tuple[Any, ...]) -> None:
    at, value, expected, path = (*row, "")[:4]
    path = path if path[:1] not in ("", ".", "[") else at + path
    with pytest.raises(ConfigError) as caught:
        parse(changed(document, at, value))
    assert (caught.value.path, expected in caught.value.expected) == (path, True), str(caught.value)
    assert repr(caught.value.value) in str(caught.value)


@pytest.mark.parametrize(
    ("at", "value"),
    [
        ("tenants[0].keys_sha256", "KEY-1"),
        ("tenants[0].keys_sha256", ["KEY-1"]),
        ("tenants[0].keys_sha256", ["KEY-1", 7]),
        ("tenants[0].keys", ["KEY-1"]),
        ("tenants[0].key", "KEY-1"),
        ("tenants[0]", "KEY-1"),
        ("tenants[0]", {"KEY-1": {}}),
        ("tenants", {"acme": "KEY-1"}),
        ("upstreams[0].key", "KEY-1"),
        ("upstreams[0].api_key", "KEY-1"),
        ("upstreams[0].key_file", ["KEY-1"]),
        ("upstreams[0].url", "https://user:KEY-1@h/v1"),
        ("models[0].urls", [{"url": "http://h:1", "api_key": "KEY-1"}]),
    ],
)
def test_a_misplaced_key_is_refused_and_not_echoed(at: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(changed(TENANTS, at, value))
    assert "KEY-1" not in repr(caught.value.value)
    assert "KEY-1" not in caught.value.expected


@pytest.mark.parametrize(
    ("source", "at", "expected"),
    [
        ({}, ".name", "required"),
        ({"name": "a"}, "", "exactly one of path, source and versions"),
        ({"name": "a", "path": "p", "source": "s"}, "", "exactly one of path, source and versions"),
        ({"name": "a", "path": "p", "versions": {"v1": {"source": "s"}}}, "", "exactly one"),
        ({"name": "a", "paht": "p"}, ".paht", "did you mean 'path'"),
        ({"name": "a b", "path": "p"}, ".name", "a name that matches"),
        ({"name": "a@b", "path": "p"}, ".name", "a name that matches"),
        ({"name": "m", "path": "p"}, ".name", "no other adapter of it and no model has"),
        ({"name": "a", "path": "s3://b/k"}, ".path", "a URL is written as source"),
        ({"name": "a", "path": "hf:o/n"}, ".path", "a URL is written as source"),
        ({"name": "a", "source": "hf:name"}, ".source", "hf:ORG/NAME[@REVISION]"),
        ({"name": "a", "source": "hf:o/n/x"}, ".source", "hf:ORG/NAME[@REVISION]"),
        ({"name": "a", "source": "package:x"}, ".source", "a path, http(s)://"),
        ({"name": "a", "source": "x\ny"}, ".source", "a path, http(s)://"),
        ({"name": "a", "versions": {"v1": {"weight": 1}}}, ".versions.v1.source", "required"),
        ({"name": "a", "versions": {"v1": {"source": ""}}}, ".versions.v1.source", "a path, http(s)://"),
        ({"name": "a", "versions": {"v 1": {"source": "s"}}}, ".versions.v 1", "a name that matches"),
        ({"name": "a", "versions": {"v1": {"source": "s", "weight": -1}}}, ".versions.v1.weight", ">= 0"),
        ({"name": "a", "versions": {"v1": {"source": "s", "weight": 0}}}, ".versions", "above 0"),
        (
            {"name": "a", "versions": {"v1": {"source": "s"}, "v2": {"source": "s"}}},
            ".versions.v2.source",
            "no other version has (v1 has it)",
        ),
        ({"name": "a", "path": "p", "tenants": ["acme", "nobody"]}, ".tenants[1]", "tenants: acme, bits"),
    ],
)
def test_invalid_adapters_are_refused(source: dict[str, Any], at: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(changed(TENANTS, "models[0].adapters", {"sources": [{"name": "z", "path": "z"}, source]}))
    assert (caught.value.path, expected in caught.value.expected) == (
        f"models[0].adapters.sources[1]{at}",
        True,
    ), str(caught.value)


def test_an_external_engine_has_slots_but_loads_nothing() -> None:
    adapters = {"slots_per_replica": 4, "sources": [{"name": "a", "path": "p"}]}
    with pytest.raises(ConfigError) as caught:
        parse(changed(EXTERNAL, "models[0].adapters", adapters))
    assert caught.value.path == "models[0].adapters.sources"
    spec = parse(changed(EXTERNAL, "models[0].adapters", {"slots_per_replica": 4})).model("e")
    assert spec.adapters is not None
    assert spec.adapters.slots_per_replica == 4


def test_engine_arguments_may_say_what_a_replica_on_one_node_has() -> None:
    one = {
        "pipeline_parallel_size": 1,
        "nnodes": 1,
        "distributed_executor_backend": "mp",
        "master_addr": None,
    }
    assert parse(changed(GOOD, "models[0].engine_args", one)).models[0].engine_args == one


@pytest.mark.parametrize("at", ["models[0].engine_args", "models[0].shapes.small.engine_args"])
def test_engine_arguments_do_not_repeat_the_section(at: str) -> None:
    alone = changed(GOOD, at, {"enable_lora": True, "max_loras": 2})
    parse(alone)
    with pytest.raises(ConfigError) as caught:
        parse(changed(alone, "models[0].adapters", {}))
    assert caught.value.path == f"{at}.enable_lora"


@pytest.mark.parametrize(
    "store",
    [
        "mysql://user:KEY-1@h/d", "postgresql://user:KEY-1/d", "postgresql://user@h:KEY-1/d",
        "postgresql://user:KEY-1@h:65536/d", "postgresql://user:p@KEY-1@h/d",
        "postgresql://h/d?password=KEY-1 x", "user:KEY-1@h/d", "postgresql:user:KEY-1",
    ],
)  # fmt: skip
def test_a_store_that_cannot_be_read_is_refused_without_its_password(store: str) -> None:
    with pytest.raises(ConfigError, match="store: got") as caught:
        parse(changed(GOOD, "store", store))
    assert "KEY-1" not in str(caught.value)


@pytest.mark.parametrize(
    "store",
    [
        "postgresql://h", "postgres://h/d", "postgresql+psycopg://u@h:5432/d", "postgresql://[::1]:5432/d",
        "postgresql://u:p/?#w@h/d", "postgresql://a,b/d?target_session_attrs=read-write", "postgresql:///d",
        "postgresql://u@/d?host=/run/postgresql", "postgresql://?service=x", "postgresql:///d?host=a:1&host=b:2",
    ],
)  # fmt: skip
def test_each_form_of_a_postgresql_url_is_a_store(store: str) -> None:
    assert parse(changed(GOOD, "store", store)).store == store


@pytest.mark.parametrize(
    ("address", "controller"),
    [
        ("local", "127.0.0.1:7070"),
        ("127.0.0.2:6379", "127.0.0.1:7070"),
        ("ray://localhost:10001", "127.0.0.1:7070"),
        ("[::1]:6379", "127.0.0.1:7070"),
        ("10.0.0.1:6379", "10.0.0.1:7070"),
        ("10.0.0.1:6379", "127.example.org:7070"),
    ],
)
def test_a_controller_address_that_nodes_reach_is_accepted(address: str, controller: str) -> None:
    joined = changed(GOOD, "cluster", {"address": address, "controller": controller})
    assert parse(joined).cluster.address == address


@pytest.mark.parametrize(
    ("document", "at", "value"),
    [
        (GOOD, "gateway.port", 12_000),  # bound before Ray's workers, which skip it
        (GOOD, "gateway", {"port": 8081, "host": "127.0.0.2"}),
        (EXTERNAL, "gateway.port", 8265),
        (EXTERNAL, "cluster.gcs_port", 16_379),
        (GOOD, "cluster", {"address": "10.0.0.1:6379", "controller": "10.0.0.1:12000", "gcs_port": 8080}),
    ],
)
def test_ports_that_do_not_clash_are_valid(document: dict[str, Any], at: str, value: Any) -> None:
    parse(changed(document, at, value))


def test_external_models_need_no_reachable_controller() -> None:
    assert parse(changed(EXTERNAL, "cluster.address", "10.0.0.1:6379")).cluster.controller == "127.0.0.1:7070"


@pytest.mark.parametrize("document", [None, [], "models", 3])
def test_a_document_that_is_no_mapping_is_refused(document: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(document)
    assert caught.value.path == "$"


def test_a_valid_document_is_parsed() -> None:
    deployment = parse(GOOD)
    spec = deployment.model("m")
    assert spec.first_mode == "single-large"
    assert spec.modes["single-large"].bounds == ReplicaBounds(min=1, max=1)
    assert spec.modes["multi-replica"].bounds == ReplicaBounds(min=1, max=2)
    assert deployment.needs_controller
    assert not parse(EXTERNAL).needs_controller
    with pytest.raises(TargetError, match="this deployment has m"):
        deployment.model("n")


@pytest.mark.parametrize("path", DEPLOYMENTS, ids=lambda path: path.name)
def test_every_shipped_deployment_is_valid(path: Path) -> None:
    assert isinstance(parse(yaml.safe_load(path.read_text())), Deployment)


def test_the_tenants_example_works_with_the_keys_that_it_names() -> None:
    text = next(path for path in DEPLOYMENTS if path.name == "tenants.yaml").read_text()
    named = dict(re.findall(r"- ([0-9a-f]{64}) +# (\S+)", text))
    tenants = parse(yaml.safe_load(text)).tenants
    assert [tenant.name for tenant in tenants] == ["web", "nightly", "operator"]
    for tenant in tenants:
        (digest,) = tenant.keys_sha256
        assert hashlib.sha256(named[digest].encode()).hexdigest() == digest


def test_the_commented_part_of_an_example_is_valid() -> None:
    text = next(path for path in DEPLOYMENTS if path.name == "tenants.yaml").read_text()
    start = text.index("# upstreams:")
    whole = text[:start] + re.sub(r"^# ", "", text[start:], flags=re.MULTILINE)
    (upstream,) = parse(yaml.safe_load(whole)).upstreams
    assert (upstream.name, upstream.models, upstream.cost_cap_per_h) == ("cloud", {"sim": "their-model"}, 5)


@pytest.mark.parametrize(
    ("budget", "path", "needs"),
    [
        ({"watts": 15, "cpu_watts": 8}, "budget.watts", "at least 16, which m needs"),
        ({"cost_per_h": 1.0, "cpu_cost_per_h": 2.0}, "budget.cost_per_h", "at least 4, which m needs"),
    ],
)
def test_a_budget_that_holds_no_replica_is_refused(budget: dict[str, float], path: str, needs: str) -> None:
    modes = {"multi-replica": {"shape": "small", "replicas": {"min": 2, "max": 4}}}
    model = {"name": "m", "engine": "sim", "shapes": {"small": {"cpus": 1}}, "modes": modes}
    with pytest.raises(ConfigError, match=needs) as refused:
        parse({"models": [model], "budget": budget})
    assert refused.value.path == path
    large = {"single-large": {"shape": "small", "replicas": 1}}
    # Another mode fits the budget.
    if path == "budget.watts":
        assert parse({"models": [model | {"modes": modes | large}], "budget": budget})


def test_engines_send_their_spans_where_the_gateway_does_unless_they_say_where_to() -> None:
    model = GOOD["models"][0]
    given = [{}, {"otlp_traces_endpoint": "http://mine:4317"}, {"otlp_traces_endpoint": None}]
    models = [{**model, "name": f"m{i}", "engine_args": args} for i, args in enumerate(given)]
    models.append({**model, "name": "sim", "engine": "sim", "source": ""})
    tracing = {"tracing": {"endpoint": "http://c:4318/"}}
    ours, *others = parse(GOOD | {"models": models, "budget": {}} | tracing).models
    assert ours.engine_args == {"otlp_traces_endpoint": "http://c:4318/v1/traces"}
    assert ours.env["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] == "http/protobuf"
    assert [(spec.engine_args, spec.env) for spec in others] == [
        (args, dict(model.get("env", {}))) for args in [*given[1:], model.get("engine_args", {})]
    ]


def test_engines_fetch_media_from_the_gateways_hosts_unless_they_name_their_own() -> None:
    model = GOOD["models"][0]
    own = {"allowed_media_domains": ["Own.example"]}
    models = [{**model, "name": f"m{i}", "engine_args": args} for i, args in enumerate(({}, own))]
    models.append({**model, "name": "sim", "engine": "sim", "source": ""})
    document = GOOD | {"models": models, "budget": {}}
    deployment = parse(document | {"gateway": {"media_hosts": ["img.example"]}})
    ours, other, simulated = deployment.models
    assert ours.engine_args == {"allowed_media_domains": ["img.example"]}
    assert (other.engine_args, "allowed_media_domains" in simulated.engine_args) == (own, False)
    assert allowed_hosts(deployment) == {"img.example", "own.example"}
    assert allowed_hosts(parse(document)) == {"own.example"}
    for bad in ("https://img.example", "img.example:80", "IMG.example", "img.example/a", ""):
        with pytest.raises(ConfigError, match="name of a host") as refused:
            parse(document | {"gateway": {"media_hosts": [bad]}})
        assert refused.value.path == "gateway.media_hosts[0]"
