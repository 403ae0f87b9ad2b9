"""Actuators: what makes and ends replicas, on Ray Serve or on this machine."""
