"""The HTTP/1.1 server of the client port and the HTTP/1.1 client to replicas, on uvloop.

Read first: `server`.
"""
