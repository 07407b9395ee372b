"""What a run shows while it goes on: its rows and events in wandb, what the machine does, what all that has cost.

python watch.py mirror WORDS    # started by rank 0 of a run with wandb_log=True, and of no use by hand

The files of a run come first and wandb gets a copy: a child process reads what is appended to metrics.jsonl and
events.jsonl and hands it over. Training neither imports wandb nor waits for it but at its end, within seconds, so
nothing that a network, a key, a package or wandb's own processes may do can stop a run, slow it or let it hang. What a
child could not deliver, the next session's does: each row in wandb says which line of which file it is.

A thread on one rank of each host writes machine.jsonl: GPUs by NVML, the rest by psutil; both packages are optional.
"""
import contextlib
import ctypes
import glob
import json
import netrc
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.parse
from pathlib import Path

import hub

LIMITS = {"init_s": 15.0, "finish_s": 60.0, "poll_s": 1.0}  # for wandb: to begin; to end as planned; between two looks
AFTER_SIGNAL_S = 3.0  # to end after a signal or an error
TEXT = 2000  # most characters of an event's fields
EVERY_S, GAP_S = 10.0, 60.0  # between samples of the machine; further apart they tell nothing of the time between
TAIL = 1 << 16  # bytes from the end of machine.jsonl in which its last line is looked for
THROTTLE = ("idle", "clock setting", "power cap", "hardware slowdown", "sync boost", "thermal", "hardware thermal",
            "power brake", "display")  # by bit. Source: nvml.h, nvmlClocksEventReason*
GPU = {  # field of a GPU in machine.jsonl: how NVML is asked for it
    "busy_ratio": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
    "memory_gb": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used / 1e9,
    "memory_total_gb": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total / 1e9,
    "power_w": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
    "power_limit_w": lambda nvml, gpu: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000,
    "temperature_c": lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, 0),
    "clock_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, 1),  # of the SMs
    "memory_clock_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, 2),
    "throttle": lambda nvml, gpu: throttled_by(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)),
}
HOST = {  # field of a host: how psutil is asked for it
    "cpu_ratio": lambda psutil: psutil.cpu_percent() / 100,
    "ram_gb": lambda psutil: psutil.virtual_memory().used / 1e9,
    "ram_total_gb": lambda psutil: psutil.virtual_memory().total / 1e9,
}
COUNTERS = {  # bytes that only rise; machine.jsonl has their rates
    "disk_read": lambda psutil: psutil.disk_io_counters().read_bytes,
    "disk_written": lambda psutil: psutil.disk_io_counters().write_bytes,
    "net_in": lambda psutil: on_wires(psutil, "bytes_recv"),
    "net_out": lambda psutil: on_wires(psutil, "bytes_sent"),
}


def on_wires(psutil, field):
    """What the network cards have counted, without what goes from this host to itself."""
    return sum(getattr(card, field) for name, card in psutil.net_io_counters(pernic=True).items() if name != "lo")


# -- in the child: a copy in wandb

class Tail:
    """The whole lines of a jsonl file that grows: each look reads what is new."""

    def __init__(self, path):
        self.path, self.offset, self.lines = path, 0, 0

    def read(self):
        """[(number of the line, row), ...]; what is no row is counted and passed over."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                new = file.read(1 << 22)
        except FileNotFoundError:
            return []
        found, whole = [], new[:new.rfind(b"\n") + 1]
        self.offset += len(whole)
        for line in whole.splitlines():
            self.lines += 1
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict) and {"session", "step", "time"} <= row.keys():
                    found.append((self.lines, row))
        return found


def new_lines(tails):
    """(name of the file, number of the line, row) of all that is new, without holding all of it at once."""
    for name, tail in tails.items():
        while lines := tail.read():
            yield from ((name, *line) for line in lines)


def records(path):
    """The records in a .wandb file, as bytes, as far as they are whole: a kill tears the end.

    Source: the log format of LevelDB: blocks of 32,768 bytes with pieces of records, each after its checksum, length
    and kind (1 whole, 2 first, 3 middle, 4 last); here after a header of 7 bytes."""
    content, at, parts = Path(path).read_bytes(), 7, []
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        piece = content[at + 7:at + 7 + length]
        if kind not in (1, 2, 3, 4) or len(piece) < length:
            return
        parts = [*(parts if kind > 2 else ()), piece]
        at += 7 + length
        if kind in (1, 4):
            yield b"".join(parts)


def kept_back(folder, run):
    """{(file, session, line, time)}: the lines that earlier sessions without a network have left in a run folder. What
    lies in a folder of a session with one may not have been sent, and `wandb sync` of the others would not send it."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = set()
    for path in glob.glob(f"{glob.escape(folder)}/wandb/offline-run-*-{run}/*.wandb"):
        for content in records(path):
            items = Record.FromString(content).history.item if b"mirror/" in content else ()
            for item in items:
                key = item.key or "/".join(item.nested_key)
                if key.startswith("mirror/"):
                    found.add((key, *json.loads(item.value_json)))
    return found


