"""Opens the documentation site and the HTML views of ``kvsparse_jax.plot`` in headless Chromium, as a reader would.

A page fails that says an error on the console, lacks an element or an image, or is wider than the window (on a phone,
too). The pictures are left in build/screenshots. The browser is driven over a pipe by the DevTools protocol.

    make browser                      # builds the site first
    make browser ARGS=--may-skip      # says that nothing was checked, instead of failing, where no browser can be had
"""

import argparse
import base64
import contextlib
import fcntl
import functools
import http.server
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvsparse_jax import plot

ROOT = Path(__file__).resolve().parent.parent
SITE, VIEWS, PICTURES = (ROOT / "build" / name for name in ("site", "views", "screenshots"))
SECONDS = 30.0
"""That the browser has for one answer."""

DESKTOP, PHONE = (1280, 900), (390, 844)

# What is wrong with the page that is open; its argument: selectors of what has to be visible.
FAULTS = """(selectors) => {
  const seen = e => e.checkVisibility() && e.getBoundingClientRect().width * e.getBoundingClientRect().height > 0;
  const wrong = selectors.filter(s => ![...document.querySelectorAll(s)].some(seen)).map(s => `nothing visible: ${s}`);
  for (const img of document.images)
    if (!img.complete || !img.naturalWidth) wrong.push(`image not shown: ${img.src}`);
  const role = document.body.textContent.match(/:(attr|class|data|exc|func|meth|mod):.{0,40}/);
  if (role) wrong.push(`markup is shown: ${role[0]}`);
  const width = document.documentElement.scrollWidth;
  if (width > innerWidth) wrong.push(`wider than the window: ${width} > ${innerWidth} pixels`);
  return wrong;
}"""


class Browser:
    """One page of a headless Chromium."""

    def __init__(self, path: str, profile: str) -> None:
        # Chromium reads commands from file 3 and answers on file 4; ours are above, so that no copy overwrites another.
        (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
        ends = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (theirs_in, theirs_out)]
        os.close(theirs_in)
        os.close(theirs_out)

        def connect() -> None:
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        switches = ["--headless", "--remote-debugging-pipe", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        switches += ["--disable-dev-shm-usage", "--disable-background-networking", f"--user-data-dir={profile}"]
        if os.geteuid() == 0:
            switches.append("--no-sandbox")  # Chromium refuses to run as root with it
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(
            [path, *switches], stdin=quiet, stdout=quiet, stderr=quiet, preexec_fn=connect, close_fds=False
        )
        for end in ends:
            os.close(end)
        self._in, self._out = ours_in, ours_out
        self._bytes, self._number, self._session = b"", 0, ""
        self._events: list[dict[str, Any]] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        self._call("Emulation.setFocusEmulationEnabled", enabled=True)

    def _message(self, until: float) -> dict[str, Any] | None:
        """The next one, or None if there is none until then."""
        while b"\0" not in self._bytes:
            ready, _, _ = select.select([self._in], [], [], max(until - time.monotonic(), 0.0))
            if not ready:
                return None
            more = os.read(self._in, 1 << 20)
            if not more:
                raise RuntimeError("the browser has gone away")
            self._bytes += more
        text, _, self._bytes = self._bytes.partition(b"\0")
        return json.loads(text)

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        command = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            command["sessionId"] = self._session
        data = json.dumps(command).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        until = time.monotonic() + SECONDS
        while (message := self._message(until)) is not None:
            if message.get("id") == self._number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return message["result"]
            self._events.append(message)
        raise RuntimeError(f"{method}: no answer in {SECONDS:g} s")

    def open(self, address: str, size: tuple[int, int]) -> None:
        """Opens a page in a window of so many pixels, and waits until it is loaded and quiet."""
        self._events.clear()
        width, height = size
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        failed = self._call("Page.navigate", url=address).get("errorText")
        if failed:
            raise RuntimeError(f"{address}: {failed}")
        until = time.monotonic() + SECONDS
        while not any(event.get("method") == "Page.loadEventFired" for event in self._events):
            message = self._message(until)
            if message is None:
                raise RuntimeError(f"{address}: not loaded in {SECONDS:g} s")
            self._events.append(message)
        self.wait(0.2)

    def wait(self, seconds: float) -> None:
        """Lets the page work for that time."""
        until = time.monotonic() + seconds
        while (message := self._message(until)) is not None:
            self._events.append(message)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        done = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in done:
            raise RuntimeError(done["exceptionDetails"]["exception"]["description"])
        return done["result"].get("value")

    def type(self, text: str) -> None:
        """Types into what has the focus."""
        self._call("Input.insertText", text=text)
        self._call("Input.dispatchKeyEvent", type="keyUp", key=text[-1])

    def errors(self) -> list[str]:
        """What the console has had as errors since the page was opened."""
        found = []
        for event in self._events:
            method, parameters = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                details = parameters["exceptionDetails"]
                found.append(details.get("exception", {}).get("description", details["text"]))
            elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "assert"):
                found.append(" ".join(str(x.get("value", x.get("description"))) for x in parameters["args"]))
            elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
                found.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
        return [f"console: {line}" for line in found]

    def picture(self, path: Path) -> None:
        """Writes what the window shows as PNG."""
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        """Ends the browser."""
        with contextlib.suppress(RuntimeError, OSError):
            self._call("Browser.close")
        os.close(self._in)
        os.close(self._out)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass


