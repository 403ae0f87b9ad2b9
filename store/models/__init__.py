"""Model weights: fetch, prepare once into the cache, and verify by digest.

Read first: `prepare`.
"""
