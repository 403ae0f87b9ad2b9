"""The deployment file as frozen structures.

:func:`policy.deployment_file.parse.parse` makes a :class:`Deployment` of the decoded YAML.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from msgspec import Meta

from policy.config.control import ControlConfig, Count, LeaderElection, Positive, Seconds, Section
from policy.config.external_servers import DiscoveryConfig, ExternalServer
from policy.config.grpc_ports import EndpointPicker, ExternalScaler, GrpcPort
from policy.config.tenancy import Tenant, TokenPrice
from policy.config.tls import AdminTls, ServerTls
from policy.config.tracing import Tracing
from policy.errors import TargetError
from policy.types import EngineKind, Priority, ReplicaProtocol, Runner

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}(/[A-Za-z0-9][A-Za-z0-9_.-]{0,127})?")
ENTRY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
SHAPE_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")

# Development routes, unauthenticated loading, or metrics on another port.
FORBIDDEN_ENV = frozenset(
    {
        "VLLM_SERVER_DEV_MODE",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
        "VLLM_API_KEY",
        "PROMETHEUS_MULTIPROC_DIR",
        "VLLM_CPU_OMP_THREADS_BIND",
        "CUDA_VISIBLE_DEVICES",
        "PYTHONPATH",
        "LD_PRELOAD",
    }
)

Port = Annotated[int, Meta(ge=1, le=65_535)]
# A number of whole GPUs, or a fraction of one.
Gpus = Annotated[int, Meta(ge=0, le=64)] | Annotated[float, Meta(gt=0, lt=1)]
UnprivilegedPort = Annotated[int, Meta(ge=1024, le=65_535)]


class Shape(Section, frozen=True):
    """The specification of a replica: GPUs or CPU cores, and engine arguments added to the model's.

    Replicas with a fraction of a GPU share one. Ray places a replica on a node with GPUs of its
    ``accelerator_type``, if that is not empty, and with its custom ``resources``. Without ``max_in_flight`` a
    replica takes as many requests as its engine's ``max_num_seqs``. ``workload`` is ``KIND/NAME`` of the
    Kubernetes workload whose pods are the replicas of an external model.
    """

    gpus: Gpus = 0
    cpus: Annotated[int, Meta(ge=0, le=1024)] = 0
    accelerator_type: str = ""
    resources: dict[str, Annotated[float, Meta(gt=0)]] = {}
    tensor_parallel: Annotated[int, Meta(ge=1, le=64)] = 1
    max_in_flight: Annotated[int, Meta(ge=1, le=65_536)] | None = None
    engine_args: dict[str, Any] = {}
    workload: str = ""

    @property
    def degree(self) -> Gpus:
        """Over how many GPUs or cores the engine is spread; a fraction of one GPU is that part of it."""
        return self.gpus or max(1, self.cpus)

    @property
    def share(self) -> float:
        """The part of each of its GPUs that a replica has."""
        return min(1.0, self.gpus or 1.0)


class ReplicaBounds(Section, frozen=True):
    """The bounds of a mode's replica count; it starts with ``min``."""

    min: Count = 1
    max: Positive = 1

    def clamp(self, count: int) -> int:
        """The allowed count nearest to ``count``."""
        return sorted((self.min, count, self.max))[1]


class Mode(Section, frozen=True):
    """A deployment mode: a shape and its replica bounds."""

    shape: str
    replicas: Positive | ReplicaBounds = 1

    @property
    def bounds(self) -> ReplicaBounds:
        """The replica bounds; a plain number means exactly that many."""
        if isinstance(self.replicas, ReplicaBounds):
            return self.replicas
        return ReplicaBounds(min=self.replicas, max=self.replicas)


class SimConfig(Section, frozen=True):
    """The simulated engine: the profile of its engine model, and its speed relative to real time.

    ``adapter_load_s`` is how long the load of an adapter blocks its steps, in modelled seconds. The engine
    has sleep mode if ``wake_s`` is set: the wake time, in real seconds as ``start_s``.
    """

    profile: str = "cpu-smollm2-135m"
    seed: Annotated[int, Meta(ge=0)] = 0
    speed: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    start_s: Annotated[float, Meta(ge=0, le=3600)] = 0.0
    adapter_load_s: Annotated[float, Meta(ge=0, le=3600)] = 0.05
    wake_s: Annotated[float, Meta(ge=0, le=3600)] | None = None


