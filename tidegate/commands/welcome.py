"""What ``up`` prints: progress while it starts, and how to ask the first question."""

from __future__ import annotations

import json
import sys

import click

from policy.config import Deployment
from policy.types import Runner
from tidegate.progress import Event
from tidegate.readiness import endpoint

_QUESTION = "What is the capital of France?"


class EventPrinter:
    """Events as lines; on a terminal the line of a step that goes on is written over."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._open = False

    def __call__(self, event: Event) -> None:
        """Print one event."""
        step = f"{event.step:<12}"
        if event.kind == "step":
            done = "" if event.fraction is None else f" {event.fraction:.0%}"
            self._line(f"  {step}{event.message}{done}", stays=not self._terminal)
        elif event.kind == "done":
            self._line(f"{click.style('✓', fg='green')} {step}{event.message}", stays=True)
        elif event.kind == "ended":
            self._line(f"  ended {event.step} ({event.message})", stays=True)
        elif event.kind == "failed":
            self._line("", stays=False)
            click.echo(f"tidegate: {event.message}", err=True)
        elif event.kind != "ready":
            self._line(f"  {event.message}", stays=True)

    def _line(self, text: str, *, stays: bool) -> None:
        if self._open:
            click.echo("\r\x1b[K", nl=False)
        click.echo(text[:200] if not stays else text, nl=stays)
        self._open = not stays and bool(text)


def welcome(deployment: Deployment) -> str:
    """A ``curl`` and a Python snippet that can be pasted."""
    base = endpoint(deployment.gateway.host, deployment.gateway.port)
    spec = next((spec for spec in deployment.models if spec.runner is Runner.GENERATE), None)
    head = f"\nTidegate answers at {base}/v1\n"
    if spec is None:
        return head
    body = {
        "model": spec.name,
        "messages": [{"role": "user", "content": _QUESTION}],
        "temperature": 0,
        "max_tokens": 32,
    }
    key, header = "unused", ""
    if deployment.tenants:
        key = f"KEY-OF-{deployment.tenants[0].name}"
        header = f"\n  -H 'Authorization: Bearer {key}' \\"
    return f"""{head}
curl {base}/v1/chat/completions \\{header}
  -H 'Content-Type: application/json' \\
  -d '{json.dumps(body)}'

from openai import OpenAI
client = OpenAI(base_url="{base}/v1", api_key="{key}")
answer = client.chat.completions.create(
    model="{spec.name}", messages=[{{"role": "user", "content": "{_QUESTION}"}}], temperature=0, max_tokens=32
)
print(answer.choices[0].message.content)
"""
