"""stub"""
from __future__ import annotations
from typing import NamedTuple
from policy.engine_model import EngineModel
from policy.types import Beat
from store.state import StateDir

class Fitted(NamedTuple):
    model: EngineModel
    version: int
    error: float

class Calibrations:
    def __init__(self, state: StateDir) -> None: ...
    def take(self, beat: Beat) -> None: ...
    def fitted(self, model: str, shape: str) -> Fitted | None:
        return None
    def slowness(self, replica: str) -> float:
        return 1.0
