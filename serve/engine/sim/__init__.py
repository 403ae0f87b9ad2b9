"""The simulated engine: vLLM's HTTP API with timing from the latency model and deterministic text."""

from serve.engine.sim.engine import create

__all__ = ["create"]
