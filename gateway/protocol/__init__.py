"""Bodies, paths, errors and SSE of the OpenAI and Anthropic APIs.

Read first: `paths`.
"""
