"""Wait until the vLLM server of this pod has no requests: its preStop hook.

Kubernetes takes a pod that ends out of its service meanwhile. Arguments: the server's port, and the least
time in seconds, until gateways know. Ends at once where no server answers.
"""

import re
import sys
import time
import urllib.request

_COUNT = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{.*\})? ([0-9.e+]+)", re.MULTILINE)


def requests(port: int) -> float:
    """The requests that run and wait; raises ``OSError``."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        return sum(map(float, _COUNT.findall(answer.read().decode())))


def main() -> None:
    """Return once there are none."""
    port, least_s = int(sys.argv[1]), float(sys.argv[2])
    time.sleep(least_s)
    try:
        while requests(port):
            time.sleep(1)
    except OSError:
        return


if __name__ == "__main__":
    main()
