"""Charts and HTML pages of simulation results. Read first: `page`."""