class AdapterVersion(Section, frozen=True):
    """One of several versions of a name, with its ``weight``."""

    source: str
    weight: Annotated[float, Meta(ge=0, le=1e6)] = 1.0


class AdapterSource(Section, frozen=True):
    """A declared adapter: a ``path`` on the head node, a ``source``, or several ``versions``.

    ``source`` is a path, ``https://`` (an archive), ``hf:ORG/NAME[@REVISION]`` or any fsspec URL, such as
    ``s3://``. Only ``tenants`` may use it; empty means all. With ``force`` it may name another base model.
    """

    name: str
    path: str = ""
    source: str = ""
    versions: dict[str, AdapterVersion] = {}
    tenants: tuple[str, ...] = ()
    force: bool = False


class AdaptersConfig(Section, frozen=True):
    """LoRA adapters of the model, served by name; without the section engines load none.

    ``slots_per_replica`` is the number of adapters that a replica has loaded at once, ``max_rank`` the
    largest rank, ``max_bytes`` the size limit of one adapter's files. An adapter added at run time may be
    fetched from public addresses and from ``private_hosts``.
    """

    slots_per_replica: Annotated[int, Meta(ge=1, le=4096)] = 8
    max_rank: Annotated[int, Meta(ge=1, le=512)] = 16
    max_bytes: Annotated[int, Meta(ge=1)] = 2 * 1024**3
    private_hosts: tuple[str, ...] = ()
    sources: tuple[AdapterSource, ...] = ()


class ModelSpec(Section, frozen=True):
    """One model: source of its weights, engine, shapes and modes.

    ``profile`` is the initial engine model, until measurements replace it: a name, or the content of a
    calibration file (:mod:`policy.engine.performance_model_file`). When a budget is short, models with higher
    ``priority`` are served first. ``price`` is what tenants are charged for its tokens.
    """

    name: str
    source: str = ""
    engine: EngineKind = EngineKind.VLLM
    runner: Runner = Runner.GENERATE
    engine_args: dict[str, Any] = {}
    env: dict[str, str] = {}
    token_file: str | None = None
    shapes: dict[str, Shape] = {}
    modes: dict[str, Mode] = {}
    mode: str | None = None
    urls: tuple[str | ExternalServer, ...] = ()
    discovery: DiscoveryConfig | None = None
    sim: SimConfig = SimConfig()
    profile: str | dict[str, Any] | None = None
    adapters: AdaptersConfig | None = None
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0
    price: TokenPrice | None = None
    control: ControlConfig = ControlConfig()

    @property
    def timed_by(self) -> str | dict[str, Any] | None:
        """The initial engine model: ``profile``, or the profile of simulated engines."""
        return self.profile or (self.sim.profile if self.engine is EngineKind.SIM else None)

    @property
    def servers(self) -> tuple[ExternalServer, ...]:
        """The listed servers of an external model; a plain URL is one without further settings."""
        return tuple(ExternalServer(url=each) if isinstance(each, str) else each for each in self.urls)

    @property
    def is_scaled(self) -> bool:
        """Whether Tidegate decides how many replicas there are: not of external servers without workloads."""
        return self.engine is not EngineKind.EXTERNAL or any(shape.workload for shape in self.shapes.values())

    @property
    def first_mode(self) -> str:
        """The mode to start in: ``mode``, otherwise the first one in the file."""
        return self.mode or next(iter(self.modes), "")


class ResourceBudget(Section, frozen=True):
    """Limits shared by all models; ``None`` for no limit.

    ``watts`` and ``cost_per_h`` (in one currency) limit the sum over replicas. A GPU or core is assumed to
    draw ``gpu_watts`` or ``cpu_watts`` until it was measured, and costs ``gpu_cost_per_h`` or
    ``cpu_cost_per_h``.
    """

    gpus: Count | None = None
    cpus: Count | None = None
    watts: Annotated[float, Meta(gt=0)] | None = None
    cost_per_h: Annotated[float, Meta(gt=0)] | None = None
    gpu_watts: Annotated[float, Meta(ge=0)] = 700.0
    cpu_watts: Annotated[float, Meta(ge=0)] = 10.0
    gpu_cost_per_h: Annotated[float, Meta(ge=0)] = 0.0
    cpu_cost_per_h: Annotated[float, Meta(ge=0)] = 0.0


