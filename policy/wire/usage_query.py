"""The accounting process's answers on usage and the ledger."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class UsageBy(StrEnum):
    """What usage can be summed by."""

    DAY = "day"
    MODEL = "model"
    ADAPTER = "adapter"
    KEY = "key"
    TENANT = "tenant"


class UsageQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Usage of one ``tenant`` or of all, from the UTC day ``since`` to ``until``, both included."""

    by: tuple[UsageBy, ...] = (UsageBy.TENANT,)
    tenant: str | None = None
    since: str | None = None
    until: str | None = None


class UsageRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A sum of usage; of ``day``, ``tenant``, ``key``, ``model``, ``adapter`` those that it is summed by.

    ``prompt_tokens`` include the ``cached_tokens``. ``estimated`` requests are charged by estimates, and
    ``interrupted`` ones too, as their gateway worker was killed. ``cost`` is in the currency of the prices.
    ``joules`` is 0 where no power is measured.
    """

    day: str | None = None
    tenant: str | None = None
    key: str | None = None
    model: str | None = None
    adapter: str | None = None
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    estimated: int
    interrupted: int
    cost: float
    joules: float


class LedgerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a host's ledger lacks: ``waiting`` requests, those in flight included, in ``segments`` files.

    ``behind_s``: since all that was final was in it. ``lost``: requests whose tenant was lost with a disk.
    """

    waiting: int
    behind_s: float
    segments: int
    lost: int
