"""Ports for programs that make their process group by themselves."""
import random
import socket
from contextlib import ExitStack

LENT = range(20000, 32768)
"""Below the ports that Linux gives to outgoing connections: another test's connection would take one of those between its choice and its use."""


def free_ports(count: int) -> list[int]:
    """Different ports of this machine on which nothing listens."""
    ports = []
    with ExitStack() as held:
        while len(ports) < count:
            try:
                ports.append(held.enter_context(socket.create_server(("", random.SystemRandom().choice(LENT)))).getsockname()[1])
            except OSError:
                continue  # in use
    return ports
