"""A folder served to a headless Chromium that reaches nothing else; it is driven by DevTools messages over two pipes."""

import fcntl
import functools
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = (
    *("--headless=new", "--remote-debugging-pipe", "--no-first-run", "--no-sandbox", "--disable-gpu", "--disable-sync"),
    *("--disable-dev-shm-usage", "--disable-extensions", "--disable-background-networking", "--disable-component-update"),
    *(
        "--disable-default-apps",
        "--disable-features=OptimizationHints,MediaRouter,AutofillServerCommunication,NetworkTimeServiceQuerying",
        "--metrics-recording-only",
    ),
)


def program() -> str | None:
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


class _Handler(SimpleHTTPRequestHandler):
    """Serves a folder. It is the browser's proxy too: what is asked of another host is noted and refused."""

    def do_GET(self):
        if self.path.startswith("/"):
            self.server.served.append(self.path)
            super().do_GET()
        else:
            self.do_CONNECT()

    def do_CONNECT(self):
        self.server.refused.append(self.path)
        self.send_error(403)

    def log_message(self, *_):
        pass


class Page:
    """One tab."""

    def __init__(self, inlet, outlet, server):
        self.inlet, self.outlet, self.server = inlet, outlet, server
        self.address = f"http://127.0.0.1:{server.server_port}/"
        self.numbers, self.session, self.said = itertools.count(1), None, []
        self.unread = [b""]
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        """The result of a DevTools command."""
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": params} | ({"sessionId": self.session} if self.session else {})
        self.inlet.write(json.dumps(message).encode() + b"\0")
        self.inlet.flush()
        while True:
            answer = json.loads(self._next())
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            if answer.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown"):
                self.said.append(answer["params"])

    def _next(self):
        while b"\0" not in self.unread[-1]:
            self.unread.append(os.read(self.outlet.fileno(), 2**20))
            assert self.unread[-1], "the browser has ended"
        end, _, rest = self.unread[-1].partition(b"\0")
        message = b"".join((*self.unread[:-1], end))
        self.unread = [rest]
        return message

    def open(self, link=""):
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=self.address + link)

    def value(self, expression):
        """The value of a JavaScript expression, or of the promise that it gives."""
        options = {"returnByValue": True, "awaitPromise": True}
        result = self.call("Runtime.evaluate", expression=expression, **options)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, expression, limit_s=120.0):
        """The expression's value once it is true."""
        end = time.monotonic() + limit_s
        while not (value := self.value(expression)):
            assert time.monotonic() < end, f"never true: {expression}; {self.said}"
            time.sleep(0.05)
        return value


@contextmanager
def page(folder) -> Iterator[Page]:
    """A tab of a new browser."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Handler, directory=str(folder)))
    server.served, server.refused, server.daemon_threads = [], [], True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (read, ours), (own, write) = os.pipe(), os.pipe()
    # Above the two that they become in the browser.
    given = [fcntl.fcntl(one, fcntl.F_DUPFD, 10) for one in (read, write)]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = [*OPTIONS, f"--user-data-dir={profile}", f"--proxy-server=127.0.0.1:{server.server_port}", "about:blank"]
        start = ["bash", "-c", f'exec "$@" 3<&{given[0]} 4>&{given[1]}', "bash", program(), *options]
        null = subprocess.DEVNULL
        browser = subprocess.Popen(start, pass_fds=given, stdin=null, stdout=null, stderr=null, start_new_session=True)
        for one in (read, write, *given):
            os.close(one)
        with os.fdopen(ours, "wb") as inlet, os.fdopen(own, "rb", buffering=0) as outlet:
            try:
                tab = Page(inlet, outlet, server)
                yield tab
                tab.session = None
                tab.call("Browser.close")
            finally:
                try:
                    browser.wait(10)
                except subprocess.TimeoutExpired:
                    browser.kill()
                    browser.wait()
                server.shutdown()
                server.server_close()
