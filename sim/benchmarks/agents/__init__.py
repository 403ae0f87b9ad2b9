"""The benchmark of sessions of agents: Tidegate's router beside its peers'. Read first: `benchmark`."""
