"""Resolves the weights of a revision, and makes a new revision where they changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from policy.config.deployment import Deployment
from policy.errors import ModelUnavailable, SwitchRefused
from serve.host.weight_verification import ResolvedWeights, WeightsResolver
from serve.state.desired_state import ModelTarget
from serve.state.observed_state import ObservedState
from store.model_weights.prepare import WeightsOrigin


@dataclass(eq=False)
class GenerationWeights:
    """Resolves the weights of a generation before its first layer is deployed.

    They stay the same as long as it runs. A local directory that was changed in place makes a new generation
    once the deployment is applied again.
    """

    observed: ObservedState
    resolver: WeightsResolver
    event: Callable[[str], None]
    _applied: set[str] = field(default_factory=set, init=False)

    def invalidate(self, model: str) -> None:
        """Resolve again after an apply: a resolution under way may be out of date."""
        self.resolver.forget(model)
        self._applied.add(model)

    def pending(self, target: ModelTarget) -> bool:
        """Whether the weights of ``target`` are still to be resolved."""
        known = target.weights.get(target.aim.generation)
        again = (
            known is not None
            and known.origin is WeightsOrigin.DIRECTORY
            and target.spec.name in self._applied
        )
        return again or not target.weights_known

    def resolve(self, target: ModelTarget, deployment: Deployment, now: float) -> ModelTarget:
        """``target`` with the weights of its desired generation; unchanged while they are not known.

        A failure is an event, and is tried again. If nothing can be deployed without the weights, it counts
        as a failed start.
        """
        name, known = target.spec.name, target.weights.get(target.aim.generation)
        if not self.pending(target):
            return target
        again = target.weights_known
        try:
            found = self.resolver.weights(target.spec)
        except ModelUnavailable as error:
            self.event(f"{name}: {error}")
            if not again:
                self.observed.cannot_start(target.key(), str(error))
            return target
        if found is None:
            return target
        self._applied.discard(name)
        others_run = self._others_run(target, known, found)
        taken = target.with_weights(found, now, others_run=others_run)
        try:
            return self.observed.planned(taken, deployment) if others_run else taken
        except SwitchRefused as refused:
            self.event(str(refused))
            return target

    def _others_run(self, target: ModelTarget, known: ResolvedWeights | None, found: ResolvedWeights) -> bool:
        """Whether replicas of the desired generation have other weights than ``found``."""
        if known is not None:
            return known != found
        # After a restart only the digests of the layers, of configuration and weights, are known.
        revision = (target.spec.name, target.aim.generation)
        held = self.observed.held.items()
        digests = [layer.digest for key, layer in held if (key.model, key.generation) == revision]
        return not all(digest.endswith(found.short) for digest in digests)
