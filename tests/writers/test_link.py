"""The links between processes: every connection is closed by the thread that reads it alone."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

import pytest

from actds.errors import ActdsError
from actds_testing.faulty_disk import wait_until
from actds_writers.config import HarvestSettings
from actds_writers.ipc.link import Hub, Link

MESSAGE = "whole"


class Wire:
    """A hub with one peer, and what happens between the two reads of a message."""

    def __init__(self, folder: Path) -> None:
        address, key = str(folder / "hub.sock"), secrets.token_bytes(8)
        self.hub = Hub(Listener(address, family="AF_UNIX", authkey=key))
        self.peer = Client(address, family="AF_UNIX", authkey=key)
        self.peer.send("writer")
        wait_until(lambda: bool(self.hub.roles()), "the peer")
        self.stranger = folder / "stranger"
        self.stranger.write_bytes(b"x" * 4096)
        self.opened: list[int] = []
        self.taken: list[object] = []

    def open_stranger(self) -> None:
        """Open a file, which takes the lowest descriptor that is free."""
        self.opened.append(os.open(self.stranger, os.O_RDWR))

    def poll(self) -> int:
        return self.hub.poll(0.0, lambda _role, message, _from: self.taken.append(message))


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    wire = Wire(tmp_path)
    yield wire
    wire.hub.close()
    wire.peer.close()
    for descriptor in wire.opened:
        os.close(descriptor)  # fails where somebody else has closed it


def once_inside(monkeypatch: pytest.MonkeyPatch, name: str, n: int, do: Callable[[], None]) -> None:
    """Call ``do`` inside the n-th call of a method of connections, before it goes on."""
    method, calls = getattr(Connection, name), []

    def entering(self: Connection, *args: object) -> object:
        calls.append(name)
        if len(calls) == n:
            do()
        return method(self, *args)

    monkeypatch.setattr(Connection, name, entering)


def in_thread(do: Callable[[], object]) -> None:
    thread = threading.Thread(target=do)
    thread.start()
    thread.join()


def test_a_failed_send_of_another_thread_leaves_the_reader_its_connection(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between length and body of a message its sender dies, and another thread sends to it."""
    wire.peer.send(MESSAGE)
    sent: list[bool] = []

    def interleave() -> None:
        wire.peer.close()
        in_thread(lambda: sent.append(wire.hub.send("writer", "late")))
        wire.open_stranger()

    once_inside(monkeypatch, "_recv", 2, interleave)
    assert wire.poll() == 1 and (sent, wire.taken) == ([False], [MESSAGE])
    assert wire.poll() == 0 and wire.hub.roles() == set()


def test_two_threads_that_find_a_peer_gone_close_its_connection_once(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire.peer.close()
    closers: list[int] = []
    for n in (1, 2):
        once_inside(monkeypatch, "_close", n, lambda: closers.append(threading.get_ident()))
    in_thread(lambda: wire.hub.send("writer", "late"))
    assert wire.poll() == 0 and wire.hub.roles() == set()
    assert closers == [threading.get_ident()]


def test_a_connection_that_ends_is_not_closed_under_a_thread_that_sends(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    polled = threading.Event()
    wire.peer.close()

    def end() -> None:
        wire.poll()
        polled.set()

    def interleave() -> None:
        threading.Thread(target=end, daemon=True).start()
        wait_until(lambda: not wire.hub.roles(), "the end of the peer")
        polled.wait(0.2)  # longer than a close takes where nothing holds it back
        wire.open_stranger()

    once_inside(monkeypatch, "_send", 1, interleave)
    assert not wire.hub.send("writer", MESSAGE)
    assert polled.wait(60)
    assert wire.stranger.read_bytes() == b"x" * 4096


def test_a_peer_that_reads_nothing_holds_up_neither_progress_nor_its_end(wire: Wire) -> None:
    sender = threading.Thread(target=wire.hub.send, args=("writer", b"x" * (64 << 20)))
    sender.start()
    wait_until(lambda: not wire.hub.send("writer", "progress", patient=False), "a full socket")
    wire.hub.disconnect("writer")
    sender.join(60)
    assert not sender.is_alive() and wire.hub.roles() == set()


def test_a_process_that_is_killed_as_it_accepts_is_said_to_have_ended(tmp_path: Path) -> None:
    link = Link(
        str(tmp_path), secrets.token_hex(8), "r-0", (), HarvestSettings.model_construct(), 0, 0, 0
    )
    alive = [True]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "writer.sock"))
        listener.listen()

        def accept_and_die() -> None:
            listener.accept()[0].close()
            alive.clear()
            listener.close()

        accepting = threading.Thread(target=accept_and_die)
        accepting.start()
        with pytest.raises(ActdsError, match="E506 link writer: its process has ended"):
            link.connect("writer", "harvest", is_alive=lambda: bool(alive))
        accepting.join()
