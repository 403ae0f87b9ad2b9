"""The engine model: step times, capacity within the SLO, calibration, and the step scheduler.

Read first: `performance_model`.
"""
