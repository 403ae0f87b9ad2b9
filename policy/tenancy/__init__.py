"""Money, limits and usage of tenants and their keys.

Read first: `price`, `usage_record`.
"""