def is_there(place, own_session, kept, summary):
    """Whether wandb has a line already. place: (key, session, line, time). kept: as `kept_back` gives, None for a run
    on a server, of which the summary knows the last line of each file; a session that went on from an earlier
    checkpoint elsewhere may have had the same number, but not the same time."""
    if place[1] == own_session:
        return False
    if kept is not None:
        return place in kept
    last = summary.get(place[0])
    return bool(last) and [*place[1:3]] <= [*last[:2]] and place[3] <= last[2]


def of_event(row, folder, table):
    """What wandb gets of an event: a mark at its step with its fields as text; evaluations and probes as numbers, a
    sample as a table, which table(columns, rows) makes."""
    name, own = row["event"], {key: value for key, value in row.items()
                               if key not in ("time", "session", "step", "event", "settings")}
    found = {"step": row["step"], "session": row["session"], "event": name, f"event/{name}": 1,
             "event/text": hub.masked(json.dumps(own))[:TEXT]}
    if name == "eval" and row.get("complete"):
        found |= {key: row.get(key) for key in ("val_loss", "bits_per_byte", "perplexity")}
    if name == "probe":
        found["probe/mean"] = row.get("mean")
        found |= {f"probe/{label}": value for label, value in probes_of(row).items()}
    if name == "sample":
        with contextlib.suppress(OSError):
            text = Path(folder, "samples", f"step_{row['step']:08d}.md").read_text("utf-8", "replace")
            found["samples"] = table(["step", "text"], [[row["step"], text]])
    return found


def probes_of(row):
    """{number and prompt of each probe: its value} of a probe event."""
    return {f"{number} {item.get('prompt', '')}"[:60].replace(".", " "): item.get("value")
            for number, item in enumerate(row.get("probes", ()), start=1)}


def probe_chart(seen, line_series):
    """One chart of all probes over the steps, by line_series of wandb.plot; seen: the probe events up to now."""
    curves = {}
    for row in seen:
        for label, value in probes_of(row).items():
            curves.setdefault(label, []).append((row["step"], value))
    return line_series(xs=[[step for step, _ in points] for points in curves.values()],
                       ys=[[value for _, value in points] for points in curves.values()], keys=list(curves),
                       title="P(right) / (P(right) + P(wrong))", xname="step")


def best_of(run):
    """A function that takes each event and keeps the best and the last validation loss in the run's summary; an
    evaluation after the step that a later session began from does not count any more."""
    found = []

    def take(row):
        if row["event"] in ("resume", "rollback"):
            found[:] = [(step, loss) for step, loss in found if step <= row["step"]]
        if row["event"] == "eval" and row.get("complete") and row.get("val_loss") is not None:
            found.append((row["step"], row["val_loss"]))
            run.summary.update({"best_val_loss": min(loss for _, loss in found), "last_val_loss": found[-1][1]})
    return take


def has_key():
    """Whether wandb would find a key without asking a person for one."""
    if os.environ.get("WANDB_API_KEY", "").strip():
        return True
    host = urllib.parse.urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai")
    path = os.environ.get("NETRC") or next((path for name in (".netrc", "_netrc")
                                            if (path := Path.home() / name).exists()), "")
    try:
        known = path and netrc.netrc(path)
        return bool(known and any(map(known.authenticators, (host.netloc, host.hostname))))  # wandb writes the port too
    except (OSError, netrc.NetrcParseError):
        return False


