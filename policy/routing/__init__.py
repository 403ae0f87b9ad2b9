"""Choice of a replica by predicted time to first token, and outlier ejection.

Read first: `router`.
"""
