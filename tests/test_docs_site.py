"""The hooks of mkdocs.yml: links between files lead to pages, and no page loads from another host."""

from __future__ import annotations

import importlib.util
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from mkdocs.exceptions import PluginError

from tests.test_docs import ROOT


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mkdocs_hooks", ROOT / "scripts" / "mkdocs_hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def page(uri: str) -> Any:
    return SimpleNamespace(file=SimpleNamespace(src_uri=uri), meta={})


# The page, a link of it in the repository, and the link on the site.
LINKS = """
index.md docs/scaling.md#which-policy scaling.md#which-policy
index.md docs/adr adr/index.md
index.md CONTRIBUTING.md repository/CONTRIBUTING.md
page.md page/now.png page/now.png
scaling.md examples/custom_policy.py examples/custom_policy.py.md
modes.md ../deployments/crossover.yaml repository/deployments/crossover.yaml.md
adr/0014-simulator-runs-production-code.md ../simulation.md ../simulation.md
repository/deployments/observability/README.md ../../docs/metrics.md ../../../metrics.md
repository/deployments/index.md workloads workloads/index.md
index.md https://example.org/x.md https://example.org/x.md
"""


@pytest.mark.parametrize("case", LINKS.strip().splitlines())
def test_a_link_leads_to_the_page_of_its_file(hooks: ModuleType, case: str) -> None:
    uri, link, expected = case.split()
    text = hooks.on_page_markdown(f"[a]({link}), `[b]({link})`", page=page(uri), config=None, files=None)
    assert text == f"[a]({expected}), `[b]({link})`"


@pytest.mark.parametrize(
    "element",
    [
        '<script src="https://cdn.example/a.js"></script>',
        '<link rel="stylesheet" href="//fonts.example/css">',
        "<img alt=x src=http://example.org/a.png>",
    ],
)
def test_a_page_that_loads_from_another_host_is_refused(hooks: ModuleType, element: str) -> None:
    with pytest.raises(PluginError, match="loads from another host"):
        hooks.on_post_page(f"<head></head>{element}", page=page("index.md"), config=None)
    link = '<head></head><a href="https://example.org">there</a><script src="a.js"></script>'
    assert "Content-Security-Policy" in hooks.on_post_page(link, page=page("index.md"), config=None)
