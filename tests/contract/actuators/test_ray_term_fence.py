"""Orders to Ray in the order of their terms: one of a term that is over is refused, also by a new actor."""

from __future__ import annotations

import pytest

from policy.errors import NotLeader
from policy.scaling.reconcile_steps import LayerKey
from serve.actuator.interface import deployment_id
from tests.contract.actuators.conftest import orders_of
from tests.ray_head import RayHead

KEY = LayerKey("m", "small", 1)


@pytest.mark.process
@pytest.mark.ray
async def test_a_term_that_is_over_is_refused(ray_site: RayHead, ray_joined: tuple[str, str]) -> None:
    import ray  # noqa: PLC0415 - it is loaded by joining
    from ray.experimental import internal_kv  # noqa: PLC0415

    deployment = deployment_id(ray_site.state)
    one, two = (orders_of(ray_site, *ray_joined, term=term) for term in (11, 12))
    await one.layers()
    await two.layers()
    for order in (one.layers(), one.scale(KEY, 0), one.delete(KEY), one.stop()):
        with pytest.raises(NotLeader, match="term 11 comes after one of term 12"):
            await order
    actor = ray.get_actor(f"tidegate-orders-{deployment}", namespace="tidegate")
    ray.kill(actor, no_restart=True)
    # Another one is made, and knows the highest term.
    with pytest.raises(NotLeader, match="term 11 comes after one of term 12"):
        await orders_of(ray_site, *ray_joined, term=11).layers()
    await orders_of(ray_site, *ray_joined, term=12).layers()
    # The tests beside this one begin with the first term.
    ray.kill(ray.get_actor(f"tidegate-orders-{deployment}", namespace="tidegate"), no_restart=True)
    internal_kv._internal_kv_del(f"tidegate-term-{deployment}".encode())
