"""Ranks that do not find each other: one line each, in seconds, whatever is wrong."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from torch.distributed import TCPStore

from tests.ranks import ROOT, free_port, numbered, until
from utils.ranks import meeting

START = """
import os, sys
os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # as pretrain.py sets it
from utils.command import cli
from utils.ranks import distributed
from utils.ranks import meeting
meeting.PATIENT_S, meeting.UNKNOWN_S, meeting.STORE_S = 0.5, 1.0, 2.0
cli.main(lambda: distributed.start(device="cpu", timeout_s=6))
"""


def rank(
    number: int, size: int, port: int, address: str = "127.0.0.1", ends_first: str = "", **more: str
) -> subprocess.Popen[str]:
    env = numbered(size, MASTER_ADDR=address, MASTER_PORT=str(port), **more)[number]
    command, pipe = [sys.executable, "-c", ends_first + START], subprocess.PIPE
    return subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True
    )


@contextmanager
def silent() -> Iterator[tuple[int, list[Any]]]:
    """Something that accepts and says nothing; its port, and the connections so far."""
    listener, kept = socket.create_server(("127.0.0.1", 0)), list[Any]()

    def accept() -> None:
        try:
            while True:
                kept.append(listener.accept())
        except OSError:
            pass

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1], kept
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
        for connection, _ in kept:
            connection.close()


@pytest.mark.slow
def test_each_way_of_not_meeting_is_said_in_one_line() -> None:
    """All at the same time: the last line of each, and its exit status."""
    with ExitStack() as stack:
        foreign, taken = (stack.enter_context(silent())[0] for _ in range(2))
        a, b, c, d = (free_port() for _ in range(4))
        killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n"
        cases = [
            (rank(1, 2, a, "nowhere.invalid"), r"error on rank 1: .*that name is not known here"),
            (rank(1, 2, b), r"error on rank 1: .*nobody listens there"),
            (rank(1, 2, 99999), r"error on rank 1: MASTER_PORT=99999 is not a port"),
            (rank(1, 2, foreign), r"error on rank 1: .*does not answer as a store"),
            (rank(0, 2, taken), r"error: .*Address already in use"),
            (rank(0, 2, c), r"error: .*rank 1 of 2 did not come within timeout_s=6 s"),
            (rank(0, 3, d), r"error: .*rank 2 of 3 did not come within timeout_s=6 s"),
            (rank(1, 3, d), ""),
            (rank(2, 3, d, ends_first=killed), ""),
        ]
        ends = [process.communicate(timeout=60)[0] for process, _ in cases]
    for (process, expected), text in zip(cases, ends, strict=True):
        said = text.splitlines()[-1:] if expected else []
        assert [line for line in said if re.match(expected, line)] == said, text
        assert text.count("error") == bool(expected), text
        assert process.returncode == (-9 if process is cases[-1][0] else 2)


def test_an_address_of_a_failed_attempt_that_does_not_answer_is_tried_again() -> None:
    """As while a process that has inherited the socket of a killed rank lives on."""
    agents, renewed = (
        TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(2)
    )
    with silent() as (old, connections):
        agents.set(meeting.ADDRESS, f"127.0.0.1 {old}")
        early = rank(1, 2, agents.port, TORCHELASTIC_USE_AGENT_STORE="True")
        assert until(lambda: len(connections) == 2, within=30), "it looks, then connects"
        agents.set(meeting.ADDRESS, f"127.0.0.1 {renewed.port}")
        came = until(lambda: renewed.check(["came/1"]), within=30)
        early.kill()
        assert came, early.communicate()[0]
