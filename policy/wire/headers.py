"""The names of Tidegate's own HTTP headers, in lower case."""

from __future__ import annotations

from typing import Final

# Between Tidegate's processes: the secret that admits a caller.
SECRET_HEADER: Final = "x-tidegate-secret"

# From a gateway to a replica. The prompt tokens that are not cached, as far as the gateway knows; the
# prefixes that the request will leave in the cache and that are new there, as 64-bit hashes in hex with
# commas between them; the estimated tokens up to each of those, to the end of the prompt, and before them all
# the deepest prefix that is not new with its tokens: HASH,TOKENS,TOKENS..., the hash being 0 if all are new;
# the adapter version that it needs, as NAME@DIGEST with the whole digest.
PREFILL_HEADER: Final = "x-tidegate-prefill"
PREFIX_HEADER: Final = "x-tidegate-prefix"
DEPTHS_HEADER: Final = "x-tidegate-depths"
ADAPTER_HEADER: Final = "x-tidegate-adapter"
# Marks a health check that a replica serves before it is ready.
CANARY_HEADER: Final = "x-tidegate-canary"

# A gateway asks with it for the engine's times. Answers then have in it the seconds from the arrival of the
# request to the first byte; streams end with a comment of its name and those from the first byte to the last.
ENGINE_TIME_HEADER: Final = "x-tidegate-engine-s"

# From a replica: why it refused, as a `policy.errors.Refusal`.
REFUSAL_HEADER: Final = "x-tidegate-refusal"

# To a client: the replica that answered, and (also from an admin client) the explanation of the route.
REPLICA_HEADER: Final = "x-tidegate-replica"
EXPLAIN_HEADER: Final = "x-tidegate-explain"
# To a client: the fields of its body that are not known, which no replica got.
DROPPED_HEADER: Final = "x-tidegate-dropped-fields"
