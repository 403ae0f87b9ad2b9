"""The command line and the supervisor, which start and connect the other packages. Read first: `cli`."""
