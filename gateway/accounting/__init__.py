"""The accounting process of a host: keys, leases of limits, the ledger and the audit trail in the database.

Read first: `main`.
"""
