"""The picture in the README: the quickstart, killed (-9) on its way and started again each time, and its page.

    python bench/picture.py --out_dir out/picture --png docs/report.png
    python bench/picture.py --out_dir out/picture --png docs/report.png --only-photograph     of a run that is there

Needs chromium. Prints a row a session, then one JSON line. Words after -- go to train.py. It is about what the page
shows: its speeds are those of a machine that may have had other work.
"""
import argparse
import base64
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SESSION_S = 3600  # no session of the quickstart lasts so long


def reached(out_dir):
    """The last step on record, as far as it can be read while it is written."""
    try:
        lines = Path(out_dir, "metrics.jsonl").read_text().splitlines(True)
    except FileNotFoundError:
        return 0
    return max((json.loads(line)["step"] for line in lines if line.endswith("\n")), default=0)


def one_session(out_dir, kill_at, words):
    """Starts the quickstart and kills it once it has got to step `kill_at` (0: never); its row."""
    line = [sys.executable, "train.py", "config/quickstart.py", f"--out_dir={out_dir}", *words]
    deadline = time.monotonic() + SESSION_S
    process = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.DEVNULL)
    while process.poll() is None and not 0 < kill_at <= reached(out_dir) and time.monotonic() < deadline:
        time.sleep(0.2)
    alive = process.poll() is None
    if alive:
        process.send_signal(signal.SIGKILL)
    code = process.wait()
    if alive != (kill_at > 0) or not alive and code:
        raise SystemExit(f"a session that was to be killed at step {kill_at} (0: never) ended with {code}")
    return {"last_step": reached(out_dir), "killed": alive}


def photograph(out_dir, png, height):
    """The page of a run, light, 1,200 px wide, as a headless Chromium shows it."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import browser
    import driver

    subprocess.run([sys.executable, "report.py", out_dir], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    with tempfile.TemporaryDirectory() as profile:
        page = browser.Page(profile)
        try:
            size = {"width": 1200, "height": height, "deviceScaleFactor": 1, "mobile": False}
            page.call("Emulation.setDeviceMetricsOverride", **size)
            page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
            page.call("Emulation.setScrollbarsHidden", hidden=True)
            page.open(Path(out_dir, "report.html"), "document.body && document.body.dataset.drawn > 0")
            page.ask("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
            data = base64.b64decode(page.call("Page.captureScreenshot", format="png")["data"])
            assert not page.complaints, page.complaints
            page.close()
        finally:
            driver.end_all()
    png.parent.mkdir(parents=True, exist_ok=True)
    png.write_bytes(data)
    return len(data)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out_dir", default="out/picture")
    parser.add_argument("--png", type=Path, default=ROOT / "docs" / "report.png")
    parser.add_argument("--kills", type=int, nargs="*", default=[220, 480, 700], help="steps at which to kill it")
    parser.add_argument("--height", type=int, default=2010, help="pixels of the page that are shown")
    parser.add_argument("--only-photograph", action="store_true")
    parser.add_argument("words", nargs="*")
    asked, sessions = parser.parse_args(), []
    out_dir = os.path.abspath(asked.out_dir)
    print("session  last step on record  killed")
    for kill_at in [] if asked.only_photograph else [*asked.kills, 0]:
        sessions.append(one_session(out_dir, kill_at, asked.words))
        print("{number:7}  {last_step:19,}  {killed}".format(number=len(sessions), **sessions[-1]), flush=True)
    size = photograph(out_dir, asked.png, asked.height)
    print(json.dumps({"bench": "picture", "sessions": sessions, "png_bytes": size}))


if __name__ == "__main__":
    main()
