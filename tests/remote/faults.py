"""What can happen to a shared store: each begins, and ends by itself or when it is told to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.remote.proxy import Proxy
from tests.remote.servers import RedisServer

SLOW_S = 0.1


@dataclass(frozen=True)
class Fault:
    """`begin` and `end` it; with `loses`, what was stored is gone afterwards."""

    name: str
    begin: Callable[[], object]
    end: Callable[[], object]
    loses: bool = False
    is_an_outage: bool = True  # nothing can be read meanwhile


def faults_of(server: RedisServer, proxy: Proxy) -> list[Fault]:
    """All that is done to one server, which engines reach through the proxy."""

    def spoil(name: str) -> Callable[[], object]:
        return lambda: setattr(proxy, "spoil", getattr(proxy, name))

    def new_password() -> None:
        with server.client() as client:
            client.config_set("requirepass", "another-word")
            client.execute_command("AUTH", "another-word")
            client.execute_command("CLIENT", "KILL", "TYPE", "normal")  # who was in must say it, too

    def old_password() -> None:
        server.password = "another-word"
        with server.client() as client:
            client.config_set("requirepass", "")
        server.password = ""

    def fill_up() -> None:
        with server.client() as client:
            client.config_set("maxmemory-policy", "noeviction")
            client.config_set("maxmemory", "1")

    def make_room() -> None:
        with server.client() as client:
            client.config_set("maxmemory", "0")

    good = proxy.well_behaved
    return [
        Fault("killed", server.kill, server.start, loses=True),
        Fault("paused", server.pause, server.resume),
        Fault("slow", lambda: setattr(proxy, "delay_s", SLOW_S), good),
        Fault("full", fill_up, make_room, is_an_outage=False),
        Fault("flipped values", spoil("flip"), good),
        Fault("truncated values", spoil("truncate"), good),
        Fault("swapped values", spoil("swap"), good),
        Fault("all sorts of values", spoil("any_of_them"), good),
        Fault("connections that end in a value", lambda: setattr(proxy, "cuts_off", True), good),
        Fault("away", proxy.go_away, good),
        Fault("another password", new_password, old_password),
    ]


def fault_named(name: str, server: RedisServer, proxy: Proxy) -> Fault:
    return next(fault for fault in faults_of(server, proxy) if fault.name == name)


NAMES = (
    "killed",
    "paused",
    "slow",
    "full",
    "flipped values",
    "truncated values",
    "swapped values",
    "all sorts of values",
    "connections that end in a value",
    "away",
    "another password",
)
