"""A program that knows a run's port but not its secret: python strangers.py HOST PORT COUNT. It opens COUNT connections. Some
send nothing and are held; others send random bytes, half of a message, a hello, or what would be taken without a secret. Prints
how many it opened, and the different texts that it was sent.
"""

import json
import os
import re
import socket
import sys
from contextlib import suppress

HELD = 200
NONCE = b"ab" * 32
CALL = json.dumps({"rank": 1, "count": 9, "host": "evil", "pid": 1, "versions": {"jaxllm": "0"}}).encode()
WORDS = (
    b"",
    os.urandom(2000),
    b"jaxllm roll call {",
    b"jaxllm roll call hello " + NONCE + b"\n",
    b"jaxllm roll call " + CALL + b"\n",
    b"hello " + NONCE + b"\n" + NONCE + b' {"hello": 1, "host": "h1", "pid": 101}\n',
    b'{"hello": 1, "host": "h1", "pid": 101}\n{"notice": {"sentence": "the end", "code": 2}}\n',
)


def main(host: str, port: str, count: str) -> None:
    opened, held, heard = 0, [], set()
    for number in range(int(count)):
        # Refused once the run has started.
        with suppress(OSError):
            held.append(socket.create_connection((host, int(port)), timeout=10))
            opened += 1
            held[-1].settimeout(0)
            held[-1].send(WORDS[number % len(WORDS)])
        if len(held) > HELD or number == int(count) - 1:
            with held.pop(0) as oldest, suppress(OSError):
                heard.add(re.sub(rb"[0-9a-f]{64}", b"NONCE", oldest.recv(65536)))
    print(json.dumps({"opened": opened, "heard": b" ".join(heard).decode(errors="replace")}))


if __name__ == "__main__":
    main(*sys.argv[1:])
