"""What external servers have cached, by the events that they publish. Read first: `server_cache`."""
