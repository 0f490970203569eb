"""The life of an agent: one a host, longer than that of who started it, and no trace after it."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from dtckpt.errors import StorageError
from dtckpt.storage import PeersStore, agent_status, start_agent, stop_agent
from dtckpt.storage.peers import greeting, job

from ...waiting import wait_for
from .hosts import Hosts, hosts, is_running

ROOT = Path(__file__).parents[3]


def test_who_starts_at_the_same_time_gets_the_same_one() -> None:
    try:
        with ThreadPoolExecutor(4) as pool:
            begun = [pool.submit(start_agent, "one", budget_bytes=1 << 20) for _ in range(4)]
            found = [future.result() for future in begun]
        assert len({status.pid for status in found}) == 1
        assert found[0].addresses == (), "nobody else is to reach it"
        again = start_agent("one", budget_bytes=1)
        assert (again.pid, again.budget_bytes) == (found[0].pid, 1 << 20)
    finally:
        assert stop_agent("one")
    assert agent_status("one") is None
    assert not stop_agent("one")
    assert not is_running(found[0].pid)


STARTER = """
import os, sys
from dtckpt.storage import PeersStore, start_agent
print(start_agent("orphan").pid, flush=True)
store = PeersStore("peers://orphan")
store.publish("x", b"alive", overwrite=False)
stream = store.create("torn", 1 << 20)
stream.write(bytes(1000))
print("ready", flush=True)
sys.stdin.read()
"""


def test_it_outlives_a_process_group_that_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STARTER],
        cwd=ROOT.parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        text=True,
    ) as starter:
        assert starter.stdout
        pid = int(starter.stdout.readline())
        assert starter.stdout.readline() == "ready\n"
        assert os.getsid(pid) != starter.pid
        os.killpg(starter.pid, signal.SIGKILL)
    try:
        store = PeersStore("peers://orphan")
        assert store.read("x") == b"alive"
        # What it was writing goes with it, and is never seen.
        wait_for(lambda: (status := agent_status("orphan")) and status.used_bytes == 5)
        assert [info.name for info in store.list()] == ["x"]
    finally:
        assert stop_agent("orphan")


def test_it_ends_when_nobody_has_been_there_for_long(tmp_path: Path) -> None:
    with hosts(tmp_path, "a", idle_seconds=0.2) as made:
        pid = made.pids["a"]
        wait_for(lambda: not is_running(pid))
        made.pids.clear()
    assert list(tmp_path.glob("*/*.json")) == []


def test_it_gives_way_and_takes_many_connections(tmp_path: Path) -> None:
    with hosts(tmp_path, "a") as made:
        pid = made.pids["a"]
        assert Path(f"/proc/{pid}/oom_score_adj").read_text() == "1000\n"
        peer = made.peer("a")
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        assert soft == hard
        for number in range(1100):  # each is a file of the agent
            peer.ask("put", b"1", name=f"x/{number}", stamp=1, above=0, is_new=True)
        other = made.peer("a")
        assert len(other.ask("look", directory="x")[0]["objects"]) == 1100
        assert other.ask("read", name="x/7", ranges=[(0, 1)])[1] == b"1"


def test_a_connection_keeps_it(tmp_path: Path) -> None:
    with hosts(tmp_path, "a", idle_seconds=0.2) as made:
        store = made.store("a")
        store.publish("x", b"1", overwrite=False)  # and keeps its connection
        with pytest.raises(subprocess.TimeoutExpired):
            subprocess.run(["sleep", "5"], timeout=0.6, check=True)
        assert is_running(made.pids["a"])
        assert store.read("x") == b"1"


def test_a_killed_one_is_replaced_and_what_it_held_is_gone(tmp_path: Path) -> None:
    with hosts(tmp_path, "a") as made:
        store = made.store("a")
        store.publish("x", b"1", overwrite=False)
        made.kill("a")
        assert made.status("a") is None
        assert list(store.list()) == []
        assert not store.exists("x")
        store.publish("y", b"2", overwrite=False)  # starts it
        status = made.status("a")
        assert status is not None
        made.pids["a"] = status.pid
        assert [info.name for info in store.list()] == ["y"]


def test_sigterm_ends_it_well(tmp_path: Path) -> None:
    with hosts(tmp_path, "a") as made:
        pid = made.pids.pop("a")
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGHUP)
        assert made.status("a") is not None, "a terminal is none of its business"
        os.kill(pid, signal.SIGTERM)
        wait_for(lambda: not is_running(pid))
    assert list(tmp_path.glob("*/*.json")) == []


def test_strangers_learn_nothing(tmp_path: Path) -> None:
    with hosts(tmp_path, "a") as made:
        made.store("a").publish("secret", b"weights", overwrite=False)
        status = made.status("a")
        assert status is not None
        ((host, port),) = status.addresses
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(12), b"\xff" * 4096):
            with socket.create_connection((host, port)) as stranger:
                stranger.sendall(said)
                with suppress(OSError):
                    stranger.shutdown(socket.SHUT_WR)
                    assert b"weights" not in stranger.recv(1 << 16)
        other = PeersStore(
            f"peers://{made.job}", agents=[f"{host}:{port}"], host="b", token="x" * 16
        )
        with pytest.raises(StorageError, match="does not know the token of the job"):
            other.read("secret")
        other = PeersStore(f"peers://{made.job}", agents=[f"{host}:{port}"], **made.options("b"))
        assert other.read("secret") == b"weights"


def test_other_versions_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hosts(tmp_path, "a") as made:
        monkeypatch.setattr(greeting, "PROTOCOL", 2)
        with pytest.raises(StorageError, match=r"of another version: it speaks protocol 1, .* 2"):
            start_agent(made.job, **made.options("a"))
        with pytest.raises(StorageError, match="another version"):
            made.store("b").read("x")
        monkeypatch.undo()


def test_secrets_that_others_can_read_are_refused(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    PeersStore("peers://x", registry=tmp_path)
    (token,) = tmp_path.glob("*.token")
    assert token.stat().st_mode & 0o777 == 0o600
    token.chmod(0o640)
    with pytest.raises(StorageError, match="others can read this secret"):
        PeersStore("peers://x", registry=tmp_path)
    monkeypatch.setenv(job.TOKEN_FILE, str(tmp_path / "none"))
    with pytest.raises(StorageError, match="none"):
        PeersStore("peers://x", registry=tmp_path)
    with pytest.raises(StorageError, match="16 or more"):
        PeersStore("peers://x", token="short")
    folder = tmp_path_factory.mktemp("f")  # sockets have short names only
    folder.chmod(0o755)
    monkeypatch.setenv(job.FOLDER, str(folder))
    with pytest.raises(StorageError, match="nobody else may enter"):
        PeersStore("peers://x", token="x" * 16)


def test_bad_settings() -> None:
    for url in ("peers://", "peers:///x", "peers://a/../b"):
        with pytest.raises(ValueError, match="bad"):
            PeersStore(url)
    with pytest.raises(ValueError, match="expected host:port"):
        PeersStore("peers://x", agents=["a"])
    with pytest.raises(TypeError, match="list of addresses"):
        PeersStore("peers://x", agents="a:1")
    with pytest.raises(ValueError, match="copies and keep"):
        PeersStore("peers://x", copies=0)
    with pytest.raises(ValueError, match="budget_bytes=-1"):
        start_agent("x", budget_bytes=-1)


def test_a_failure_to_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"cannot start an agent of .*192\.0\.2\.1|assign"):
        Hosts(tmp_path).start("a", address="192.0.2.1")


def test_it_needs_neither_torch_nor_numpy() -> None:
    code = "import sys, dtckpt.storage.peers.agent.process; print(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT.parent, capture_output=True, text=True, check=True
    )
    assert not {"torch", "numpy", "fsspec", "xxhash"} & set(run.stdout.split())
