"""Engine models fitted to measured load points, and their error on held-out ones. Read first: `fit`."""
