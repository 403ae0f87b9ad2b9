"""Statistics in plain numbers: histograms, quantiles, windows and decaying counts. Read first: `windows`."""
