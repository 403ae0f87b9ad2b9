"""How many tokens of KV cache fit beside the weights, in one replica and in a whole mode."""

from __future__ import annotations

import msgspec

BLOCK = 16  # vLLM's default block of KV cache, in tokens


class KvMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one device and what the model takes of it, all in bytes.

    ``device_bytes`` is M, ``usable`` the fraction u that the engine may take
    (``gpu_memory_utilization``), ``overhead_bytes`` A for activations and graphs on each device,
    ``weights_bytes`` W, ``bytes_per_token`` b_kv.
    """

    device_bytes: float
    overhead_bytes: float
    weights_bytes: float
    bytes_per_token: float
    usable: float = 0.9

    def replica_tokens(self, degree: int) -> int:
        """KV tokens of one replica on ``degree`` devices, in whole blocks; 0 when the weights do not fit."""
        room = degree * (self.usable * self.device_bytes - self.overhead_bytes) - self.weights_bytes
        return max(0, int(room / self.bytes_per_token) // BLOCK * BLOCK)