def open_run(wandb, job, tell):
    """The wandb run, and whether it is kept on this disk alone. Raises: whatever wandb does where even that fails."""
    settings = wandb.Settings(init_timeout=job["init_s"], finish_timeout=job["finish_s"], console="off")
    begin = lambda mode: wandb.init(
        project=job["project"], name=job["name"], id=job["run"], resume="allow", dir=job["folder"], mode=mode,
        config=json.loads(Path(job["folder"], "config.json").read_text()), settings=settings)
    mode = os.environ.get("WANDB_MODE") or (None if has_key() else "offline")  # None: as `wandb offline` has left it
    if mode != os.environ.get("WANDB_MODE") and mode == "offline":
        tell(say="wandb  no key (WANDB_API_KEY, or `wandb login`) was found; rows are kept on this disk")
    try:
        run = begin(mode)
    except Exception as error:  # closed networks, servers and keys each have their own
        if mode == "offline":
            raise
        tell(error=f"rows are kept on this disk: {text_of(error)}")
        wandb.teardown(1)
        run, mode = begin("offline"), "offline"
    offline = mode in ("offline", "dryrun") or run.offline
    tell(say=f"wandb  run {job['run']} of {job['project']}: " + (
        f"offline; the next session with a network sends it, or, where there will be none: wandb sync "
        f"{job['folder']}/wandb/offline-run-*" if offline else str(run.url or mode)))
    return run, offline


def text_of(error):
    """What an exception says, on one line and without secrets."""
    return hub.masked(f"{type(error).__name__}: {' '.join(str(error).split())[:600]}")


def mirror(job, tell):
    """Hand every line over, those of earlier sessions that are not there yet first, until the parent closes stdin."""
    import wandb

    run, offline = open_run(wandb, job, tell)
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    kept = kept_back(job["folder"], job["run"]) if offline else None
    summary = {} if offline else {f"mirror/{name}": run.summary.get(f"mirror/{name}") for name in ("metrics", "events")}
    tails = {name: Tail(Path(job["folder"], f"{name}.jsonl")) for name in ("metrics", "events")}
    over, take, probed = False, best_of(run), []
    # two machines that go on from one checkpoint give their sessions one number
    nonces = {row["session"]: {"nonce": row["nonce"]} for _, _, row in new_lines({"": Tail(tails["events"].path)})
              if row.get("event") == "start" and "nonce" in row}

    def hand_over(name, number, row):
        place = f"mirror/{name}", row["session"], number, row["time"]
        if not is_there(place, job["session"], kept, summary):
            record = row if name == "metrics" else of_event(row, job["folder"], wandb.Table)
            chart = {"probes": probe_chart([*probed, row], wandb.plot.line_series)} if row.get("probes") else {}
            run.log(record | chart | {place[0]: [*place[1:]]} | nonces.get(row["session"], {}))
        if row.get("probes"):
            probed.append(row)
        if name == "events":
            take(row)
    while True:
        for found in new_lines(tails):
            hand_over(*found)
        if over:
            break
        over = bool(select.select([0], [], [], job["poll_s"])[0])  # then all lines are written: one look more
    run.finish()


def serve(words):
    """The life of a child."""
    job, out = json.loads(words), os.dup(1)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with its parent
    if os.getppid() != job["parent"]:
        return
    os.nice(19)
    os.dup2(2, 1)  # what wandb prints goes nowhere
    tell = lambda **said: os.write(out, json.dumps(said).encode() + b"\n")
    try:
        mirror(job, tell)
        tell(done=True)
    except Exception as error:  # each failure reaches the parent as one line
        tell(error=text_of(error))
    os._exit(0)  # wandb's own end may wait for a server that does not answer


# -- in the trainer