class Cluster(Section, frozen=True):
    """The Ray cluster, and where the controller listens.

    ``controller`` is its address, or those of several with commas between them, of which one leads.
    ``address: local`` starts a Ray head at ``node_ip``; any other address joins that cluster. With
    ``simulated_gpus`` simulated engines take the GPUs of their shapes, as real ones do: the local head has
    this many, and the nodes of another cluster those that they were started with. With ``redis_address`` the
    GCS of the local head keeps its state there, and can be restarted under running replicas.
    """

    address: str = "local"
    controller: str = "127.0.0.1:7070"
    dashboard_port: UnprivilegedPort = 8265
    gcs_port: UnprivilegedPort = 6379
    node_ip: str = "127.0.0.1"
    redis_address: str | None = None
    simulated_gpus: Positive | None = None
    leader_election: LeaderElection | None = None

    @property
    def controllers(self) -> tuple[str, ...]:
        """The addresses of the controllers."""
        return tuple(address.strip() for address in self.controller.split(","))

    @property
    def election(self) -> LeaderElection | None:
        """How the leader is elected; ``None`` if there is one controller alone."""
        return self.leader_election or (LeaderElection() if "," in self.controller else None)


class CoalesceConfig(Section, frozen=True):
    """Coalescing: short inputs of concurrent requests are sent as one call, after ``window_s`` or once full.

    A window of 0 switches it off. A single request never waits.
    """

    window_s: Annotated[float, Meta(ge=0, le=1)] = 0.002
    max_inputs: Annotated[int, Meta(ge=2, le=4096)] = 64
    max_input_bytes: Annotated[int, Meta(ge=16)] = 4096


class OutlierEjection(Section, frozen=True):
    """Ejection: when a replica leaves rotation, and for how long.

    After ``failures`` in a row, or when its success rate over ``window_s`` falls below
    ``success_rate``; for ``base_s`` times the ejections in a row, at most ``max_s``; never more than
    ``max_fraction`` of a model's replicas, and never the last.
    """

    failures: Positive = 5
    success_rate: Annotated[float, Meta(ge=0, le=1)] = 0.85
    window_s: Seconds = 10.0
    base_s: Seconds = 30.0
    max_s: Seconds = 300.0
    max_fraction: Annotated[float, Meta(ge=0, le=1)] = 0.5


class RetryBudget(Section, frozen=True):
    """The retry budget: the fraction ``budget`` of the requests in ``window_s``, min. ``at_least``."""

    budget: Annotated[float, Meta(ge=0, le=1)] = 0.2
    at_least: Count = 3
    window_s: Seconds = 10.0


