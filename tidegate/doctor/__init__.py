"""The checks of ``tidegate doctor``: machine, GPUs and deployment. Read first: `check_suite`."""
