"""The measurement of the bandwidth between two nodes, over loopback."""

from __future__ import annotations

import socket
import threading

from serve.internode_bandwidth import receive, send


def test_what_is_sent_arrives_before_it_is_counted() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    receiver = threading.Thread(target=receive, args=(server,))
    receiver.start()
    speed, trip = send("127.0.0.1", server.getsockname()[1], 0.01)
    receiver.join()
    assert speed > 0
    assert trip > 0
    assert server.fileno() == -1
