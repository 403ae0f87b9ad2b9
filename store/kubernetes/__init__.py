"""The API server of Kubernetes, for gateways and the controller."""
