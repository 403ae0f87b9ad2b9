"""The first question: the ``curl`` that ``up`` prints, run by a shell as it is printed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

_CURL = re.compile(r"^curl .*?(?=\n\n)", re.MULTILINE | re.DOTALL)


def ask(output: str, folder: Path) -> str:
    """Run the command in the output of ``up``; returns the answer's text, once its status is 200."""
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    (command,) = _CURL.findall(output)
    # The command stays as it is; the status comes from curl's own configuration.
    (folder / ".curlrc").write_text('silent\nnoproxy = "*"\nwrite-out = "\\n%{http_code}"\n')
    env = os.environ | {"CURL_HOME": str(folder)}
    done = subprocess.run(
        ["/bin/sh", "-c", command], env=env, capture_output=True, text=True, timeout=300, check=True
    )
    body, _, status = done.stdout.rpartition("\n")
    assert status == "200", done.stdout
    text: str = json.loads(body)["choices"][0]["message"]["content"]
    return text
