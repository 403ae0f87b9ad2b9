"""What a client is told when its request gets no replica."""

from __future__ import annotations

from gateway.protocol.errors import Refused
from gateway.routing.fleet import ServedModel
from policy.admission.retry import Cause, Rejection
from policy.errors import Refusal

# By then a replica that failed to load an adapter may be asked for it again.
ADAPTER_RETRY_S = 5
_LOST = "Two replicas were lost while they held this request."


def refused_by(
    rejection: Rejection, served: ServedModel, adapter: str, queued: int, upstream: Refused | None = None
) -> Refused:
    """The answer to a rejected request. ``queued`` requests wait for the model; ``upstream`` is the answer
    of the replica that was tried last, if it gave one."""
    name, cause, retry_after_s = served.name, rejection.cause, rejection.retry_after_s
    if upstream is not None and cause in (Cause.REJECTED, Cause.FAILED):
        return upstream
    if cause is Cause.ADAPTER:
        reason = served.causes.get(adapter)
        text = f"No replica of {name} could load the adapter '{adapter}'{f' ({reason})' if reason else ''}."
        return Refused(rejection.refusal, text, param="model", status=503, retry_after_s=ADAPTER_RETRY_S)
    if cause is Cause.LATE:
        text = f"{queued} requests wait for {name}: this one would not be served before its deadline."
    elif cause is Cause.FULL:
        text = f"{queued} requests already wait for {name}."
    elif cause is Cause.DISPLACED:
        text = f"The queue for {name} is full, and this request made room for another."
    elif cause is Cause.DEADLINE:
        was = "had room" if rejection.refusal is Refusal.DEADLINE else "was ready"
        text = f"No replica of {name} {was} before the request's deadline."
    elif cause in (Cause.UNAVAILABLE, Cause.RETRIES_SPENT):
        text = f"No replica of {name} serves at present."
        if upstream is not None:
            retry_after_s = upstream.retry_after_s
    else:
        text = _LOST
    return Refused(rejection.refusal, text, retry_after_s=retry_after_s, final=cause is Cause.FAILED)
