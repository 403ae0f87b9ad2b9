"""Commands that start, change and stop a deployment. Read first: `up_run_down`."""
