"""The bodies of `/v1/models`: base models, then the adapters that a tenant may see, in OpenAI's format."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import msgspec

from gateway.intake.adapter_catalog import AliasEntry, CatalogView, View
from gateway.intake.principal import Principal
from gateway.routing.fleet import FleetView, ServedModel

# Encoded lists of adapters kept, one per set of tenants that see the same; each may have thousands of cards.
KEPT = 16
# Cards that are encoded in one turn of the event loop.
CARDS_A_TURN: Final = 1024

MakeCard = Callable[[str, AliasEntry, ServedModel, str], dict[str, Any]]


class ModelsResponse:
    """The bodies of ``/v1/models``; the adapters' part is joined once per catalog and set of tenants.

    An adapter's card is made once per name that it has for a client, by ``card``: catalogs change often, and
    little.
    """

    def __init__(self, fleet: FleetView, catalog: CatalogView, card: MakeCard | None = None) -> None:
        self._fleet = fleet
        self._catalog = catalog
        self._card = card or adapter_card
        self._made: dict[View, asyncio.Task[bytes]] = {}
        self._made_of: object = None

    async def all(self, principal: Principal) -> bytes:
        """Every model and adapter that ``principal`` may name; thousands take several turns."""
        cards = [card for served in self._fleet.models for card in _served_cards(served, principal)]
        parts = [msgspec.json.encode(card) for card in cards]
        if adapters := await self._adapters(principal):
            parts.append(adapters)
        return b'{"object":"list","data":[' + b",".join(parts) + b"]}"

    def one(self, name: str, principal: Principal) -> bytes | None:
        """The model or adapter that a request with this ``model`` would be served by."""
        if (served := self._fleet.get(name)) is not None and principal.may_use(served.name):
            return msgspec.json.encode(_card(served.name, served, None))
        if (found := self._catalog.find(name, principal)) is not None:
            entry, pinned = found
            base = self._fleet.get(entry.alias.model)
            if base is not None:
                digest = entry.main.digest if pinned is None else pinned.digest
                return msgspec.json.encode(self._card(name, entry, base, digest))
        if (listed := self._fleet.listing(name)) is not None and principal.may_use(listed[0].name, listed[1]):
            return msgspec.json.encode(_card(name, listed[0], listed[0].name))
        return None

    async def _adapters(self, principal: Principal) -> bytes:
        """The cards of the catalog's adapters with commas between them."""
        bases = [(served.name, served.max_model_len) for served in self._fleet.models]
        made_of = (self._catalog.changed, bases)
        if made_of != self._made_of or len(self._made) >= KEPT:
            self._made_of = made_of
            self._made.clear()
        view = self._catalog.views(principal)
        made = self._made.get(view)
        if made is None:
            made = self._made[view] = asyncio.create_task(self._joined(principal))
        try:
            return await asyncio.shield(made)  # others wait for it too
        except Exception:
            self._made.pop(view, None)
            raise

    async def _joined(self, principal: Principal) -> bytes:
        taken = {served.name for served in self._fleet.models}
        cards = []
        for number, entry in enumerate(self._catalog.visible(principal), 1):
            if number % CARDS_A_TURN == 0:
                await asyncio.sleep(0)
            base = self._fleet.get(entry.alias.model)
            if base is None:
                continue
            name = entry.alias.name
            if name in taken:  # by a model, or by the first of several adapters of one name
                name = f"{base.name}:{name}"
            taken.add(name)
            made_of, card = entry.cards.get(name, (None, b""))
            if not card or made_of != base.max_model_len:
                card = msgspec.json.encode(self._card(name, entry, base, entry.main.digest))
                entry.cards[name] = base.max_model_len, card
            cards.append(card)
        return b",".join(cards)


def _served_cards(served: ServedModel, principal: Principal) -> list[dict[str, Any]]:
    """A model, and the adapters that its servers list where they are not ours, as far as one may use them."""
    if not principal.may_use(served.name):
        return []
    listed = [name for name in served.listed if principal.may_use(served.name, name)]
    return [_card(served.name, served, None), *(_card(name, served, served.name) for name in listed)]


def adapter_card(name: str, entry: AliasEntry, base: ServedModel, digest: str) -> dict[str, Any]:
    """The card of an adapter that a client calls ``name``, at the version with this ``digest``."""
    return {**_card(name, base, base.name), "created": int(entry.alias.at), "root": digest}


def _card(name: str, served: ServedModel, parent: str | None) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "tidegate",
        "root": served.name,
        "max_model_len": served.max_model_len,
        "parent": parent,
    }
