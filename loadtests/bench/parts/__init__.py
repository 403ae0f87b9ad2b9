"""The parts of the gateway benchmark: cost, latency, routing, adapters, failing, soak."""