class Mirror:
    """The child that copies a run's files into wandb. Whatever becomes of it is one wandb_error event."""

    def __init__(self, journal, project, name, say):
        self.report, self.say, self.failed, self.done = journal.report, say, False, False
        words = json.dumps(LIMITS | {
            "folder": str(journal.out_dir), "run": journal.run.run, "session": journal.run.session, "project": project,
            "name": name or Path(journal.out_dir).resolve().name, "parent": os.getpid()})
        self.child = subprocess.Popen(
            [sys.executable, __file__, "mirror", words], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, process_group=0, env=os.environ | {"CUDA_VISIBLE_DEVICES": "",
                                                                          "WANDB_SILENT": "true"})
        self.thread = threading.Thread(target=self._listen, name="wandb", daemon=True)
        self.thread.start()

    def _listen(self):
        for line in self.child.stdout:
            said = json.loads(line) if line.startswith(b"{") and line.endswith(b"}\n") else {}  # a kill tears
            self.done = self.done or "done" in said
            if "say" in said:
                self.say(said["say"])
            if "error" in said:
                self._failed(said["error"])
        if not self.done:
            self._failed(f"its process ended by {self.child.wait()}")

    def _failed(self, cause):
        if not self.failed:
            self.failed = True
            self.report("wandb_error", cause=cause)
            self.say(f"wandb  {cause}; training goes on, and every row is in the run's files")

    def close(self, seconds_left):
        """Let it deliver what is there and end it; seconds_left() says for how long that may still go on."""
        with contextlib.suppress(OSError):
            self.child.stdin.close()
        while self.thread.is_alive() and (left := seconds_left()) > 0:
            self.thread.join(min(0.1, left))
        if self.thread.is_alive():
            self._failed("the time for its end was over; what it could not send, the next launch does")
        self.child.kill()
        self.thread.join(5)
        self.child.wait()
        self.child.stdout.close()


# -- the machine

def throttled_by(bits):
    """The names of what holds a GPU's clocks down."""
    return [name for bit, name in enumerate(THROTTLE) if bits >> bit & 1]


def open_gpus(count):
    """(NVML, its handles of the devices that the ranks of this host compute on). Raises: whatever it lacks."""
    import pynvml
    from torch import cuda

    pynvml.nvmlInit()
    names = [f"GPU-{cuda.get_device_properties(number).uuid}" for number in range(count)]
    return pynvml, [pynvml.nvmlDeviceGetHandleByUUID(name) for name in names]


def answers(questions, *asked):
    """{name: ask(*asked)}; a question that is not answered, for want of a driver, sensor or right, costs that field."""
    found = {}
    for name, ask in questions.items():
        with contextlib.suppress(Exception):
            value = ask(*asked)
            found[name] = round(value, 3) if isinstance(value, float) else value
    return found


