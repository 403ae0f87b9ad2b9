"""Sources given over HTTP lead to no private host: by name, number, redirect or a second resolution."""

from __future__ import annotations

import socket
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import httpx
import pytest

from store.adapters.fetch import fetch
from store.adapters.public_hosts import PublicHosts, client, is_public
from tests.store.adapters.making import files
from tests.store.adapters.test_fetch import Site, job, refused, served


@pytest.fixture(autouse=True)
def without_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.mark.parametrize(
    ("address", "public"),
    [
        *((each, True) for each in (
            "1.1.1.1", "9.255.255.255", "2606:4700::1111", "64:ff9b::1.1.1.1", "2002:101:101::1",
        )),
        *((each, False) for each in (
            "0.0.0.0", "10.0.0.1", "100.100.100.200", "127.0.0.1", "127.9.9.9", "169.254.169.254",
            "172.16.0.1", "192.0.0.192", "192.168.1.1", "198.18.0.1", "224.0.0.1", "255.255.255.255",
            "168.63.129.16",
            "::", "::1", "fe80::1", "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "::ffff:127.0.0.1",
            "::127.0.0.1", "64:ff9b::169.254.169.254", "64:ff9b:1::1", "2002:a00:1::1", "2001:db8::1",
        )),
    ],
)  # fmt: skip
def test_only_addresses_of_the_internet_are_public(address: str, public: bool) -> None:
    assert is_public(ip_address(address)) is public


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "127.1", "2130706433", "0x7f000001", "0", "[::1]", "[::ffff:127.0.0.1]"],
)
@pytest.mark.parametrize("proxy", ["", "http://127.0.0.1:9"])
def test_a_private_host_gets_no_request(
    host: str, proxy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", proxy)
    with served(Site()) as site:
        given = job(tmp_path, site.url.replace("127.0.0.1", host))._replace(hosts=PublicHosts(["10.0.0.0/8"]))
        error = refused(lambda: fetch(given))
        assert (error.code, "adapters.private_hosts" in str(error)) == ("source_not_public", True)
        assert site.ranges == []


@pytest.mark.parametrize("listed", ["localhost", "LocalHost", "127.0.0.0/8", "127.0.0.1"])
def test_a_listed_host_is_fetched_from(listed: str, tmp_path: Path) -> None:
    with served(Site()) as site:
        site.statuses, site.location = [302], "/a.zip"  # a relative redirect keeps the name
        given = job(tmp_path, site.url.replace("127.0.0.1", "localhost"))
        fetch(given._replace(hosts=PublicHosts([listed, "::1"])))
    assert {path.name: path.read_bytes() for path in given.into.iterdir()} == files()


@pytest.mark.parametrize(
    "to", ["http://127.0.0.1:1/a.zip", "http://169.254.169.254/latest/meta-data/", "http://[::1]/"]
)
def test_a_redirect_to_a_private_host_is_refused(to: str, tmp_path: Path) -> None:
    with served(Site()) as site:
        site.statuses, site.location = [302], to
        given = job(tmp_path, site.url.replace("127.0.0.1", "localhost"))
        error = refused(lambda: fetch(given._replace(hosts=PublicHosts(["localhost"]))))
        assert (error.code, len(site.ranges)) == ("source_not_public", 1)


def test_the_connection_is_made_to_the_address_that_was_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name of an attacker's can resolve to an allowed address first and to another one then."""
    resolve, answers = socket.getaddrinfo, ["127.0.0.1", "169.254.169.254"]

    def rebinding(host: Any, *more: Any, **options: Any) -> Any:
        return resolve(answers.pop(0) if host == "evil.example" else host, *more, **options)

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    with served(Site()) as site:
        given = job(tmp_path, site.url.replace("127.0.0.1", "evil.example"))
        fetch(given._replace(hosts=PublicHosts(["127.0.0.1"])))
        assert (len(site.ranges), answers) == (1, ["169.254.169.254"])


class _TwoAddresses(PublicHosts):
    def resolve(self, host: str, port: int) -> list[str]:
        return ["127.0.0.2", "127.0.0.1"]


def test_the_next_address_is_tried_where_packets_to_one_are_dropped() -> None:
    with served(Site()) as site, socket.socket() as full, socket.socket() as first:
        # A full backlog: the kernel drops further connection requests.
        full.bind(("127.0.0.2", httpx.URL(site.url).port))
        full.listen(0)
        first.connect(full.getsockname())
        with client(_TwoAddresses(()), httpx.Timeout(60, connect=0.2)) as http:
            assert http.get(site.url).is_success


@pytest.mark.parametrize(
    "source", ["ftp://h/a.zip", "sftp://10.0.0.1/a", "memory://b/a.zip", "reference://x", "hdfs://h/a"]
)
def test_other_urls_that_name_a_host_need_it_to_be_listed(source: str, tmp_path: Path) -> None:
    error = refused(lambda: fetch(job(tmp_path, source)._replace(hosts=PublicHosts(()))))
    assert error.code == "source_not_public"


def test_a_store_of_the_machines_own_settings_needs_no_listing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
    error = refused(lambda: fetch(job(tmp_path, "s3://bucket/sql")._replace(hosts=PublicHosts(()))))
    assert "Install s3fs" in str(error)
