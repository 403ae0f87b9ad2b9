"""The offline optimum: a lower bound of the GPU time of any scaling policy. Read first: `offline_optimum`."""
