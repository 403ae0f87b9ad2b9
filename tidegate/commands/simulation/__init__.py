"""Commands that simulate, plan, benchmark, replay and calibrate. Read first: `simulate`."""
