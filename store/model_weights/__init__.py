"""Model weights: fetched, prepared once into the cache, and verified by digest. Read first: `prepare`."""
