"""Rates of tenants on the page, in Node.js with a document that keeps what is inserted."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from gateway.api.static_page import FOLDER

NODE = shutil.which("node")
SCRIPT = """
let now = 0;
let shown = null;
Object.defineProperty(globalThis, "performance", { value: { now: () => now } });
globalThis.Node = class {};
class Element extends Node {
  childNodes = [];
  firstChild = null;
  cells = [];
  append(...children) { this.cells.push(...children); }
  setAttribute() {}
  insertBefore(node) { shown = node; }
}
globalThis.document = { createElement: () => new Element() };
const text = (node) => (node instanceof Element ? node.cells.flatMap(text) : [node]);
const { tenants } = await import("./tenants.js");
const section = tenants(new Element());
const rates = [];
for (let second = 0; second <= 100; second += 1) {
  now = second * 1000;
  const used = { prompt_tokens: 50 * second, output_tokens: 7 * second };
  const controller = { at: Math.min(second, 10), waiting: [] };
  section.update({ tenants: [{ name: "web", ...used }], controller });
  rates.push(text(shown).slice(-2));
}
console.log(JSON.stringify(rates));
"""

pytestmark = [pytest.mark.process, pytest.mark.skipif(NODE is None, reason="node is not installed")]


def test_rates_stay_right_while_the_controller_is_away(tmp_path: Path) -> None:
    assert NODE is not None
    for module in FOLDER.glob("*.js"):
        shutil.copy(module, tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "test.js").write_text(SCRIPT)
    done = subprocess.run(
        [NODE, "test.js"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    # None before there are two seconds.
    assert json.loads(done.stdout)[2:] == [["50.0", "7.0"]] * 99
