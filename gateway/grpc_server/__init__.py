"""gRPC ports of a gateway worker, and messages that are declared by their field numbers.

gRPC costs 30 MB and has packages of its own, so only what a configured port needs imports it.
"""
