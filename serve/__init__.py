"""The control plane: the controller, and replicas on Ray Serve or on this machine.

Read first: `controller`.
"""
