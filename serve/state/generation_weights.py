"""Resolves the weights of a revision, and makes a new revision where they changed."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from policy.config.deployment import Deployment
from policy.errors import ModelUnavailable, SwitchRefused
from serve.host.weight_verification import Resolver, Weights
from serve.state.desired_state import Target
from serve.state.observed_state import ObservedState
from store.model_weights.prepare import Origin


class GenerationWeights:
    """Looks at the weights of a generation before its first layer is deployed.

    They stay the same as long as it runs, except that a local directory that was changed in place is a
    new generation once it is applied again: only the controller's own copy is looked at.
    """

    def __init__(self, observed: ObservedState, resolver: Resolver, event: Callable[[str], None]) -> None:
        self._observed = observed
        self._resolver = resolver
        self._event = event
        self._applied: set[str] = set()

    def look_again(self, model: str) -> None:
        """The model was applied again: a resolution under way may be out of date."""
        self._resolver.forget(model)
        self._applied.add(model)

    def look(self, target: Target, deployment: Deployment, now: float) -> Target:
        """``target`` with the weights of its aim's generation, or as it is while they are not known.

        What fails is an event, counts as a start that failed where nothing can be deployed without it,
        and is tried again.
        """
        name, known = target.spec.name, target.weights.get(target.aim.generation)
        again = known is not None and known.origin is Origin.DIRECTORY and name in self._applied
        if target.weighed and not again:
            return target
        try:
            found = self._resolver.weights(target.spec)
        except ModelUnavailable as error:
            self._event(f"{name}: {error}")
            if not again:
                self._observed.cannot_start(target.key(), str(error))
            return target
        if found is None:
            return target
        self._applied.discard(name)
        others_run = self._others_run(target, known, found)
        taken = target.weighing(found, now, others_run=others_run)
        try:
            gap = self._observed.check_gap(taken, deployment) if others_run else taken.gap
        except SwitchRefused as refused:
            self._event(str(refused))
            return target
        return msgspec.structs.replace(taken, gap=gap)

    def _others_run(self, target: Target, known: Weights | None, found: Weights) -> bool:
        """Whether replicas of the aim's generation are made of other weights than ``found``."""
        if known is not None:
            return known != found
        # A controller that lost its memory knows only the digests of the layers.
        running = self._observed.digests(target.spec.name, target.aim.generation)
        return not all(digest.endswith(found.short) for digest in running)
