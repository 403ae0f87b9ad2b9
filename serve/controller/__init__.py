"""The controller process and its HTTP API. Read first: `controller`."""
