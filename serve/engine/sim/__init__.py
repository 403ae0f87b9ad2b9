"""The simulated engine: vLLM's HTTP API over the latency model, deterministic text. Read first: `engine`."""
