"""Migrations of the database schema, applied by :mod:`store.database` when it is opened."""
