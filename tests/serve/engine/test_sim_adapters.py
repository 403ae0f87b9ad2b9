"""Adapters of the simulated engine: slots, loads that delay its steps, and 404 for unloaded ones."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from policy.errors import AdapterRefused, EngineFailed
from serve.engine.interface import Engine
from tests.serve.sim_driver import FROZEN, client_of, engine_of, post, spec, until


def adapter(folder: Path, name: str) -> Path:
    path = folder / name
    path.mkdir()
    (path / "adapter_config.json").write_text("{}")
    return path


async def complete(client: httpx.AsyncClient, model: str) -> httpx.Response:
    body = {"model": model, "prompt": "The tide", "max_tokens": 8}
    return await client.post("/v1/completions", json=body)


async def test_loaded_adapters_are_served_by_name(tmp_path: Path) -> None:
    async with engine_of(spec(slots=2)) as engine, client_of(engine) as client:
        assert (engine.adapter_slots, engine.adapters()) == (2, ("sql",))
        for letter in "ab":
            await engine.load(f"x@{letter}", adapter(tmp_path, letter))
        assert engine.adapters() == ("sql", "x@a", "x@b")
        assert await engine.loaded() == {"x@a", "x@b"}
        answers: dict[str, Any] = {
            name: (await complete(client, name)).json() for name in ("base", "sql", "x@a", "x@b")
        }
        assert [answer["model"] for answer in answers.values()] == list(answers)
        # Each model has its own text, and repeats it.
        assert len({answer["choices"][0]["text"] for answer in answers.values()}) == 4
        again = (await complete(client, "x@a")).json()
        assert again["choices"][0]["text"] == answers["x@a"]["choices"][0]["text"]
        listed = (await client.get("/v1/models")).json()["data"]
        assert [(entry["id"], entry["parent"]) for entry in listed][2:] == [("x@a", "base"), ("x@b", "base")]
        await engine.unload("x@a")
        gone = await complete(client, "x@a")
        assert (gone.status_code, gone.json()["error"]["param"]) == (404, "model")
        # Adapters of the engine arguments are kept, and use no slot.
        await engine.unload("sql")
        await engine.load("x@c", adapter(tmp_path, "c"))
        assert engine.adapters() == ("sql", "x@b", "x@c")


async def test_loads_beyond_the_slots_and_invalid_adapters_are_refused(tmp_path: Path) -> None:
    async with engine_of(spec(slots=1)) as engine:
        with pytest.raises(AdapterRefused) as refused:
            await engine.load("x@a", tmp_path)
        assert refused.value.code == "engine_refused"
        await engine.load("x@b", adapter(tmp_path, "b"))
        await engine.load("x@b", tmp_path / "b")
        with pytest.raises(AdapterRefused, match="slots"):
            await engine.load("x@c", adapter(tmp_path, "c"))
        assert await engine.loaded() == {"x@b"}


async def test_a_load_waits_for_the_running_step(tmp_path: Path) -> None:
    async with engine_of(spec(slots=1, speed=FROZEN)) as engine:
        request = post(engine, "/v1/completions", {"model": "base", "prompt": "x", "max_tokens": 4})
        await until(lambda: engine.stats().running == 1)
        with pytest.raises(TimeoutError):
            await bounded(engine, adapter(tmp_path, "a"))
        assert (engine.adapters(), engine.stats().steps) == (("sql",), 0)
        request.leave()
        await request.task


async def test_a_load_takes_its_modelled_time_in_an_idle_engine(tmp_path: Path) -> None:
    async with engine_of(spec(slots=1, speed=1.0, adapter_load_s=3600.0)) as engine:
        with pytest.raises(TimeoutError):
            await bounded(engine, adapter(tmp_path, "a"))
        request = post(engine, "/v1/completions", {"model": "base", "prompt": "x", "max_tokens": 1})
        await until(lambda: engine.stats().waiting == 1)
        assert engine.stats().steps == 0
        request.leave()
        await request.task


async def test_a_load_fails_when_its_engine_closes(tmp_path: Path) -> None:
    async with engine_of(spec(slots=1, speed=FROZEN, adapter_load_s=1.0)) as engine:
        loading = asyncio.ensure_future(engine.load("x@a", adapter(tmp_path, "a")))
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EngineFailed):
            await loading


async def bounded(engine: Engine, path: Path) -> None:
    async with asyncio.timeout(0.01):
        await engine.load("x@a", path)
