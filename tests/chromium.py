"""A headless Chromium driven by DevTools messages over a pipe: real keys and clicks, no extra packages."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed")

_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-default-apps", "--disable-dev-shm-usage",
    "--remote-debugging-pipe", "--force-prefers-reduced-motion",
)  # fmt: skip
# Chromium reads from descriptor 3 and writes to 4; whichever numbers the ends of the pipes have, they move there.
_LAUNCH = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for wanted, end in zip((3, 4), ends):
    os.dup2(end, wanted)
os.execv(sys.argv[3], sys.argv[3:])
"""
_PATIENCE_S = 60  # on a machine that does much else
# Key: code for `keydown`, character that it types.
_KEYS = {
    "Enter": (13, "\r"), "Tab": (9, ""), "ArrowRight": (39, ""), "ArrowLeft": (37, ""), "ArrowDown": (40, ""),
    "ArrowUp": (38, ""), "Home": (36, ""), "End": (35, ""), " ": (32, " "), "Backspace": (8, ""),
}  # fmt: skip


class Page:
    """One tab. `problems`: console errors, exceptions and warnings of the log; `requests`: every URL asked for."""

    def __init__(self, reader: int, writer: int) -> None:
        self._reader, self._writer, self._rest, self._last = reader, writer, b"", 0
        self.problems: list[str] = []
        self.requests: list[str] = []
        target = self._send("Target.createTarget", {"url": "about:blank"}, session=None)["targetId"]
        attached = self._send("Target.attachToTarget", {"targetId": target, "flatten": True}, session=None)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "DOM", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A DevTools command for this tab; its result."""
        return self._send(method, parameters, session=self._session)

    def open(self, file: Path) -> None:
        """Opens the file by its file:// address and waits until it is loaded."""
        self.problems.clear()
        self.requests.clear()
        self.call("Page.navigate", url=file.resolve().as_uri())
        self.wait(f"document.readyState === 'complete' && location.href === {json.dumps(file.resolve().as_uri())}")

    def look(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until the JavaScript condition holds."""
        until = time.monotonic() + _PATIENCE_S
        while not self.look(condition):
            assert time.monotonic() < until, f"never: {condition}"
            time.sleep(0.02)

    def press(self, *keys: str) -> None:
        """Presses keys: those of `_KEYS`, or characters to type."""
        for key in keys:
            code, text = _KEYS.get(key) or (ord(key.upper()) if key.isalnum() else 0, key)
            about = {"key": key, "windowsVirtualKeyCode": code}
            kind = {"type": "keyDown", "text": text} if text else {"type": "rawKeyDown"}
            self.call("Input.dispatchKeyEvent", **kind, **about)
            self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def click(self, selector: str) -> None:
        """Scrolls to the middle of what matches and clicks there with the mouse."""
        x, y = self.look(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center'});"
            "const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def media(self, **features: str) -> None:
        """Emulates media features; underscores stand for hyphens."""
        pairs = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=pairs)

    def size(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def screenshot(self, *, whole: bool = True) -> bytes:
        """A PNG of the page, or of what is visible of it."""
        return base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"])

    def _send(self, method: str, parameters: dict[str, Any], *, session: str | None) -> dict[str, Any]:
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._writer, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._reader], [], [], _PATIENCE_S)
            received = os.read(self._reader, 1 << 20) if ready else b""
            assert received, "Chromium does not answer"
            self._rest += received
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        about = event.get("params", {})
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(about["request"]["url"])
            case "Runtime.exceptionThrown":
                self.problems.append(str(about["exceptionDetails"]))
            case "Log.entryAdded":
                self.problems.append(str(about["entry"]))
            case "Runtime.consoleAPICalled":
                self.problems.append(str(about["args"]))


@contextlib.contextmanager
def chromium(folder: Path) -> Iterator[Page]:
    """A new browser with its profile in `folder`, and a tab in it. Its process is gone afterwards."""
    to_browser, from_browser = os.pipe(), os.pipe()
    ends = (to_browser[0], from_browser[1])
    launch = [sys.executable, "-I", "-S", "-c", _LAUNCH, *map(str, ends), PROGRAM]
    process = subprocess.Popen(
        [*launch, *_OPTIONS, f"--user-data-dir={folder}", "about:blank"],
        pass_fds=ends, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    os.close(to_browser[0])
    os.close(from_browser[1])
    try:
        yield Page(from_browser[0], to_browser[1])
    finally:
        os.close(to_browser[1])
        os.close(from_browser[0])
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
