"""The data plane: OpenAI's HTTP API, admission, routing and relay to the replicas.

Read first: `request_pipeline`.
"""
