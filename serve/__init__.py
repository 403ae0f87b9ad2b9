"""The control plane: replicas on Ray Serve, the actuator and the controller."""
