"""The commands of the command line. Read first: `options`."""
