"""Answers of vLLM that this process writes without vLLM's HTTP app. Read first: `app`."""
