"""The supervisor, which starts, watches and stops the processes of a deployment. Read first: `supervisor`."""
