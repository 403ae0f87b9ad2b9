"""Tenants, API keys and admin keys in the database, the audit trail of changes, leases and the ledger.

Read first: `keys`.
"""
