"""Actuators, which start and stop replicas on Ray Serve or on this machine. Read first: `interface`."""
