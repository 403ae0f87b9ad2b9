"""What external servers have cached, by the events that they publish. Read first: `external_server_cache`."""
