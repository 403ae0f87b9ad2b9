"""Open-loop replay of a trace, and capture of live traffic. Read first: `replay_and_capture`."""
