"""The simulator: the policies that are deployed, run on a trace in virtual time. Read first: `twin.run`."""