@contextlib.contextmanager
def serve(directory: Path) -> Iterator[str]:
    """The address of a directory, on this machine alone."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=directory)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


TEXT = (ROOT / "README.md").read_text(encoding="utf-8")[:3000] + "\n<b>é, 漢字, 🙂</b>\n" + "long" * 80


def views() -> dict[str, str]:
    """The HTML views as files, as a notebook's reader saves them."""
    pieces = [TEXT[i : i + 5] for i in range(0, len(TEXT), 5)]
    kept = json.loads((ROOT / "benchmarks" / "results" / "decode.json").read_text(encoding="utf-8"))["kept"]
    share = np.asarray(kept)[..., None]
    held = np.random.default_rng(0).random((*share.shape[:2], len(pieces))) < share
    VIEWS.mkdir(parents=True, exist_ok=True)
    pages = {"tokens": plot.tokens(pieces, held), "tokens_layer": plot.tokens(pieces, held[20], title="layer 20")}
    for name, page in pages.items():
        (VIEWS / f"{name}.html").write_text(page, encoding="utf-8")
    return {name: (VIEWS / f"{name}.html").as_uri() for name in pages}


def check(browser: Browser) -> tuple[int, list[str]]:
    """Opens everything; how many pages, and what was wrong."""
    wrong: list[str] = []
    count = 0

    def see(name: str, address: str, size: tuple[int, int], *selectors: str) -> None:
        nonlocal count
        browser.open(address, size)
        faults = browser.run(f"({FAULTS})({json.dumps(selectors)})")
        browser.picture(PICTURES / f"{name}{'' if size == DESKTOP else '_phone'}.png")
        wrong.extend(f"{name} at {size[0]} pixels: {fault}" for fault in [*faults, *browser.errors()])
        count += 1

    for name, address in views().items():
        see(name, address, DESKTOP, ".kvs-tokens h4", "details[open] .held", "details[open] .gone")
        shown = browser.run("document.querySelector('.kvs-tokens p').textContent")
        if not shown.endswith(TEXT):
            wrong.append(f"{name}: the text is not shown as it is")
        if browser.run("document.querySelectorAll('summary').length > 1"):
            browser.run("document.querySelectorAll('summary')[1].click()")
            if not browser.run("document.querySelectorAll('details')[1].querySelector('p').checkVisibility()"):
                wrong.append(f"{name}: the second layer does not open")

    with serve(SITE) as address:
        for path in sorted(SITE.glob("**/index.html")):
            where = path.parent.relative_to(SITE).as_posix()
            name = "home" if where == "." else where.replace("/", "_")
            url = f"{address}/" if where == "." else f"{address}/{where}/"
            see(name, url, PHONE, ".md-header", "article h1")
            see(name, url, DESKTOP, ".md-header", "article h1", ".md-nav--primary", ".md-search__input")
        browser.open(f"{address}/", DESKTOP)
        browser.run("document.querySelector('.md-search__input').focus()")
        browser.type("delayed eviction")
        until = time.monotonic() + 10
        while not browser.run("document.querySelectorAll('.md-search-result__item').length"):
            if time.monotonic() > until:
                wrong.append("search: nothing found for 'delayed eviction'")
                break
            browser.wait(0.1)
        browser.picture(PICTURES / "search.png")
        wrong.extend(f"search: {line}" for line in browser.errors())
    return count, wrong


def main() -> int:
    """The command; 0 if all is right."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--may-skip", action="store_true", help="exit with 0 where no browser can be had")
    args = parser.parse_args()
    if not (SITE / "index.html").is_file():
        print(f"error: no site in {SITE}: make docs", file=sys.stderr)
        return 1
    found = subprocess.run([ROOT / "scripts" / "browser.sh"], stdout=subprocess.PIPE, text=True, check=False)
    if found.returncode:
        print("NOT CHECKED: no page was opened, for there is no browser", file=sys.stderr)
        return 0 if args.may_skip else 1
    PICTURES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(found.stdout.strip(), profile)
        try:
            count, wrong = check(browser)
        finally:
            browser.close()
    print("\n".join([*wrong, f"{count} pages opened, {len(wrong)} faults; pictures: {PICTURES.relative_to(ROOT)}"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
