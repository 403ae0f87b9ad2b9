"""Calibration of live replicas by closed-loop load, and of the simulator. Read first: `calibration`."""
