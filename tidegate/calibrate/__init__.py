"""Calibration of live replicas: closed-loop load, and the check of the simulator.

Read first: `calibration`.
"""
