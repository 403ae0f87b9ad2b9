"""How the database became what it is, step by step; run by :mod:`store.database` at every start."""
