"""Load tests with locust, and benchmarks of the gateway.

Read first: `locustfile`.
"""