class GatewayConfig(Section, frozen=True):
    """The data plane: where it listens and how long it waits.

    ``admin_allowed_hosts`` are names by which the admin port may be called, beside its own address.
    ``allow_unauthenticated``: without tenants and keys, other machines may use the client port too.
    ``trusted_proxies`` are the networks whose ``X-Forwarded-For`` and ``X-Forwarded-Proto`` count. ``cors``
    are the origins whose web pages may use the client port. Engines may fetch media of requests from
    ``media_hosts``. ``extra_fields`` are parameters that replicas get beside those that the gateway knows.
    ``access_log`` writes a line for each request. ``priority`` is that of all requests without tenants.
    Requests go to replicas by ``replica_protocol``: ``frames`` (one connection from each worker to each
    replica, over HTTP to those that do not speak it), or ``http``.
    ``queue_timeout_s`` is the default deadline of a request. ``first_token_timeout_s`` and
    ``inter_token_timeout_s`` bound the silence of a replica before and after a stream's first event,
    ``answer_timeout_s`` the time to a whole answer, ``progress_timeout_s`` how long a replica may have
    requests and move none of them. ``sse_keepalive_s`` is the time between comments to the client of a
    stream that waits, 0 for none.
    """

    host: str = "127.0.0.1"
    port: Port = 8080
    workers: Annotated[int, Meta(ge=1, le=256)] = 2
    admin_host: str = "127.0.0.1"
    admin_port: Port = 8081
    admin_allowed_hosts: tuple[str, ...] = ()
    tls: ServerTls | None = None
    admin_tls: AdminTls | None = None
    allow_unauthenticated: bool = False
    trusted_proxies: tuple[str, ...] = ()
    cors: tuple[str, ...] = ()
    media_hosts: tuple[str, ...] = ()
    extra_fields: tuple[str, ...] = ()
    access_log: bool = False
    priority: Priority = Priority.STANDARD
    queue_timeout_s: Seconds = 60.0
    max_queue: Annotated[int, Meta(ge=1, le=1_000_000)] = 1024
    max_queue_bytes: Annotated[int, Meta(ge=1024)] = 256 * 1024 * 1024
    max_body_bytes: Annotated[int, Meta(ge=1024)] = 16 * 1024 * 1024
    max_upload_bytes: Annotated[int, Meta(ge=1024)] = 64 * 1024 * 1024
    max_upload_bytes_per_address: Annotated[int, Meta(ge=1024)] = 48 * 1024 * 1024
    replica_protocol: ReplicaProtocol = ReplicaProtocol.FRAMES
    connect_timeout_s: Seconds = 2.0
    first_token_timeout_s: Seconds = 120.0
    inter_token_timeout_s: Seconds = 60.0
    answer_timeout_s: Seconds = 600.0
    progress_timeout_s: Seconds = 30.0
    drain_timeout_s: Seconds = 30.0
    drain_delay_s: Annotated[float, Meta(ge=0, le=3600)] = 0.0
    sse_keepalive_s: Annotated[float, Meta(ge=0, le=86_400)] = 15.0
    coalesce: CoalesceConfig = CoalesceConfig()
    eject: OutlierEjection = OutlierEjection()
    retry: RetryBudget = RetryBudget()


class ProviderPrice(Section, frozen=True):
    """Prices per million tokens, in one currency."""

    input: Annotated[float, Meta(ge=0)]
    output: Annotated[float, Meta(ge=0)]


class FallbackProviderConfig(Section, frozen=True):
    """A fallback provider: an OpenAI-compatible endpoint for requests beyond capacity.

    ``models`` maps model names to the provider's, ``key_file`` contains the key (or the environment variable
    ``key_env``), ``cost_cap_per_h`` is the spending limit per hour in the currency of ``price``.
    """

    name: str
    url: str
    models: Annotated[dict[str, str], Meta(min_length=1)]
    price: ProviderPrice
    cost_cap_per_h: Annotated[float, Meta(ge=0)]
    key_file: str | None = None
    key_env: str | None = None


class Deployment(Section, frozen=True):
    """The whole deployment file.

    ``store`` is the database: ``sqlite:///PATH`` or ``postgresql://...``; empty for the state directory.
    """

    models: Annotated[tuple[ModelSpec, ...], Meta(min_length=1)]
    budget: ResourceBudget = ResourceBudget()
    cluster: Cluster = Cluster()
    gateway: GatewayConfig = GatewayConfig()
    store: str = ""
    tracing: Tracing = Tracing()
    endpoint_picker: EndpointPicker | None = None
    external_scaler: ExternalScaler | None = None
    tenants: tuple[Tenant, ...] = ()
    upstreams: tuple[FallbackProviderConfig, ...] = ()

    @property
    def grpc_ports(self) -> dict[str, GrpcPort]:
        """Those that are configured, by section."""
        found = {"endpoint_picker": self.endpoint_picker, "external_scaler": self.external_scaler}
        return {name: port for name, port in found.items() if port is not None}

    @property
    def deploys(self) -> bool:
        """Whether Tidegate starts engines itself, rather than using external servers alone."""
        return any(model.engine is not EngineKind.EXTERNAL for model in self.models)

    @property
    def needs_controller(self) -> bool:
        """Whether Tidegate starts engines or scales external servers."""
        return any(model.is_scaled for model in self.models)

    def model(self, name: str) -> ModelSpec:
        """The model called ``name``; raises :class:`policy.errors.TargetError` if there is none."""
        for model in self.models:
            if model.name == name:
                return model
        known = ", ".join(model.name for model in self.models)
        raise TargetError(f"no model is called {name!r}; this deployment has {known}")
