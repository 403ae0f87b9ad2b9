"""Money, limits and usage of tenants and their keys.

Read first: `token_bucket`, `price`, `usage_record`.
"""
