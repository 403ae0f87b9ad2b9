"""The parts of the benchmark: cost, latency, routing, failures and memory."""
