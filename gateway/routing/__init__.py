"""The replicas that this worker knows, and the router over them.

Read first: `fleet`.
"""
