"""Adapter placement compared with least loaded and with Ray Serve's multiplexing. Read first: `benchmark`."""
