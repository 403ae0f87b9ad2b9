"""The caches of all external servers that publish KV events, and what is known of each model's prompts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from gateway.http.http1_client import ConnectionPool
from gateway.routing.external_server_options import ServerAccess
from gateway.telemetry.structured_log import StructuredLog
from policy.routing.engine_prefix_index import PrefixIndexUpdate
from policy.types import Replica

if TYPE_CHECKING:
    from gateway.routing.engine_cache.external_server_cache import ServerCache
    from gateway.routing.engine_cache.prompt_blocks import KnownPrompts

# To connect for a prompt's tokens.
CONNECT_S = 2.0
MAX_IDLE = 2


class ServerCaches:
    """Opens the caches of servers that publish events; ``news`` and ``forgotten`` go to the routers."""

    def __init__(
        self,
        news: Callable[[str, int, PrefixIndexUpdate], None],
        forgotten: Callable[[str, int], None],
        log: StructuredLog,
    ) -> None:
        self._news = news
        self._forgotten = forgotten
        self._log = log
        self._known: defaultdict[str, KnownPrompts] | None = None

    def of(
        self, cache: ServerCache | None, server: Replica, key: int, access: ServerAccess, head: bytes
    ) -> ServerCache | None:
        """The cache of an external server: ``cache``, or another if that one follows other ports.

        One that cannot be opened is tried again with the next call. The router knows the server by ``key``;
        ``head`` is what requests to it have in common.
        """
        ports = access.kv_events_port, access.kv_events_replay_port
        if cache is not None and cache.ports != ports:
            cache.close()
            self._forgotten(server.model, key)
            cache = None
        if cache is None and ports[0] is not None:
            try:
                cache = self._opened(server, key, ports[0], ports[1])
            except Exception as error:  # noqa: BLE001 - a lack of descriptors fails imports, and ZeroMQ's sockets
                self._log.warning(
                    "kv_events_not_followed", cause=error, model=server.model, server=server.url
                )
        if cache is not None:
            cache.head = head
            cache.pool.trust(access.ca_file, access.ca_changed_ns)
        return cache

    def _opened(self, server: Replica, key: int, port: int, replay_port: int | None) -> ServerCache:
        # Most gateways need no ZeroMQ.
        from gateway.routing.engine_cache.external_server_cache import ServerCache, ServerCacheListener  # noqa: PLC0415
        from gateway.routing.engine_cache.prompt_blocks import KnownPrompts  # noqa: PLC0415

        if self._known is None:
            self._known = defaultdict(KnownPrompts)
        model, url = server.model, server.url
        return ServerCache(
            urlsplit(url).hostname or "",
            (port, replay_port),
            ConnectionPool(url, CONNECT_S, max_idle=MAX_IDLE),
            self._known[model],
            ServerCacheListener(
                news=lambda news: self._news(model, key, news),
                forgotten=lambda: self._forgotten(model, key),
                warn=lambda problem: self._log.warning(
                    "kv_events_problem", model=model, server=url, problem=problem
                ),
            ),
        )
