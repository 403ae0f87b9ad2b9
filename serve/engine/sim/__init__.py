"""The simulated engine: vLLM's HTTP surface, timed by the engine model, the same text every time."""

from serve.engine.sim.engine import create

__all__ = ["create"]
