"""What a request is for: tenant, model, adapter version, and its cost in tokens.

Read first: `request_resolver`.
"""
