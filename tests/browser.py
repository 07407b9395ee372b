"""A headless Chromium for tests, spoken to over a pipe in its own protocol: no driver and no port is needed."""

import json
import os
import select
import shutil
import subprocess
import time

import driver

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), "")
LIMIT_S = 60
FLAGS = ("--headless=new", "--remote-debugging-pipe", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
         "--no-sandbox",  # as root there is none, and the only page is ours
         "--window-size=1280,1000", "--disable-background-networking")


class Page:
    """One page: `ask` for values in it, and all that it has complained about or loaded."""

    def __init__(self, profile):
        commands, self.to = os.pipe()
        self.answers, said = os.pipe()
        # the protocol wants descriptors 3 and 4, which may be taken in this process
        line = f'exec "$0" "$@" 3<&{commands} 4>&{said}'
        self.process = subprocess.Popen(["bash", "-c", line, CHROMIUM, *FLAGS, f"--user-data-dir={profile}"],
                                        pass_fds=(commands, said), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        driver.processes.append(self.process)  # ended after the test, whatever becomes of it
        os.close(commands), os.close(said)
        self.number, self.session, self.rest, self.complaints, self.loaded = 0, {}, b"", [], []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **arguments):
        """What the browser answers to a command."""
        self.number += 1
        command = {"id": self.number, "method": method, "params": arguments, **self.session}
        os.write(self.to, json.dumps(command).encode() + b"\0")
        deadline = time.monotonic() + LIMIT_S
        while (message := self._next(deadline)).get("id") != self.number:
            self._note(message)
        assert "error" not in message, (method, message)
        return message["result"]

    def _next(self, deadline):
        while b"\0" not in self.rest:
            left_s = max(0, deadline - time.monotonic())
            assert select.select([self.answers], [], [], left_s)[0], "the browser is silent"
            new = os.read(self.answers, 1 << 20)
            assert new, "the browser has ended"
            self.rest += new
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def _note(self, message):
        method, found = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.loaded.append(found["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(found["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and found["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(found["args"]))
        elif method == "Log.entryAdded" and found["entry"]["level"] in ("error", "warning"):
            self.complaints.append(str(found["entry"]))

    def open(self, path, until):
        """Opens a file, and waits until an expression holds in it."""
        self.call("Page.navigate", url=path.resolve().as_uri())
        driver.wait_for(lambda: self.ask(until))

    def ask(self, expression):
        """The value of a JavaScript expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, (expression, found["exceptionDetails"])
        return found["result"].get("value")

    def press(self, key, code):
        """A key of the keyboard."""
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def click(self, selector):
        """A click of the mouse in the middle of an element."""
        x, y = self.ask(f"(() => {{ const node = document.querySelector({json.dumps(selector)});"
                        "node.scrollIntoView({block: 'center'}); const box = node.getBoundingClientRect();"
                        "return [box.x + box.width / 2, box.y + box.height / 2] })()")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def close(self):
        self.call("Browser.close")
        os.close(self.to), os.close(self.answers)
