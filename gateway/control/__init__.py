"""The gateway's exchange with the controller: documents in, reports out. Read first: `controller_feed`."""
