"""What a server of the web says of itself is not believed, and what it sends is bounded in memory and in time."""

import socketserver
import threading
from contextlib import suppress

import pytest
from store_servers import serving

from jaxllm.config import ConfigError
from jaxllm.data import stores
from jaxllm.data.prepare import prepare

pytest.importorskip("fsspec")
pytest.importorskip("httpx2")
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")

CONTENT = b'{"text": "law mesh ring"}\n' * 200


class Liar(socketserver.ThreadingTCPServer):
    """Answers each request by `rule(send, first, last)`, the bytes that it asks for.

    Attributes:
      sent: bytes of all answers.
      over: set at the end of the test: rules wait for it.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.rule, self.sent, self.over = honest, 0, threading.Event()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/a.jsonl"


class Answer(socketserver.StreamRequestHandler):
    def handle(self):
        asked = b""
        while (line := self.rfile.readline()).strip():
            asked += line
        first, last = asked.lower().partition(b"range: bytes=")[2].split()[0].split(b"-")

        def send(content):
            self.wfile.write(content)
            self.server.sent += len(content)

        with suppress(OSError):
            self.server.rule(self.server, send, int(first), int(last))


def head(first=0, last=0, length=None, status="206 Partial Content", more="", size=len(CONTENT)):
    length = f"Content-Length: {last + 1 - first if length is None else length}\r\n" if length != "none" else ""
    content_range = f"Content-Range: bytes {first}-{last}/{size}\r\n" if status.startswith("206") else ""
    return f'HTTP/1.1 {status}\r\nETag: "1"\r\n{content_range}{length}{more}Connection: close\r\n\r\n'.encode()


def honest(server, send, first, last):
    send(head(first, last) + CONTENT[first : last + 1])


def answering(*arguments, content=b"", **options):
    return lambda server, send, first, last: send(head(*arguments, **options) + content)


def after_the_listing(rule):
    """Honest about one byte, as the listing asks for it."""
    return lambda server, send, first, last: (honest if last == 0 else rule)(server, send, first, last)


def endless(server, send, first, last):
    send(head(first, last, "none", more="Transfer-Encoding: chunked\r\n"))
    while not server.over.is_set():
        send(b"10000\r\n" + b"y" * 65536 + b"\r\n")


def silent(server, send, first, last):
    server.over.wait()


def dripping(server, send, first, last):
    send(head(first, last))
    while not server.over.wait(0.02):
        send(b" ")


def slow(server, send, first, last):
    send(head(first, last))
    for at in range(first, last + 1, 500):
        server.over.wait(0.03)
        send(CONTENT[at : min(at + 500, last + 1)])


def shorter(server, send, first, last):
    send(head(first, last - 1) + CONTENT[first:last])


def broken_off(server, send, first, last):
    send(head(first, last) + CONTENT[first:last])


def longer(server, send, first, last):
    send(head(first, last, last + 2 - first) + CONTENT[first : last + 1] + b"x")


def elsewhere(server, send, first, last):
    send(head(first + 1, last) + CONTENT[first + 1 : last + 1])


def to(place):
    return answering(length=0, status="302 Found", more=f"Location: {place}\r\n")


OTHER_BYTES = "sends other bytes than it is asked for: download it, and give the copy."
NO_PARTS = "sends no parts of a file: download it, and give the copy."
A_PAGE = "is a web page, not that file"
BREAKS_OFF = "cannot be read (it does not answer as it should, peer closed connection without sending complete message body"
STALLS = (
    "cannot be read (it does not answer as it should, less than 1 KiB came in 0.2 seconds): run the command again to resume."
)
FALSE_ANSWERS = {
    "endless": (after_the_listing(endless), OTHER_BYTES),
    "endless from the first": (endless, OTHER_BYTES),
    "shorter": (after_the_listing(shorter), OTHER_BYTES),
    "longer": (after_the_listing(longer), OTHER_BYTES),
    "another place": (after_the_listing(elsewhere), OTHER_BYTES),
    "broken off": (after_the_listing(broken_off), BREAKS_OFF),
    "a part that nobody asked for": (answering(0, 99, content=CONTENT[:100]), OTHER_BYTES),
    "no range": (after_the_listing(answering(status="200 OK", length=len(CONTENT), content=CONTENT)), NO_PARTS),
    "a page": (answering(status="200 OK", length=6, more="Content-Type: text/html\r\n", content=b"<html>"), A_PAGE),
    "a part of a page": (answering(more="Content-Type: text/html; charset=utf-8\r\n", content=b"<"), A_PAGE),
    "compressed": (answering(more="Content-Encoding: gzip\r\n", content=b"\x1f"), "compresses what it sends"),
    "silent": (silent, STALLS),
    "silent later": (after_the_listing(silent), STALLS),
    "a byte at a time": (after_the_listing(dripping), STALLS),
    "to another host": (
        to("http://localhost:1/a.jsonl?Signature=hidden"),
        "leads to http://localhost:1/a.jsonl: give that address",
    ),
    "to a file": (to("file:///etc/passwd"), "/etc/passwd: give that address, if it is the right one"),
    "to itself": (to("/a.jsonl"), "cannot be read (Exceeded maximum allowed redirects): check the address"),
}


@pytest.fixture
def server(monkeypatch):
    for name, value in {"STALL_S": 0.2, "STALL_BYTES": 1024, "TRIES": 2, "FIRST_WAIT_S": 0.0}.items():
        monkeypatch.setattr(stores, name, value)
    stores._web.cache_clear()
    with serving(Liar()) as made:
        yield made
        made.over.set()


def documents(server, tmp_path):
    return prepare([server.url], tmp_path / "out", tokenizer="bytes", workers=1, progress=False).documents


@pytest.mark.parametrize("what", FALSE_ANSWERS)
def test_a_false_answer_is_refused_in_one_sentence(server, tmp_path, what):
    server.rule, says = FALSE_ANSWERS[what]
    with pytest.raises(ConfigError) as refused:
        documents(server, tmp_path)
    assert server.url in str(refused.value)
    assert says in str(refused.value)
    assert "hidden" not in str(refused.value)
    # What is buffered on the way, of an endless answer.
    assert server.sent < 16 * 2**20
    assert not (tmp_path / "out/manifest.json").exists()


def test_a_slow_server_that_does_not_stop_is_read(server, tmp_path):
    server.rule = slow
    assert documents(server, tmp_path) == 200


def test_a_server_may_move_a_file_within_its_host_and_hold_an_empty_one(server, tmp_path):
    with serving(Liar()) as other:
        server.rule = to(other.url)
        assert documents(server, tmp_path) == 200
        other.rule = answering(length=0, status="200 OK")
        with pytest.raises(ConfigError, match="hold no text"):
            prepare([server.url], tmp_path / "none", tokenizer="bytes", workers=1, progress=False)
