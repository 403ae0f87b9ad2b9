"""Commands of tenants, their API keys, admin keys, and the audit trail."""
