"""The FastAPI application of the gateway's two ports. Read first: `application`."""
