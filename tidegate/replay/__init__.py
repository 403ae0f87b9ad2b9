"""Open-loop replay of a trace to an endpoint, and capture of live traffic. Read first: `replay_session`."""
