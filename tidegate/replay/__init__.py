"""Open-loop replay of a trace against an endpoint, and capture of live traffic. Read first: `replay_session`."""
