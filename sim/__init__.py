"""The simulator: the production policies on a trace in virtual time. Read first: `simulator.run`."""