def last_energy(path):
    """The energy in kWh that the last line of a machine.jsonl has counted up to, 0 where there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            lines = file.read().splitlines()
    except OSError:
        return 0.0
    for line in reversed(lines):  # some are torn, or of a session that knew no power
        with contextlib.suppress(ValueError, TypeError, KeyError):
            return float(json.loads(line)["energy_kwh"])
    return 0.0


class Machine:
    """The thread that samples this host into machine.jsonl. energy_kwh: of the run's GPUs on this host, over all
    sessions that this disk knows of; None where no power is known."""

    def __init__(self, out_dir, gpus, say):
        self.path, self.gpus, self.say = Path(out_dir, "machine.jsonl"), gpus, say
        self.energy_kwh, self.before, self.counters = None, None, {}
        self.over, self.host = threading.Event(), socket.gethostname()
        self.nvml, self.handles, self.psutil = None, [], None
        self.thread = threading.Thread(target=self._work, name="machine", daemon=True)
        self.thread.start()

    def _open(self):
        lacking = []
        try:
            import psutil
            self.psutil = psutil
        except ImportError:
            lacking.append("psutil")
        if self.gpus:
            try:
                self.nvml, self.handles = open_gpus(self.gpus)
            except Exception as error:  # no package, no driver, a device that NVML does not know
                lacking.append(f"nvidia-ml-py ({text_of(error)[:200]})")
        if lacking:
            self.say(f"note   machine.jsonl lacks what it takes {' and '.join(lacking)} to know")

    def _work(self):
        with contextlib.suppress(Exception):  # whatever it meets, training goes on without its lines
            self._open()
            self.sample()
            while not self.over.wait(EVERY_S):
                self.write(self.sample())
            if self.before and time.monotonic() - self.before > EVERY_S / 10:
                self.write(self.sample())

    def sample(self):
        """A row of machine.jsonl; rates and energy are those since the sample before."""
        now = time.monotonic()
        took_s, self.before = now - (self.before or now), now
        load = {"load": round(os.getloadavg()[0], 2)}
        numbers, counters = load | answers(HOST, self.psutil), answers(COUNTERS, self.psutil)
        rates = {f"{name}_mb_s": round((value - self.counters[name]) / took_s / 1e6, 3)
                 for name, value in counters.items() if took_s and name in self.counters}
        self.counters, gpus = counters, [answers(GPU, self.nvml, gpu) for gpu in self.handles]
        power = [gpu["power_w"] for gpu in gpus if "power_w" in gpu]
        if power:
            known = last_energy(self.path) if self.energy_kwh is None else self.energy_kwh
            self.energy_kwh = known + sum(power) * (took_s if took_s <= GAP_S else 0) / 3.6e6
        row = {"time": round(time.time(), 3), "host": self.host, **numbers, **rates}
        return row | ({"gpus": gpus} if gpus else {}) | ({"energy_kwh": round(self.energy_kwh, 6)} if power else {})

    def write(self, row):
        """Append a row; on a full disk it is lost."""
        from checkpoint import append_line

        with contextlib.suppress(OSError, ValueError):
            append_line(self.path, row)

    def close(self):
        self.over.set()
        self.thread.join(2)


# -- both, and what it costs

def seconds_of(rows):
    """The seconds between the first and the last row of each session, added up: what machines were paid for."""
    seen = {}
    for row in rows:
        first, last = seen.get(row["session"], (row["time"], row["time"]))
        seen[row["session"]] = min(first, row["time"]), max(last, row["time"])
    return sum(last - first for first, last in seen.values())


def costs_text(seconds, energy_kwh, price_per_hour, price_per_kwh):
    """'0.720 kWh, 2.38 spent', where a price is set; energy where it is known (not None)."""
    if not (price_per_hour or price_per_kwh and energy_kwh is not None):
        return ""
    spent = price_per_hour * seconds / 3600 + price_per_kwh * (energy_kwh or 0)
    return (f"{energy_kwh:.3f} kWh, " if energy_kwh is not None else "") + f"{spent:,.2f} spent"


def send_rest(journal, project, name, say):
    """Hand over what a finished run has not sent yet. Never raises."""
    began = time.monotonic()
    with contextlib.suppress(OSError):
        Mirror(journal, project, name, say).close(lambda: began + LIMITS["init_s"] + AFTER_SIGNAL_S - time.monotonic())


class Watcher:
    """What runs beside a session: on one rank of each host the Machine, on rank 0 the Mirror where it is wanted."""

    def __init__(self, journal, kind, prices, say, interrupt, session_ends):
        number = lambda name, default: int(os.environ.get(name) or default)
        self.journal, self.prices, self.say, self.interrupt, self.ends = journal, prices, say, interrupt, session_ends
        self.began, self.mirror = time.time(), None
        self.earlier_s = seconds_of(journal._events()) if journal.writes and any(prices) else 0.0
        self.machine = None if number("LOCAL_RANK", 0) else Machine(
            journal.out_dir, number("LOCAL_WORLD_SIZE", 1) if kind == "cuda" else 0, say)

    def start_mirror(self, project, name):
        """Begin to copy the run's files into wandb. Never raises."""
        try:
            self.mirror = Mirror(self.journal, project, name, self.say)
        except OSError as error:  # no memory or no process left for it
            self.journal.report("wandb_error", cause=str(error))

    def costs(self):
        """Energy and money of all sessions up to now, '' without prices."""
        energy = self.machine.energy_kwh if self.machine else None
        return costs_text(self.earlier_s + time.time() - self.began, energy, *self.prices)

    def close(self, kind=None, *_):
        """End both. wandb has time where the session ended as planned, and seconds after a signal or an error."""
        began, session_ends = time.monotonic(), max(self.ends, time.monotonic() + AFTER_SIGNAL_S)

        def seconds_left():
            planned = began + LIMITS["finish_s"]
            hurried = (began if kind else max(began, min(self.interrupt.at, planned))) + AFTER_SIGNAL_S
            return min(hurried if kind or self.interrupt.name else planned, session_ends) - time.monotonic()
        if self.machine:
            self.machine.close()
        if self.mirror:
            self.mirror.close(seconds_left)


if __name__ == "__main__":
    serve(sys.argv[2])
