"""Parse the deployment file: decoded YAML into a checked :class:`policy.config.deployment.Deployment`."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from msgspec import structs, to_builtins

from policy.config.control import ScaleConfig
from policy.config.convert import convert, require
from policy.config.cron import cron
from policy.config.deployment import (
    ENTRY_NAME,
    FORBIDDEN_ENV,
    NAME,
    SHAPE_NAME,
    AdapterSource,
    Deployment,
    FallbackProviderConfig,
    Mode,
    ModelSpec,
    ResourceBudget,
    Shape,
)
from policy.config.engine_arguments import expected_instead
from policy.config.grpc_ports import GrpcPort
from policy.config.media_hosts import fetching
from policy.config.port_conflicts import check_ports, is_loopback
from policy.config.tenancy_checks import check_tenants
from policy.deployment_file.engine_tracing import traced
from policy.deployment_file.external_server_checks import (
    check_external,
    check_key,
    check_object,
    check_url,
    is_host,
)
from policy.deployment_file.gateway_checks import HOST, check_gateway, is_network
from policy.engine.builtin_profiles import profile
from policy.errors import ConfigError
from policy.scaling.budget_resources import ROUNDING
from policy.scaling.policies.registry import choose
from policy.types import EngineKind, Priority

_VISIBLE = re.compile(r"[!-~]+")
_PORT = re.compile(r"[0-9]{1,5}")
# Read as the driver's library does: a password may have / and ?, and without a host a Unix socket is used.
_SERVER = re.compile(r"([^:/]*(:[^@]*)?@)?(\[[^]/?]+\]|@?[^][/?:@]*)(:(?P<port>[0-9]{1,5}))?(/[^?]*)?(\?.*)?")
_HUB = re.compile(r"hf:[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*(@[A-Za-z0-9][A-Za-z0-9._/-]*)?")
# The section ``adapters`` sets them.
_RAY_RESOURCES = frozenset({"CPU", "GPU", "memory", "object_store_memory"})
_ADAPTER_ENGINE_ARGS = frozenset({"enable_lora", "max_loras", "max_lora_rank"})


def parse(document: object) -> Deployment:
    """Decode and check a whole document.

    Raises :class:`policy.errors.ConfigError` for unknown keys, wrong types, values out of range, modes of
    unknown shapes, shapes that do not fit the budget, a controller that other nodes cannot reach, keys shared
    by two tenants, and fallback providers for unknown models.
    """
    require(isinstance(document, Mapping), "$", document, "a mapping with the key 'models'")
    deployment = convert(document, Deployment, "")
    models: set[str] = set()
    for i, spec in enumerate(deployment.models):
        path = f"models[{i}]"
        _check_name(f"{path}.name", spec.name, models, "model", NAME)
        profile(spec.sim.profile, f"{path}.sim.profile")
        if spec.profile is not None:
            profile(spec.profile, f"{path}.profile")
        for name, slo in spec.control.slo_by_priority.items():
            at, known = f"{path}.control.slo_by_priority.{name}", f"one of: {', '.join(Priority)}"
            require(name in list(Priority), at, to_builtins(slo), known)
        choose(f"{path}.control.policy", spec.control.policy)
        if spec.control.shadow is not None:
            choose(f"{path}.control.shadow", spec.control.shadow)
        if spec.engine is EngineKind.EXTERNAL:
            check_external(path, spec)
        else:
            _check_deployed(path, spec)
        _check_layers(path, spec, deployment.budget if spec.is_scaled else ResourceBudget())
    tenants = {tenant.name for tenant in deployment.tenants}
    for i, spec in enumerate(deployment.models):
        _check_adapters(f"models[{i}]", spec, models, tenants)
    _check_cluster(deployment)
    check_gateway(deployment.gateway)
    for name, port in deployment.grpc_ports.items():
        _check_grpc_port(name, port)
    check_ports(deployment)
    _check_store(deployment.store)
    check_tenants(deployment.tenants, models)
    _check_upstreams(deployment.upstreams, models)
    deployment = fetching(deployment)
    if not (endpoint := deployment.tracing.endpoint):
        return deployment
    check_url("tracing.endpoint", endpoint, "http(s)://HOST:PORT of a receiver of OTLP over HTTP, or empty")
    return structs.replace(deployment, models=tuple(traced(spec, endpoint) for spec in deployment.models))


def _check_deployed(path: str, spec: ModelSpec) -> None:
    for key in ("urls", "discovery"):
        require(
            not getattr(spec, key), f"{path}.{key}", getattr(spec, key), f"{key} only with engine: external"
        )
    expected = "package:NAME, a local path or a Hugging Face id (ORG/NAME)"
    require(spec.source or spec.engine is not EngineKind.VLLM, f"{path}.source", spec.source, expected)
    for key in ("shapes", "modes"):
        require(getattr(spec, key), f"{path}.{key}", {}, "at least one entry")
    _check_engine_args(f"{path}.engine_args", spec.engine_args)
    for name, shape in spec.shapes.items():
        _check_memory_share(path, name, shape, spec)
        only = "none: only shapes of external models have a workload"
        require(not shape.workload, f"{path}.shapes.{name}.workload", shape.workload, only)
    for key, value in spec.env.items():
        expected = "a variable that Tidegate does not guard or set"
        require(key not in FORBIDDEN_ENV, f"{path}.env.{key}", value, expected)


def _check_layers(path: str, spec: ModelSpec, budget: ResourceBudget) -> None:
    """Check shapes and modes, and what is scaled: whether the budget has room for them."""
    for name, shape in spec.shapes.items():
        _check_shape(f"{path}.shapes.{name}", name, shape, budget)
    for name, mode in spec.modes.items():
        _check_mode(f"{path}.modes.{name}", name, mode, spec, budget)
    if not spec.is_scaled:
        return
    _check_scale(f"{path}.control.scale", spec.control.scale, spec)
    _check_affordable(spec, budget)
    known = f"one of the modes: {', '.join(spec.modes)}"
    require(spec.mode is None or spec.mode in spec.modes, f"{path}.mode", spec.mode, known)


def _check_shape(path: str, name: str, shape: Shape, budget: ResourceBudget) -> None:
    require(SHAPE_NAME.fullmatch(name), path, name, f"a shape name that matches {SHAPE_NAME.pattern}")
    ranks, gpus = shape.tensor_parallel, shape.gpus
    alone = "1 for a fraction of a GPU" if gpus else "1 for a shape without GPUs"
    expected = f"{gpus}, one rank per GPU of the shape" if gpus >= 1 else alone
    require(ranks == (gpus if gpus >= 1 else 1), f"{path}.tensor_parallel", ranks, expected)
    require(gpus or shape.cpus, path, {"gpus": 0, "cpus": 0}, "gpus, or cpus of at least 1")
    typed = gpus or not shape.accelerator_type
    require(typed, f"{path}.accelerator_type", shape.accelerator_type, "none for a shape without GPUs")
    for resource, amount in shape.resources.items():
        named = resource and resource not in _RAY_RESOURCES and "accelerator_type" not in resource
        expected = "a custom resource of the nodes; GPUs, cores and accelerator_type have keys of their own"
        require(named, f"{path}.resources.{resource}", amount, expected)
    for key in ("gpus", "cpus"):
        limit, value = getattr(budget, key), getattr(shape, key)
        within = limit is None or value <= limit
        require(within, f"{path}.{key}", value, f"at most budget.{key} = {limit}")
    _check_engine_args(f"{path}.engine_args", shape.engine_args)


def _check_mode(path: str, name: str, mode: Mode, spec: ModelSpec, budget: ResourceBudget) -> None:
    named = SHAPE_NAME.fullmatch(name) and name != "auto"
    require(named, path, name, f"a mode name that matches {SHAPE_NAME.pattern}, other than auto")
    known = f"one of the shapes: {', '.join(spec.shapes)}"
    require(mode.shape in spec.shapes, f"{path}.shape", mode.shape, known)
    least, most = mode.bounds.min, mode.bounds.max
    require(least <= most, f"{path}.replicas.min", least, f"at most replicas.max = {most}")
    for key in ("gpus", "cpus"):
        limit, each = getattr(budget, key), getattr(spec.shapes[mode.shape], key)
        if limit is not None and (fits := int(limit / each + ROUNDING) if each else most) < most:
            expected = f"at most {fits}: each needs {each} of budget.{key} = {limit}"
            raise ConfigError(f"{path}.replicas", most, expected)


def _check_scale(path: str, scale: ScaleConfig, spec: ModelSpec) -> None:
    bounds = [mode.bounds for mode in spec.modes.values()]
    least, most = max(each.min for each in bounds), max(each.max for each in bounds)
    for i, schedule in enumerate(scale.schedules):
        at = f"{path}.schedules[{i}]"
        for key in ("start", "end"):
            try:
                cron(text := getattr(schedule, key))
            except ValueError as error:
                raise ConfigError(f"{at}.{key}", text, str(error)) from None
        low, high = schedule.min, schedule.max
        require(low is not None or high is not None, at, None, "min or max")
        require(low is None or low <= most, f"{at}.min", low, f"at most {most}, the largest replicas.max")
        expected = f"at least {max(least, low or 0)}: replicas.min and the min of the schedule go before it"
        require(high is None or high >= max(least, low or 0), f"{at}.max", high, expected)
    for key in ("rates_up", "rates_down"):
        for i, rate in enumerate(getattr(scale, key)):
            one = (rate.replicas is None) != (rate.fraction is None)
            require(one, f"{path}.{key}[{i}]", rate.replicas, "exactly one of replicas and fraction")


def _check_memory_share(path: str, name: str, shape: Shape, spec: ModelSpec) -> None:
    """Refuse engines with a fraction of a GPU that would take more than this part of its memory."""
    key = "gpu_memory_utilization"
    for at, args in ((f"{path}.shapes.{name}", shape.engine_args), (path, spec.engine_args)):
        if key in args:
            given = args[key]
            fits = shape.share == 1 or (isinstance(given, float | int) and given <= shape.share)
            expected = f"at most {shape.gpus:g}, the fraction of a GPU of shapes.{name}"
            require(fits, f"{at}.engine_args.{key}", given, expected)
            return


def _check_affordable(spec: ModelSpec, budget: ResourceBudget) -> None:
    """Refuse power or cost budgets that are too small for the minimum of every mode."""
    for key, gpu, cpu in (
        ("watts", budget.gpu_watts, budget.cpu_watts),
        ("cost_per_h", budget.gpu_cost_per_h, budget.cpu_cost_per_h),
    ):
        needed = min(
            max(1, mode.bounds.min) * (shape.gpus * gpu + shape.cpus * cpu)
            for mode in spec.modes.values()
            for shape in (spec.shapes[mode.shape],)
        )
        limit = getattr(budget, key)
        expected = f"at least {needed:g}, which {spec.name} needs"
        require(limit is None or needed <= limit, f"budget.{key}", limit, expected)


def _check_engine_args(path: str, args: Mapping[str, Any]) -> None:
    for key, value in args.items():
        expected = expected_instead(key, value)
        require(not expected, f"{path}.{key}", value, expected)


def _check_adapters(path: str, spec: ModelSpec, models: set[str], tenants: Collection[str]) -> None:
    if spec.adapters is None:
        return
    given = {f"{path}.engine_args": spec.engine_args}
    given |= {f"{path}.shapes.{name}.engine_args": shape.engine_args for name, shape in spec.shapes.items()}
    for at, args in given.items():
        for key in sorted(_ADAPTER_ENGINE_ARGS & args.keys()):
            raise ConfigError(f"{at}.{key}", args[key], "nothing: the model's section `adapters` sets it")
    for i, host in enumerate(spec.adapters.private_hosts):
        expected = "a host name, an address or a network such as 10.0.0.0/8"
        require(
            is_network(host) or HOST.fullmatch(host), f"{path}.adapters.private_hosts[{i}]", host, expected
        )
    sources = spec.adapters.sources
    loads = not sources or spec.engine is not EngineKind.EXTERNAL
    expected = "nothing: Tidegate does not load them into an external engine"
    require(loads, f"{path}.adapters.sources", [source.name for source in sources], expected)
    seen = set(models)
    for i, source in enumerate(sources):
        at = f"{path}.adapters.sources[{i}]"
        _check_name(f"{at}.name", source.name, seen, "adapter of it and no model")
        _check_source(at, source)
        for j, tenant in enumerate(source.tenants):
            known = ", ".join(sorted(tenants)) or "none are in the deployment file"
            require(tenant in tenants, f"{at}.tenants[{j}]", tenant, f"one of the tenants: {known}")


def _check_source(at: str, source: AdapterSource) -> None:
    given = [key for key in ("path", "source", "versions") if getattr(source, key)]
    one = "exactly one of path, source and versions"
    require(len(given) == 1, at, ", ".join(given) or None, one)
    is_url = "://" in source.path or source.path.startswith("hf:")
    require(not is_url, f"{at}.path", source.path, "a path; a URL is written as source")
    if source.source:
        _check_origin(f"{at}.source", source.source)
    owners: dict[str, str] = {}
    for name, version in source.versions.items():
        path = f"{at}.versions.{name}"
        require(ENTRY_NAME.fullmatch(name), path, name, f"a name that matches {ENTRY_NAME.pattern}")
        _check_origin(f"{path}.source", version.source)
        owner = owners.setdefault(version.source, name)
        expected = f"a source that no other version has ({owner} has it)"
        require(owner == name, f"{path}.source", version.source, expected)
    weighted = not source.versions or any(version.weight for version in source.versions.values())
    require(weighted, f"{at}.versions", list(source.versions), "a weight above 0 of at least one")


def _check_origin(path: str, origin: str) -> None:
    printable = origin and origin.isprintable() and not origin.startswith("package:")
    known = not origin.startswith("hf:") or _HUB.fullmatch(origin)
    expected = "a path, http(s)://, hf:ORG/NAME[@REVISION], s3:// or another URL of fsspec's"
    require(printable and known, path, origin, expected)


def _check_cluster(deployment: Deployment) -> None:
    cluster = deployment.cluster
    joined = deployment.deploys and cluster.address != "local"
    for address in cluster.controllers:
        host, _, port = address.rpartition(":")
        good = host and is_host(host) and _PORT.fullmatch(port) and 1 <= int(port) <= 65_535
        require(good, "cluster.controller", cluster.controller, "HOST:PORT, or several: HOST:PORT,HOST:PORT")
        reached = not joined or not _loopback(address) or _loopback(cluster.address)
        expected = f"HOST:PORT that every node of cluster.address = {cluster.address!r} reaches"
        require(reached, "cluster.controller", address, expected)
    distinct = len(set(cluster.controllers)) == len(cluster.controllers)
    require(distinct, "cluster.controller", cluster.controller, "each address once")
    shared = cluster.election is None or deployment.store
    require(shared, "store", "", "a database that all controllers use, where they elect their leader")
    lease = cluster.election.kubernetes if cluster.election is not None else None
    if lease is not None:
        check_object("cluster.leader_election.kubernetes", lease, name="a Lease")
    if cluster.simulated_gpus is not None and cluster.address == "local":
        for i, spec in enumerate(deployment.models):
            for name, shape in spec.shapes.items():
                at, expected = f"models[{i}].shapes.{name}.gpus", "at most cluster.simulated_gpus = "
                require(
                    shape.gpus <= cluster.simulated_gpus,
                    at,
                    shape.gpus,
                    f"{expected}{cluster.simulated_gpus}",
                )
    real = [f"models.{spec.name}" for spec in deployment.models if spec.engine is EngineKind.VLLM]
    require(
        cluster.simulated_gpus is None or not real,
        "cluster.simulated_gpus",
        cluster.simulated_gpus,
        f"none beside {', '.join(real)}, whose engine is not simulated",
    )


def _loopback(address: str) -> bool:
    host = address.rpartition("/")[2].rpartition(":")[0].strip("[]")
    return is_loopback(host)


def _check_store(store: str) -> None:
    scheme, colon, rest = store.partition("://")
    embedded = scheme == "sqlite" and len(rest) > 1 and rest.startswith("/") and "?" not in rest
    served = scheme in ("postgresql", "postgres", "postgresql+psycopg") and _is_server(rest)
    good = not store or (colon and (embedded or served))
    # After one of these signs there may be a password, also where it does not belong.
    shown = "***" if scheme != "sqlite" and re.search(r"[:?@]", scheme + rest) else store
    expected = "sqlite:///PATH or postgresql://HOST/NAME, as in postgresql://USER:PASSWORD@HOST:5432/NAME"
    require(good, "store", shown, expected)


def _is_server(rest: str) -> bool:
    """Whether this is what follows `postgresql://`."""
    parts = _SERVER.fullmatch(rest) if _VISIBLE.fullmatch(rest) else None
    return parts is not None and 0 < int(parts["port"] or 1) <= 65_535


def _check_grpc_port(name: str, port: GrpcPort) -> None:
    given, expected = (port.cert_file, port.key_file), "cert_file and key_file, or neither"
    require((given[0] is None) == (given[1] is None), f"{name}.key_file", port.key_file, expected)
    secure = port.client_ca_file is None or port.cert_file is not None
    require(secure, f"{name}.client_ca_file", port.client_ca_file, "cert_file and key_file beside it")


def _check_upstreams(upstreams: tuple[FallbackProviderConfig, ...], models: set[str]) -> None:
    seen: set[str] = set()
    for i, upstream in enumerate(upstreams):
        path = f"upstreams[{i}]"
        _check_name(f"{path}.name", upstream.name, seen, "upstream")
        check_url(
            f"{path}.url", upstream.url, "http(s)://HOST[:PORT][/PATH], as in https://api.example.com/v1"
        )
        check_key(path, upstream)
        for name, theirs in upstream.models.items():
            model, colon, adapter = name.partition(":")
            good = model in models and (not colon or ENTRY_NAME.fullmatch(adapter))
            expected = f"one of the models as the key, or MODEL:ADAPTER: {', '.join(sorted(models))}"
            require(good, f"{path}.models.{name}", theirs, expected)
            require(theirs, f"{path}.models.{name}", theirs, "the name that the upstream calls it by")


def _check_name(
    path: str, name: str, seen: set[str], kind: str, pattern: re.Pattern[str] = ENTRY_NAME
) -> None:
    """Check the form of a name, and that it is not among those ``seen``, to which it is added."""
    require(pattern.fullmatch(name), path, name, f"a name that matches {pattern.pattern}")
    require(name not in seen, path, name, f"a name that no other {kind} has")
    seen.add(name)
