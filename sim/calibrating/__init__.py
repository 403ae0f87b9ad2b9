"""What a calibration drives, what it makes of that, and how the twin is held against what was live."""
