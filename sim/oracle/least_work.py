"""The least work of a request: replica-seconds that no schedule on any number of replicas can undercut.

The steps that serve a set of requests take, by the engine model,

    T >= o M + [(w M)^p + (c N)^p]^(1/p) + g K + r D,    M >= max(D / seats, H / kv_tokens, N / batch)

with ``N`` computed tokens, ``D`` of them decodes, ``K`` the context that the decodes read, ``H`` the part of
it that no other request shares, and ``M`` steps: soft maximum and maximum are convex, so equal steps cost
least. Prompt blocks that an earlier request had count as cached on every replica. The right side is convex
and homogeneous, so its tangent at all requests together gives each a share, and the shares of any part of
the requests are no more than what that part takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from policy.config.control import SloConfig
from policy.engine.performance_model import Timing
from policy.wire.capture import BLOCK_TOKENS
from sim.arrivals import Arrival
from sim.oracle.provisioning_problem import ROUNDING, ProvisioningProblem
from sim.simulator.run_record import Floats


class RequestTokens(NamedTuple):
    """Requests as arrays: arrival in seconds, tokens of prompts, of those what is ``new``, and of answers."""

    at: Floats
    prompts: Floats
    new: Floats
    answers: Floats


def tokens_of(arrivals: Iterable[Arrival]) -> RequestTokens:
    """Read ``arrivals`` once; the last token of a prompt is always computed."""
    rows = []
    seen: set[tuple[str, int]] = set()
    for arrival in arrivals:
        cached = 0
        for block in arrival.blocks:
            if (arrival.adapter, block) not in seen:
                break
            cached += BLOCK_TOKENS
        seen.update((arrival.adapter, block) for block in arrival.blocks)
        new = max(1, arrival.input_tokens - cached)
        rows.append((arrival.at, arrival.input_tokens, new, arrival.output_tokens))
    return RequestTokens(*np.array(rows, dtype=np.float64).reshape(-1, 4).T)


def least_work(timing: Timing, tokens: RequestTokens) -> Floats:
    """The least replica-seconds of each request on replicas with that engine model."""
    assert timing.model is not None
    model, limits = timing.model.as_one_device(), timing.limits
    decodes = tokens.answers - 1.0
    computed = tokens.new + decodes
    after = decodes * np.maximum(decodes - 1.0, 0.0) / 2.0
    context = decodes * tokens.prompts + after
    alone = decodes * tokens.new + after
    bounds = [decodes / limits.max_num_seqs, computed / limits.max_num_batched_tokens]
    if limits.kv_tokens:
        bounds.append(alone / limits.kv_tokens)
    steps = max(bounds, key=lambda each: float(each.sum()))
    weights, compute = model.w * float(steps.sum()), model.c * float(computed.sum())
    both = np.array([weights, compute])
    # The tangent of the soft maximum; scaled by the larger term, as a power of a small time loses its digits.
    scaled = both / both.max()
    weigh, count = (scaled / float((scaled**model.p).sum()) ** (1.0 / model.p)) ** (model.p - 1.0)
    return np.asarray(
        (model.o + weigh * model.w) * steps + count * model.c * computed + model.g * context
        + model.r * decodes
    )  # fmt: skip


def least_problem(
    tokens: RequestTokens,
    work: Floats,
    slo: SloConfig,
    *,
    since: float,
    until: float,
    wait_s: float,
    shape: ProvisioningProblem,
) -> ProvisioningProblem:
    """The problem of the lower bound: ``work`` as demand, in replica-seconds, done until requests must end.

    Requests of ``since`` to before ``until`` seconds count. The heaviest may be missed. The others have
    ``wait_s`` for the first token without a TTFT target, and as long as an ITL target allows for the rest.
    ``shape`` has bins, start-up time and limits.
    """
    mine = (tokens.at >= since) & (tokens.at < until)
    work, answers = work[mine], tokens.answers[mine]
    bins = ((tokens.at[mine] - since) / shape.bin_s).astype(np.int64)
    missed = int((1.0 - slo.attainment) * len(work) + ROUNDING)
    heaviest = float(np.sort(work)[len(work) - missed :].sum())
    gap_s = math.inf if slo.itl_p95_s is None else slo.itl_p95_s
    gaps = float(answers.max() - 1.0)
    lasts_s = (wait_s if slo.ttft_p95_s is None else slo.ttft_p95_s) + (gap_s * gaps if gaps else 0.0)
    count = min(shape.bins, int(min(lasts_s, until - since) / shape.bin_s) + 2)
    return replace(
        shape,
        demand=np.bincount(np.minimum(bins, shape.bins - 1), work, shape.bins).astype(np.float64),
        mu=1.0,
        attainment=1.0 - heaviest / float(work.sum()),
        wait_s=count * shape.bin_s,
    )
