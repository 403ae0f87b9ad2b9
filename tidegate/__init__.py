"""The command line and the supervisor: they compose the gateway, the replicas and the state."""
