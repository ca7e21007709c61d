"""Who passes, and as which tenant; whatever the path under which a proxy shows the server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire.config.server import NetworkOptions
from quire.protocol.errors import OptionError
from quire.server.http.auth import Access, AccessDenied, Hosts, KeyRing, Tenant
from quire.server.http.middleware import Load, Middleware


@pytest.mark.parametrize("root", ["", "/llm"])
@pytest.mark.parametrize(
    ("path", "key", "status"),
    [
        ("/health", "", 200),
        ("/static/main.js", "", 200),
        ("/v1/models", "", 401),
        ("/v1/models", "user", 200),
        ("/admin/abort", "user", 401),
        ("/admin/abort", "admin", 200),
    ],
)
def test_keys_behind_a_proxy(root: str, path: str, key: str, status: int) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            seen.append(message["status"])

    async def receive() -> Any:
        return {"type": "http.request"}

    seen: list[int] = []
    access = Access(KeyRing.of(["user"]), KeyRing.of(["admin"]))
    guarded = Middleware(app, NetworkOptions(), access, Load.alone())
    headers = [(b"authorization", f"Bearer {key}".encode())]
    scope = {
        "type": "http",
        "method": "GET",
        "path": root + path,
        "root_path": root,
        "headers": headers,
    }
    asyncio.run(guarded(scope, receive, send))
    assert seen == [status]


def test_whose_request_it_is() -> None:
    """A key where there are several; what `X-Tenant` says only where that is trusted."""

    def tenant(keys: list[str], trusted: bool, key: str, name: str | None) -> str:
        access = Access(KeyRing.of(keys), KeyRing.of([]), trusts_tenant_header=trusted)
        headers = [(b"x-api-key", key.encode())]
        headers += [] if name is None else [(b"x-tenant", name.encode())]
        return access.admit("/v1/models", headers).name

    none, one, two = [], ["k1"], ["k1", "k2"]
    for keys in (none, one):
        assert tenant(keys, False, "k1", None) == tenant(keys, False, "k1", "x") == ""
        assert tenant(keys, True, "k1", None) == "" != tenant(keys, True, "k1", "x")
        assert tenant(keys, True, "k1", "x") != tenant(keys, True, "k1", "y")
    first, second = (tenant(two, False, key, None) for key in two)
    assert "" != first != second != ""
    assert tenant(two, False, "k1", "x") == first, "a holder cannot split itself"
    names = {tenant(two, True, key, name) for key in two for name in (None, "x", "y")}
    assert len(names) == 6 and {first, second} < names


@pytest.mark.parametrize("values", [[b"a", b"b"], [b"a" * 129]])
def test_names_of_tenants_that_are_refused(values: list[bytes]) -> None:
    access = Access(KeyRing.of([]), KeyRing.of([]), trusts_tenant_header=True)
    headers = [(b"x-tenant", value) for value in values]
    with pytest.raises(AccessDenied, match="X-Tenant"):
        access.admit("/v1/models", headers)
    ignoring = Access(KeyRing.of([]), KeyRing.of([]))
    assert ignoring.admit("/v1/models", headers) == Tenant()


@pytest.mark.parametrize("path", ["/metrics", "/dashboard/state"])
@pytest.mark.parametrize(
    ("keys", "trusted", "wants_admin"),
    [([], False, False), (["k1"], False, False), (["k1", "k2"], False, True), ([], True, True)],
)
def test_a_shared_cache_of_one_tenant_is_no_secret(
    keys: list[str], trusted: bool, wants_admin: bool, path: str
) -> None:
    headers = [(b"x-api-key", b"k1")]
    for admin in ([], ["admin"]):
        access = Access(KeyRing.of(keys), KeyRing.of(admin), trusted, share_prefix_cache=True)
        assert access.admit("/v1/models", headers).shares_prefixes == wants_admin
        if not wants_admin:
            assert access.admit(path, headers) == Tenant()
            continue
        with pytest.raises(AccessDenied, match="admin") as denied:
            access.admit(path, headers)
        assert denied.value.status == (401 if admin else 403)


LOOPBACK = [
    "127.0.0.1",
    "127.0.0.1:8000",
    "127.9.9.9",
    "localhost:1",
    "LOCALHOST",
    "localhost.",
    "[::1]:8000",
    "",
]
FOREIGN = [
    "evil.example",
    "localhost.evil.example",
    "127.0.0.1.evil.example:8000",
    "[::2]",
    "10.0.0.1",
    "localhost@evil",
    "::1",
]


@pytest.mark.parametrize(
    ("listens_on", "allowed", "more", "fewer"),
    [
        ("127.0.0.1", (), [], ["api.example.org"]),
        ("127.0.0.5", (), [], ["api.example.org"]),
        ("localhost", (), [], ["api.example.org"]),
        ("::1", (), [], ["api.example.org"]),
        ("127.0.0.1", ("api.example.org",), ["api.example.org:80"], ["b.api.example.org"]),
        ("127.0.0.1", ("*.example.org",), ["a.example.org", "a.b.example.org."], ["example.org"]),
        ("0.0.0.0", ("api.example.org",), ["API.example.org"], ["other.example.org"]),
        ("0.0.0.0", (), FOREIGN, []),
        ("::", (), FOREIGN, []),
        ("192.0.2.7", (), FOREIGN, []),
        ("127.0.0.1", ("*",), FOREIGN, []),
    ],
)
def test_names_by_which_a_server_may_be_called(
    listens_on: str, allowed: tuple[str, ...], more: list[str], fewer: list[str]
) -> None:
    hosts = Hosts.of(NetworkOptions(host=listens_on, allowed_hosts=allowed))
    hosts.check([])
    for name in LOOPBACK + more:
        hosts.check([(b"host", name.encode())])
    for name in fewer + ([] if more is FOREIGN else FOREIGN):
        with pytest.raises(AccessDenied, match=r"Host .* --allowed-hosts") as denied:
            hosts.check([(b"host", b"localhost"), (b"host", name.encode())])
        assert denied.value.status == 421 and repr(name) in str(denied.value)


@pytest.mark.parametrize("name", ["http://example.org", "example.org:80", "", "a b"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(OptionError, match="allowed_hosts"):
        NetworkOptions(allowed_hosts=(name,))
