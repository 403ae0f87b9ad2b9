"""What a model's section ``control`` may say beyond its types."""

from __future__ import annotations

from policy.control import Control
from policy.scaling.choice import choose


def check_control(path: str, control: Control) -> None:
    """The section at ``path``; raises :class:`policy.errors.ConfigError`."""
    choose(f"{path}.policy", control.policy)
    if control.shadow is not None:
        choose(f"{path}.shadow", control.shadow)
