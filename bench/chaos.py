"""Kills, damages and starves small runs again and again, and proves that each ends as the run that nothing disturbed.

    python bench/chaos.py --minutes 3 --seed 7     # a sample; exit 0 only where all was noticed and all is equal
    python bench/chaos.py --minutes 40 --seed 1    # the committed result

A chain is one run under torchrun, killed (-9) session after session at planned instants, most of them inside saves,
then run to its end. What counts is the phase that lies on disk, not the one that was aimed at: what a killed rank 0
has left; for others, what was there at the instant. Between sessions files are damaged, in sessions the disk is full.
A reference is the same run undisturbed: tensors, counters, every row of metrics.jsonl and every window of every step
must be equal to the bit. Each detector has a control: the same fault with its check switched off must come out as
missed or unequal, else the bench has shown nothing.
The plan is a function of the seed; the instants vary. Prints tables, then one JSON line.
"""
import argparse
import concurrent.futures
import contextlib
import ctypes
import functools
import hashlib
import inspect
import json
import multiprocessing
import os
import platform
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, namedtuple
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
TORCHRUN = Path(sys.executable).with_name("torchrun")
LAST = 160  # steps of a reference; no chain goes further
EVERY = 10  # steps between the checkpoints of a reference: where a chain may end
SETTINGS = {
    "n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 16, "batch_size": 1, "batch_tokens": 128, "dropout": 0.1,
    "max_steps": LAST, "schedule": "constant", "warmup_steps": 3, "learning_rate": 3e-3, "eval_interval": 0,
    "eval_tokens": 128, "sample_interval": 0, "prompts_file": "", "log_interval": 1, "trace_windows": True,
    "data_verify": "off", "device": "cpu", "compile": "off", "dtype": "float32"}
CONFIGS = [  # (optimizer, ranks; 0: another number in every session, with reproducible on); the seed says in what order
    ("adamw", 2), ("muon", 0), ("muon", 3), ("adamw", 0), ("muon", 4), ("adamw", 1), ("muon", 2), ("adamw", 3),
    ("muon", 1), ("adamw", 4)]
IN_SAVE = ("write", "rename", "pointer", "prune")
AIMS = ["write"] * 10 + ["rename"] * 4 + ["pointer"] * 4 + ["prune"] * 4 + ["step"] * 4 + ["start"] * 3
TARGETS = {  # for aims into saves (True) mostly such as cut them off: rank 0 is the one that writes
    True: ["rank 0"] * 5 + ["all"] * 5 + ["everything"] * 6 + ["another rank"] * 3 + ["torchrun"],
    False: ["another rank"] * 6 + ["torchrun"] * 4}
COUNTERS = ("step", "updates", "windows", "tokens", "pass", "order_fingerprint", "data_fingerprint", "segments",
            "scaler", "control", "bad_steps")
ROW = ("tokens", "windows", "epoch", "loss", "lr", "muon_lr", "grad_norm")
TENSORS = ("model.safetensors", "optimizer.safetensors")
FILES = (*TENSORS, "model.json", "trainer.json", "manifest.json", "latest.json")
GONE_S, SESSION_S = 45, 120  # the longest that ranks may live on after a kill; that any session may take

Session = namedtuple("Session", "process mark out_dir log rows events")  # rows, events: lines before it began


# -- as a rank: train.py with something added or broken

def as_rank(hooks, words):
    """Runs train.py's main with hooks 'name' or 'name=seconds', separated by commas; they are listed below."""
    import checkpoint
    import configurator
    import train

    patches = {"slow": slow, "forget": forget_the_optimizer, "order": take_other_windows, "dropout": draw_by_rank,
               "in-place": write_in_place, "no-verify": believe, "swallow": swallow_errors, "deaf": outlive}
    for hook in hooks.split(","):
        name, _, value = hook.partition("=")
        patches[name](train, checkpoint, *([float(value)] if value else []))
    sys.argv = ["train.py", *words]
    configurator.configure(vars(train), words)
    train.main()


def slow(train, checkpoint, seconds):
    """Makes every fsync take so long, so that a save takes about ten times that."""
    real = os.fsync
    os.fsync = lambda fd: (time.sleep(seconds), real(fd))[1]


def forget_the_optimizer(train, checkpoint):
    """Control: a resume with an optimizer state of zeros."""
    real = checkpoint.read

    def read(folder, name, wanted):
        tensors = real(folder, name, wanted)
        return {key: 0 * value for key, value in tensors.items()} if name.startswith("optimizer") else tensors
    checkpoint.read = read


def take_other_windows(train, checkpoint):
    """Control: a resume one step further in the order; a step's 8 windows are told from a fingerprint's by count."""
    real = train.draw_windows
    train.draw_windows = lambda first, count, *rest: real(first + 8 * (count == 8), count, *rest)


def draw_by_rank(train, checkpoint):
    """Control: dropout that depends on the rank."""
    real = train.hash64
    train.hash64 = lambda *words: real(*words, *[os.environ["RANK"]] * ("dropout" in words))


def write_in_place(train, checkpoint):
    """Control: a save under the final name, pointed at before its tensors are there."""
    def write(out_dir, step, files, run, kind="checkpoints"):
        folder = Path(out_dir, kind, f"step_{step:08d}")
        folder.mkdir(parents=True, exist_ok=True)
        manifest = {"format": 1, "run": run, "step": step, "files": []}
        for name, content in sorted({**files, "manifest.json": manifest}.items(), key=lambda file: file[0] in TENSORS):
            if name in TENSORS:
                checkpoint.point(out_dir, folder, "")
            checkpoint._write_new(folder / name, content)
        return folder
    checkpoint.write = write


def believe(train, checkpoint):
    """Control: no folder and no pointer is verified."""
    read = lambda path: json.loads(Path(path).read_text())
    checkpoint.verify = lambda folder, *_, **__: (read(folder / "manifest.json"), read(folder / "trainer.json"))


def swallow_errors(train, checkpoint):
    """Control: a file that could not be written is taken for written."""
    real = checkpoint._write_new

    def write_new(path, *rest):
        try:
            real(path, *rest)
        except OSError:
            path.touch()
    checkpoint._write_new = write_new


def outlive(train, checkpoint):
    """Control: ranks that do not hear that torchrun is dead (prctl 1 sets the signal for that), for two minutes."""
    signal.alarm(120)
    real, deafen = train.train_step, lambda: ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
    train.train_step = lambda *arguments: (deafen(), real(*arguments))[1]


# -- sessions, seen from outside

def end_with_parent():
    """Asks for SIGTERM when the parent dies (PR_SET_PDEATHSIG): a bench that is killed leaves nothing behind."""
    for number in (signal.SIGTERM, signal.SIGINT):  # a worker has inherited the bench's handlers
        signal.signal(number, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def start(out_dir, settings, ranks, hooks=""):
    """Starts a session under torchrun (0 ranks: without); its processes are known by a mark in their environment."""
    mark, script = os.urandom(8).hex(), ["bench/chaos.py", f"--as-rank={hooks}"] if hooks else ["train.py"]
    words = [f"--{name}={value}" for name, value in {**SETTINGS, **settings, "out_dir": out_dir}.items()]
    environment = {name: value for name, value in os.environ.items() if "RANK" not in name and name != "WORLD_SIZE"}
    log = Path(f"{out_dir}.log")
    with open(log, "wb") as file:
        front = [TORCHRUN, "--standalone", f"--nproc_per_node={ranks}"] if ranks else [sys.executable]
        process = subprocess.Popen([*front, *script, *words], cwd=ROOT, stdout=file, stderr=file,
                                   stdin=subprocess.DEVNULL, preexec_fn=end_with_parent,
                                   env={**environment, "CHAOS_SESSION": mark, "OMP_NUM_THREADS": "1",
                                        "TMPDIR": str(log.parent)})  # a killed torchrun leaves files there
    return Session(process, f"CHAOS_SESSION={mark}", out_dir, log, len(rows(out_dir, "metrics")),
                   len(rows(out_dir, "events")))


def environment_of(pid):
    """The words of a process's environment; none where it has ended or is another user's."""
    with contextlib.suppress(OSError):
        return Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
    return []


def members(mark):
    """[(pid, rank or None), ...] of the living processes with a mark, wherever they hang in the tree."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if mark.encode() in (words := environment_of(pid)):
            rank = [int(word[5:]) for word in words if word.startswith(b"RANK=")]
            found.append((int(pid), rank[0] if rank else None))
    return found


def victims(session, target, number):
    """(the target as it can be, pids, rank 0's if it is among them); before there are ranks it is everything."""
    everyone = members(session.mark)
    ranks = sorted({rank for _, rank in everyone if rank is not None})
    target = target if ranks or target == "torchrun" else "everything"
    target = "rank 0" if target == "another rank" and len(ranks) == 1 else target
    chosen = {"rank 0": ranks[:1], "another rank": ranks[1:][number % max(1, len(ranks) - 1):][:1], "all": ranks,
              "torchrun": [None], "everything": [None, *ranks]}[target]
    hit = {pid: rank for pid, rank in everyone if rank in chosen}
    return target, list(hit), next((pid for pid, rank in hit.items() if rank == 0), None)


def strike(mark, pids):
    """SIGKILL to all of them at one instant; returns the pids that it reached: one may be another's by now."""
    reached = [pid for pid in pids if mark.encode() in environment_of(pid)]
    for pid in list(reached):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            reached.remove(pid)
    return reached


def gone(session, seconds):
    """Waits until no process of the session lives; False where some still do after so many seconds."""
    deadline = time.monotonic() + seconds
    while session.process.poll() is None or members(session.mark):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def end(mark):
    """Kills whatever has a mark, again until nothing has: torchrun may just be starting a rank."""
    deadline = time.monotonic() + GONE_S
    while (left := members(mark)) and time.monotonic() < deadline:
        strike(mark, [pid for pid, _ in left])
        time.sleep(0.02)


def wait(session, condition, seconds, pause=0.0003):
    """Polls for a condition; False where the session has ended by itself or the seconds are over."""
    deadline = time.monotonic() + seconds
    while not condition():
        if session.process.poll() is not None or time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True


# -- what lies on disk

def rows(out_dir, name):
    """The whole lines of a jsonl file of a run folder."""
    path = Path(out_dir, f"{name}.jsonl")
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def read_json(path):
    """A JSON file's object, {} where there is none or half of one."""
    try:
        return json.loads(Path(path).read_bytes())
    except (OSError, ValueError):
        return {}


def folders(out_dir):
    """The checkpoint folders of a run, oldest first."""
    return sorted(path for path in Path(out_dir, "checkpoints").glob("step_*") if path.name[5:].isdigit())


def phase(out_dir):
    """Where a save stands on disk: 'write', 'rename' (done, but not the pointer's), 'pointer', 'prune', or ''."""
    pointed, there = read_json(out_dir / "latest.json").get("step", -1), folders(out_dir)
    if there and int(there[-1].name[5:]) > pointed:
        return "pointer" if any(out_dir.glob(".tmp-*")) else "rename"
    with contextlib.suppress(OSError):  # what was just there is gone: the next look tells
        for folder in Path(out_dir, "checkpoints").glob(".tmp-*"):
            steps = [read_json(folder / name).get("step") for name in ("manifest.json", "trainer.json")]
            written = max((path.stat().st_mtime for path in folder.iterdir()), default=time.time())
            old = written < (out_dir / "latest.json").stat().st_mtime if pointed >= 0 else False
            return "prune" if next((step <= pointed for step in steps if step is not None), old) else "write"
    return ""


def tensors_of(path):
    """{name: [type, shape, sha256 of its bytes]} of a safetensors file; its metadata does not count."""
    data = Path(path).read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = {name: entry for name, entry in json.loads(data[8:begin]).items() if name != "__metadata__"}
    cut = lambda first, last: hashlib.sha256(data[begin + first:begin + last]).hexdigest()
    return {name: [entry["dtype"], entry["shape"], cut(*entry["data_offsets"])] for name, entry in header.items()}


def state_of(out_dir, step):
    """All that must not depend on faults, at a step: {'tensors NAME': ..., 'counter ...': ..., 'row STEP': ...}."""
    folder = Path(out_dir, "checkpoints", f"step_{step:08d}")
    state = {f"tensors {name} {key}": value for name in TENSORS for key, value in tensors_of(folder / name).items()}
    trainer = read_json(folder / "trainer.json")
    state |= {f"counter {name}": trainer[name] for name in COUNTERS}
    for name, fields in (("metrics", ROW), ("windows", ("windows",))):
        for row in rows(out_dir, name):
            key, value = f"{name} of step {row['step']}", [row[field] for field in fields]
            if row["step"] <= step and state.setdefault(key, value) != value:
                state[key] = "done again with another outcome"
    return state


def differences(found, wanted):
    """What differs between two states, in words: [] where the runs are the same."""
    return sorted(key for key in found.keys() | wanted.keys() if found.get(key, ()) != wanted.get(key, ()))


# -- damage

def edit(value, draw):
    """Another value of the same kind."""
    if isinstance(value, str):
        at = draw.randrange(len(value) or 1)
        return value[:at] + ("0" if value[at:at + 1] != "0" else "1") + value[at + 1:]
    return not value if isinstance(value, bool) else 1 if value is None else value + draw.choice((-1, 1, 100))


def edited_json(data, draw):
    """JSON with one number, word or flag edited and the same layout."""
    content, places = json.loads(data), []

    def look(node):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            look(value) if isinstance(value, (dict, list)) else places.append((node, key))
    look(content)
    node, key = draw.choice(places)
    node[key] = edit(node[key], draw)
    return (json.dumps(content, indent=1) + "\n").encode()


def edited(data, draw):
    """A file with one number edited, in the form its readers take."""
    if data.lstrip()[:1] == b"{":
        return edited_json(data, draw)
    begin = 8 + int.from_bytes(data[:8], "little")
    at = begin + 4 * draw.randrange((len(data) - begin) // 4)
    return data[:at] + bytes(draw.sample(range(128), 2)) + data[at + 2:]


def flipped(data, draw):
    """A file with one bit flipped."""
    at = draw.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1:]


def zeroed(data, draw):
    """A file with a page of zeros; a small one, with a run of them."""
    size = 4096 if len(data) > 8192 else draw.randint(8, 64)
    at = draw.randrange(0, len(data), size)
    return data[:at] + bytes(len(data[at:at + size])) + data[at + size:]


IN_PLACE = {"flipped bit": flipped, "zeroed page": zeroed, "edited number": edited,
            "truncated": lambda data, draw: data[:draw.randrange(len(data) - 1)],  # JSON is whole without its newline
            "extra bytes": lambda data, draw: data + b"x" + draw.randbytes(draw.randrange(64))}
BY_COPY = ("another step", "another run", "another step, manifest agrees")  # a header names its step, and no run
KINDS = (*IN_PLACE, "missing", "swapped", *BY_COPY)


def replace(path, data):
    """Puts new bytes in a file's place; the old file, which may be linked elsewhere, stays as it is."""
    path.unlink()
    path.write_bytes(data)


def damage(path, kind, draw, sources):
    """Damages a file; `sources` {kind: folder} hold its namesakes. False where that would change nothing."""
    data = path.read_bytes()
    if kind in IN_PLACE:
        tries = (IN_PLACE[kind](data, draw) for _ in range(50))
        changed = next((bytes_ for bytes_ in tries if bytes_ != data), data)
    elif kind in BY_COPY:
        source = sources.get(kind, path.parent) / path.name
        changed = source.read_bytes() if source.exists() else data
        if kind.endswith("agrees") and b'"__metadata__"' not in data[:4096]:
            return False  # only a header that names its step can tell then
    elif kind == "swapped":
        other = draw.choice(sorted(other for other in path.parent.glob("*.*") if other != path
                                   and other.suffix in (".json", ".safetensors")))
        changed = other.read_bytes()
        replace(other, data)
    else:
        path.unlink()
        return True
    if changed == data:
        return False
    replace(path, changed)
    if kind.endswith("agrees"):
        agree(path)
    return True


def agree(path):
    """Makes the manifest agree with a damaged file, and removes the pointer: its hash of the manifest would tell."""
    manifest, data = read_json(path.parent / "manifest.json"), path.read_bytes()
    row = next(row for row in manifest["files"] if row["name"] == path.name)
    row |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    replace(path.parent / "manifest.json", json.dumps(manifest, indent=1).encode())
    path.parents[2].joinpath("latest.json").unlink()


def pointer_of(folder, place):
    """A folder with the latest.json that its save wrote for a checkpoint."""
    import checkpoint
    place.mkdir(exist_ok=True)
    checkpoint.point(place, folder, read_json(folder / "trainer.json")["lineage"][-1][0])
    return place


def contents(folder):
    """{name: sha256} of a folder's files."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}


# -- a chain

def plan_of(seed, number, configs):
    """All that is drawn for a chain: a function of the seed and its number."""
    draw = random.Random(f"chaos {seed} {number}")
    optimizer, ranks = configs[number % len(configs)]
    sessions = [{
        "ranks": ranks or draw.choice((1, 2, 4)), "aim": (aim := draw.choice(AIMS)),
        "target": draw.choice(TARGETS[aim in IN_SAVE]),
        "number": draw.randrange(12), "steps": draw.randrange(1, 9), "files": draw.randrange(6),
        "delay": draw.random(), "slow": round(draw.uniform(0.02, 0.1), 3) if draw.random() < 0.4 else 0,
        "checkpoint_interval": draw.randint(1, 4), "disk": draw.choices(("", "lift", "stay"), (14, 1, 1))[0],
        "limit": draw.random(), "damage": [draw.choice(KINDS[:-1]), draw.choice(FILES)] if draw.random() < 0.7 else [],
        "seed": draw.random()} for _ in range(draw.randint(9, 14))]
    for session in sessions:  # a save that is to be met must take long enough to be seen
        session["slow"] = session["slow"] or (0.03 if session["aim"] in IN_SAVE[1:] else 0)
    return {"number": number, "optimizer": optimizer, "ranks": ranks, "keep_checkpoints": draw.choice((2, 3, 3)),
            "last_ranks": ranks or draw.choice((1, 2, 4)), "sessions": sessions}


def settings_of(optimizer, ranks):
    """The settings of a configuration."""
    return {"optimizer": optimizer} | ({} if ranks else {"reproducible": True})


def arrives(chain, session, steps):
    """Whether a session comes to so many steps; one that lives and does not hangs."""
    if wait(session, lambda: len(rows(session.out_dir, "metrics")) >= session.rows + steps, SESSION_S, 0.002):
        return True
    if session.process.poll() is None:
        chain.unequal.append(f"{session.out_dir} hangs: no step {steps} of a session within {SESSION_S} s")
        end(session.mark)
    return False


def at_instant(chain, session, plan):
    """Waits for the instant that was drawn: the victims then, as `victims` gives them; None: it has ended before."""
    chosen, now = None, lambda: phase(session.out_dir)
    if plan["aim"] == "start":
        wait(session, lambda: len(rows(session.out_dir, "metrics")) > session.rows, 6 * plan["delay"], 0.01)
    elif not arrives(chain, session, plan["steps"]):
        return None
    else:
        seen = lambda: now() == plan["aim"] and (
            plan["aim"] != "write" or len(list(session.out_dir.glob("checkpoints/.tmp-*/*"))) >= plan["files"])
        chosen = victims(session, plan["target"], plan["number"])  # now: it takes longer than a save may
        if plan["aim"] in IN_SAVE:
            wait(session, seen, 1.5) or wait(session, now, 1.5)
        else:
            time.sleep(0.1 * plan["delay"])
    alive = session.process.poll() is None
    return (chosen or victims(session, plan["target"], plan["number"])) if alive else None


def fill_disk(chain, session, plan):
    """Lets rank 0's files grow to a limit only, above every jsonl file, from a random step on, until a save fails."""
    if not arrives(chain, session, plan["steps"]):
        return
    low = 40_000 + max(path.stat().st_size for path in session.out_dir.glob("*.jsonl"))
    high = max((path.stat().st_size for path in session.out_dir.glob("checkpoints/step_*/*.safetensors")), default=0)
    pid = next((pid for pid, rank in members(session.mark) if rank == 0), None)
    if low >= high or not pid:
        chain.tally["disk: no room for a limit"] += 1
        return
    with contextlib.suppress(ProcessLookupError):
        hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (low + int(plan["limit"] * (high - low - 1)), hard))
        told = lambda: any(row["event"] == "save_failed" for row in rows(session.out_dir, "events")[session.events:])
        if not (wait(session, told, 20, 0.005) or told()):
            chain.missed.append(f"{session.out_dir}: the disk was full and no save_failed was reported")
        chain.tally[f"disk: {plan['disk']}"] += 1
        if plan["disk"] == "lift":
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
        elif not gone(session, SESSION_S):
            chain.unequal.append(f"{session.out_dir} hangs: on a full disk for {SESSION_S} s")


def kill_session(chain, session, plan, target, pids, rank_0):
    """Kills as planned and counts it under what lies on disk, once all have ended; False: nobody was left to kill."""
    seen, now = phase(session.out_dir), time.time()
    if not (reached := strike(session.mark, pids)):
        return False
    chain.killed_at = now
    if not gone(session, GONE_S):
        chain.unequal.append(f"{session.out_dir}: {GONE_S} s after {target} was killed, some processes live")
    end(session.mark)
    told = rows(session.out_dir, "metrics")
    new, later = told[session.rows:], told and told[-1]["epoch"] >= 1
    seen = ((phase(session.out_dir) if rank_0 in reached else seen) or "step") if new else "start"
    chain.tally.update([f"phase: {seen}", f"target: {target}", f"ranks: {plan['ranks']}",
                        f"pass: {'later' if later else 'first'}",
                        f"saves: {'slowed' if plan['slow'] else 'as they are'}", "kills",
                        *["saves cut off"] * (rank_0 in reached and seen in IN_SAVE)])
    return True


def one_session(chain, plan):
    """A session of a chain, from its start to the end of its last process."""
    chain.tally.update(["sessions", *["world changes"] * (chain.ranks not in (None, plan["ranks"]))])
    chain.ranks, before = plan["ranks"], chain.reached
    session = start(chain.out_dir, chain.settings | {"checkpoint_interval": plan["checkpoint_interval"]},
                    plan["ranks"], f"slow={plan['slow']}" if plan["slow"] else "")
    try:
        if plan["disk"]:
            fill_disk(chain, session, plan)
        chosen = at_instant(chain, session, plan)
        if not (chosen and kill_session(chain, session, plan, *chosen) or chain.unequal):
            ended_by_itself(chain, session, plan["disk"])
    finally:
        end(session.mark)
    settle(chain, session, before)


def ended_by_itself(chain, session, disk):
    """A session may end by itself at its horizon, or after two saves that a full disk refused."""
    finished_in_time = gone(session, GONE_S)
    status = read_json(session.out_dir / "status.json")
    found = status.get("state"), status.get("reason")
    right = found == ("finished", "horizon") or disk and found == ("failed", "save")
    if not (finished_in_time and right and (session.process.returncode == 0) == (found[0] == "finished")):
        chain.unequal.append(f"{session.out_dir}: a session ended by itself ({found}): {tail(session.log)}")
    chain.tally[f"ended: {found[0]}"] += 1


def tail(path):
    """The last lines of a log."""
    return " | ".join(Path(path).read_text(errors="replace").splitlines()[-6:])[-600:]


def settle(chain, session, before):
    """What a session has shown: the recovery from the kill before it, steps done again, damage that was noticed."""
    new = rows(session.out_dir, "metrics")[session.rows:]
    if new and chain.recovering_from:
        chain.recoveries.append(new[0]["time"] - chain.recovering_from)
        chain.redone.append(max(0, before - new[0]["step"] + 1))
    chain.reached = max([row["step"] for row in new], default=before)
    chain.recovering_from = chain.killed_at if new else chain.recovering_from or chain.killed_at
    chain.killed_at = 0
    events = [row for row in rows(session.out_dir, "events")[session.events:]]
    for entry in chain.pending:
        entry.noticed = entry.noticed or any(notices(row, entry) for row in events)
    if events and any(row["event"] == "start" for row in events):  # it came past the checks
        chain.past, chain.pending = chain.past + chain.pending, []


def notices(row, entry):
    """Whether an event tells of a damage; a pointer that is gone or old is told by the one that takes its place."""
    if entry.path.name != "latest.json":
        return row["event"] == "damaged" and row.get("checkpoint") == entry.path.parent.name
    if entry.kind in ("missing", "another step"):
        return row["event"] in ("adopt", "pointer") and row["pointed"] == entry.says
    return row["event"] == "damaged" and row.get("checkpoint") in ("latest.json", entry.pointed)


def entry_of(path, kind, pointed):
    """What is to be noticed: a damage that has just been done."""
    says = read_json(path).get("checkpoint", "") if path.name == "latest.json" else ""
    folder = contents(path.parent) if path.name != "latest.json" else None
    return SimpleNamespace(path=path, kind=kind, pointed=pointed.name, says=says, kept=folder, noticed=False,
                           content=read_json(path))


def damage_between(chain, plan, other_run):
    """Damages the pointed checkpoint or the pointer, where an older whole checkpoint is there to go on from."""
    kind, name = plan["damage"]
    pointed = chain.out_dir / "checkpoints" / read_json(chain.out_dir / "latest.json").get("checkpoint", "none")
    older = [folder for folder in folders(chain.out_dir) if folder < pointed]
    if chain.pending or not (pointed.is_dir() and older):
        return
    draw = random.Random(plan["seed"])
    if name == "latest.json":
        path, sources = chain.out_dir / name, {"another step": pointer_of(older[-1], chain.place / "older")}
    else:
        path, sources = pointed / name, {"another step": older[-1], "another run": other_run}
    if damage(path, kind, draw, sources):
        chain.tally["damages by session"] += 1
        chain.damages.append((kind, name))
        chain.pending.append(entry_of(path, kind, pointed))


def kept(entry):
    """Whether the bytes of a damaged folder still lie beside it under a new name."""
    beside = entry.path.parent.parent.glob(f"{entry.path.parent.name}.damaged-*")
    return entry.kept is None or any(contents(folder) == entry.kept for folder in beside)


def run_chain(plan, place, other_run, data, deadline, least):
    """One chain, from the plan: its tallies, findings and end state. `least` kills are done whatever the time."""
    chain = SimpleNamespace(
        place=place, out_dir=place / "run", tally=Counter(), missed=[], unequal=[], recoveries=[], redone=[],
        damages=[], pending=[], past=[], ranks=None, reached=0, killed_at=0, recovering_from=0, state=None, end=0,
        plan=plan, settings=settings_of(plan["optimizer"], plan["ranks"]) | {
            "data_dir": data, "keep_checkpoints": plan["keep_checkpoints"]})
    place.mkdir()
    began = time.monotonic()
    for number, session in enumerate(plan["sessions"]):
        a_session = (time.monotonic() - began) / number if number else 8
        late = time.monotonic() + 2 * a_session > deadline and chain.tally["kills"] >= least
        if late or chain.reached > LAST - 16 or chain.unequal:
            break
        one_session(chain, session)
        if session["damage"]:
            damage_between(chain, session, other_run)
    finish(chain, plan)
    for entry in chain.past + chain.pending:
        if not (entry.noticed and kept(entry)):
            chain.missed.append(f"{chain.out_dir}: {entry.kind} in {entry.path.name}, by session: "
                                f"{'not kept' if entry.noticed else 'not noticed'}")
    chain.tally["chains"] += 1
    return chain


def finish(chain, plan):
    """The last session, undisturbed, to a step at which the reference has a checkpoint."""
    there = [int(folder.name[5:]) for folder in folders(chain.out_dir)]
    chain.end = min(LAST, EVERY * (max(there, default=0) // EVERY + 1))
    chain.tally["sessions"] += 1
    session, before = start(chain.out_dir, chain.settings | {"max_steps": chain.end, "checkpoint_interval": 4},
                            plan["last_ranks"]), chain.reached
    in_time = gone(session, SESSION_S)
    end(session.mark)
    settle(chain, session, before)
    if in_time and session.process.returncode == 0:
        chain.state = state_of(chain.out_dir, chain.end)
    else:
        chain.unequal.append(f"{chain.out_dir}: the last session did not finish: {tail(session.log)}")


# -- references and templates

def make_data(place):
    """The real command, on two small documents: 43 windows of 16 tokens to train on, a pass is 5.4 steps."""
    draw = random.Random("chaos data")
    for name in ("a.txt", "b.txt"):
        text = "".join(draw.choices(["the ", "run ", "goes ", "on ", "and on\n"], k=700))
        (place / name).write_text(text[:700])
    subprocess.run([sys.executable, "data/prepare.py", "build", place / "a.txt", place / "b.txt", "--out",
                    place / "data", "--workers", "1"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return place / "data"


def undisturbed(out_dir, settings, ranks, steps):
    """Runs to a step with nothing in the way, keeping every checkpoint."""
    session = start(out_dir, settings | {"max_steps": steps, "keep_checkpoints": LAST}, ranks)
    in_time = gone(session, SESSION_S)
    end(session.mark)
    if not in_time or session.process.returncode:
        raise RuntimeError(f"a run that nothing disturbed failed: {tail(session.log)}")
    return out_dir


# -- damage in bulk, in this process

def copy_of(template, place):
    """A copy of a run folder, by links: damage replaces files, and so does the code under test."""
    shutil.rmtree(place, ignore_errors=True)
    return Path(shutil.copytree(template, place, copy_function=os.link, ignore=shutil.ignore_patterns("*.jsonl")))


def case_of(template, other, place, kind, name, draw):
    """A damaged copy of a run folder: what is to be noticed there, or None where no byte would change."""
    if kind.endswith("agrees") and name not in TENSORS:
        return None
    out_dir = copy_of(template, place)
    older, pointed = folders(out_dir)[-2:]
    another_run = folders(other)[-1]
    if name == "latest.json":
        path = out_dir / name
        sources = {"another step": pointer_of(older, place.with_name("older")), "another run": other}
    else:
        path, sources = pointed / name, dict(zip(BY_COPY, (older, another_run, older)))
    return entry_of(path, kind, pointed) if damage(path, kind, draw, sources) else None


def verdict(template, entry):
    """How a session's start takes a damage: 'found', 'missed: ...', and for pointers 'fell back' or 'refused'."""
    import checkpoint
    events, path = [], entry.path
    out_dir = path.parent if path.name == "latest.json" else path.parents[2]
    before, pointed = folders(template)[-2:]
    try:
        found = checkpoint.find(str(out_dir), "auto", lambda event, **row: events.append({"event": event, **row}), True)
    except ValueError as error:
        named = (path.name, entry.kind) == ("latest.json", "another run") and "latest.json is of run" in str(error)
        return "refused" if named else f"missed: it would not go on: {error}"
    if not any(notices(row, entry) for row in events):
        before = read_json(template / path.name).items() if path.name == "latest.json" else ()
        return f"missed: no event names it: {events} {[item for item in before if item not in entry.content.items()]}"
    beside = {folder.name: contents(folder) for folder in Path(out_dir, "checkpoints").iterdir()}
    whole = [name for name, files in beside.items() if files == contents(pointed)]
    if path.name == "latest.json":
        right = whole and found[0].name in (pointed.name, before.name)
        return ("found" if found[0].name == whole[0] else "fell back") if right else f"missed: took {found[0].name}"
    right = found[0].name == before.name and beside.get(f"{pointed.name}.damaged-1") == entry.kept
    return "found" if right else f"missed: took {found[0].name}, there is {sorted(beside)}"


@contextlib.contextmanager
def checks_off(template):
    """Control: every folder and pointer is what it was before the damage, as far as the code under test can see."""
    import checkpoint
    as_written = checkpoint.verify(folders(template)[-1]), checkpoint.pointer(template)
    with mock.patch.object(checkpoint, "verify", lambda *_, **__: as_written[0]), \
            mock.patch.object(checkpoint, "pointer", lambda _: as_written[1]), \
            mock.patch.object(checkpoint, "point", lambda *_: as_written[1]):
        yield


# {check of checkpoint.py: (its function, the piece of the source that is the check, what switches it off)}
CHECKS = {
    "hash": ("verify", ', ("sha256", sha256))', ",)"),
    "size and hash": ("verify", '(("bytes", os.path.getsize), ("sha256", sha256))', "()"),
    "listing": ("verify", "sorted(there ^ listed.keys())", "()"),
    "step in a header": ("verify", 'found in (None, str(manifest["step"]))', "True"),
    "step in a folder's name": ("verify", 'not named or int(named[1]) == manifest["step"]', "True"),
    "step in trainer.json": ("verify", '("run", "step")', '("run",)'),
    "cursor": ("verify", 'windows * settings["block_size"] == tokens == step * settings["batch_tokens"]', "True"),
    "manifest's hash in the pointer": ("verify", "manifest_sha256 is not None", "False"),
    "pointer against trainer.json": ("newest", "if pointed.get(key, value) != value", "if False"),
    "commit in the pointer": ("pointer", 'not re.fullmatch("|[0-9a-f]{40}", found["commit"])', "False")}


@contextlib.contextmanager
def check_off(check):
    """Control: checkpoint.py with one check replaced in its source, and nothing else."""
    import checkpoint
    name, piece, instead = CHECKS[check]
    source = inspect.getsource(getattr(checkpoint, name))
    if source.count(piece) != 1:
        raise ValueError(f"checkpoint.py, {name}: the check {check!r} is not {piece!r} any more")
    with mock.patch.object(checkpoint, name, getattr(checkpoint, name)):  # puts it back
        exec(source.replace(piece, instead), vars(checkpoint))
        yield


def fault_for(check, template, place, draw):
    """A copy of a run folder with a fault that this check alone can tell: what is to be noticed there."""
    older, pointed = folders(copy_of(template, place))[-2:]
    if check == "step in a folder's name":
        shutil.rmtree(pointed)
        shutil.copytree(older, pointed)
        (place / "latest.json").unlink()
        return entry_of(pointed / "manifest.json", check, pointed)
    with_field = lambda **fields: lambda data: json.dumps(json.loads(data) | fields, indent=1).encode()
    name, fault = {
        "hash": (TENSORS[0], lambda data: edited(data, draw)), "size and hash": ("model.json", lambda data: data[:-9]),
        "listing": ("more.json", None), "step in a header": (TENSORS[1], None), "step in trainer.json":
        ("trainer.json", None), "cursor": ("trainer.json", with_field(windows=1)),
        "manifest's hash in the pointer": ("manifest.json", with_field(note="")),
        "pointer against trainer.json": ("latest.json", with_field(nonce="0")),
        "commit in the pointer": ("latest.json", with_field(commit="0"))}[check]
    path = place / name if name == "latest.json" else pointed / name
    if check == "listing":
        path.write_text("{}")
    else:
        replace(path, fault(path.read_bytes()) if fault else (older / name).read_bytes())
    if check in ("step in a header", "step in trainer.json", "cursor"):
        agree(path)
    return entry_of(path, check, pointed)


def check_alone(check, template, place, draw):
    """Whether a check tells its fault, and nothing does once it is off."""
    told = verdict(template, fault_for(check, template, place, draw))
    with check_off(check):
        untold = verdict(template, fault_for(check, template, place, draw))
    return told == "found" and untold.startswith("missed: no event")


def in_bulk(result, template, other, place, seed, each):
    """`each` damages of every kind to every kind of file, and the controls: of every check, and of every cell."""
    draw = random.Random(f"bulk {seed}")
    with mock.patch.object(os, "fsync", lambda fd: None):  # no power is cut here
        for check in CHECKS:
            result.controls[f"check off: {check}"] = check_alone(check, template, place, draw)
        for kind, name in ((kind, name) for kind in KINDS for name in FILES):
            case = functools.partial(case_of, template, other, place, kind, name, draw)
            for _ in range(each):
                if entry := case():
                    note_damage(result, kind, name, verdict(template, entry))
            if (kind, name) in result.cells:
                entry = case()
                with checks_off(template):
                    result.bulk[f"{kind}, {name}"] = verdict(template, entry).startswith("missed: no")
    shutil.rmtree(place, ignore_errors=True)


def note_damage(result, kind, name, found):
    """Counts a damage in its cell."""
    result.cells[kind, name] += 1
    result.tally[f"damage: {found.partition(':')[0]}"] += 1
    if found.startswith("missed"):
        result.missed.append(f"{kind} in {name}: {found}")


def by_verify(template, other, place, seed, number):
    """`python checkpoint.py verify` on a copy in which each checkpoint is damaged: [(kind, file, found), ...]."""
    draw, out_dir, done = random.Random(f"verify {seed} {number}"), copy_of(template, place), []
    all_folders = folders(out_dir)
    for folder in all_folders:
        kind, name = draw.choice(KINDS[:-1]), draw.choice(FILES[:-1])
        step = next(source for source in folders(template) if source.name != folder.name)
        if damage(folder / name, kind, draw, {"another step": step, "another run": folders(other)[-1]}):
            done.append((kind, name, f"checkpoints/{folder.name}"))
    ran = subprocess.run([sys.executable, "checkpoint.py", "verify", out_dir], cwd=ROOT, capture_output=True, text=True)
    damaged = {line.split()[0] for line in ran.stdout.splitlines() if " damaged: " in line}
    shutil.rmtree(place)
    return [(kind, name, "found" if ran.returncode == bool(done) and place_ in damaged else "missed: by verify")
            for kind, name, place_ in done]


# -- controls that need sessions

CONTROLLED = {"optimizer": "adamw"}  # sums of another number of ranks differ: reproducible is off
EXPECTED = {"plain": "", "forget": "tensors", "order": "windows of", "dropout": "tensors", "ranks": "tensors"}


def resumed(base, place, settings, hooks="", ranks=2, kill_when=None, act=None):
    """Goes on from a copy of a killed run to step 20, or until it is killed: (exit status, state or None)."""
    if base and not place.exists():
        shutil.copytree(base, place)
    session = start(place, settings | {"max_steps": 20}, ranks, hooks)
    try:
        if act and wait(session, lambda: len(rows(place, "metrics")) > session.rows, SESSION_S, 0.005):
            act(session)
        if kill_when and wait(session, lambda: kill_when(place), SESSION_S):
            end(session.mark)
        gone(session, SESSION_S)
    finally:
        end(session.mark)
    code = session.process.returncode
    return code, state_of(place, 20) if code == 0 else None


def limit_files(session):
    """A disk that takes no weights any more."""
    for pid, rank in members(session.mark):
        if rank == 0:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (100_000, resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]))


def survivors(place, settings):
    """Whether ranks that outlive a killed torchrun are seen."""
    session = start(place, settings | {"max_steps": 10**6}, 2, "deaf")  # it must not end by itself
    try:
        wait(session, lambda: len(rows(place, "metrics")) >= 3, SESSION_S, 0.005)
        strike(session.mark, [pid for pid, rank in members(session.mark) if rank is None])
        return not gone(session, 5)
    finally:
        end(session.mark)


def session_controls(place, data, deadline):
    """Runs the broken sessions, the first two and those for which there is time: {name: reported; None: not run}."""
    place.mkdir()
    settings = CONTROLLED | {"data_dir": data, "checkpoint_interval": 4, "keep_checkpoints": 3}
    base, found = place / "base", {}
    reference = state_of(undisturbed(place / "reference", settings, 2, 20), 20)
    resumed(None, base, settings, kill_when=lambda out_dir: len(rows(out_dir, "metrics")) >= 13)
    half_there = lambda out_dir: not (folders(out_dir)[-1] / TENSORS[1]).exists()
    no_tensors = lambda out_dir: not folders(out_dir)[-1].joinpath(TENSORS[0]).stat().st_size > 100_000
    jobs = {name: functools.partial(resumed, base, place / name, settings, hooks, ranks) for name, hooks, ranks in (
        ("plain", "", 2), ("forget", "forget", 2), ("order", "order", 2), ("dropout", "dropout", 2), ("ranks", "", 1))}
    jobs["survivors"] = functools.partial(survivors, place / "survivors", settings)
    for name, hooks, kill_when, act in (("in-place", "in-place,no-verify,slow=0.1", half_there, None),
                                        ("swallow", "swallow,no-verify", no_tensors, limit_files)):
        first = functools.partial(resumed, base, place / name, settings, hooks, 2, kill_when, act)
        jobs[name] = lambda first=first, name=name: (first(), resumed(base, place / name, settings, "no-verify"))[1]
    for name, job in jobs.items():
        there_is_time = len(found) < 2 or time.monotonic() + 20 < deadline
        found[name] = judge_control(name, job(), reference) if there_is_time else None
    return found


def judge_control(name, found, reference):
    """Whether the bench's own eyes see what a broken session did; 'plain' is not broken and must be equal."""
    if isinstance(found, bool):
        return found
    code, state = found
    if name not in EXPECTED:
        return code != 0 or bool(differences(state, reference))
    told = differences(state, reference) if state else []
    return code == 0 and (any(key.startswith(EXPECTED[name]) for key in told) if EXPECTED[name] else not told)


# -- the bench

def timely(deadline, least_s, function, *arguments):
    """Calls a function where at least so many seconds are left for it."""
    return function(*arguments) if time.monotonic() + least_s < deadline else None


def work(result, root, seed, minutes, began):
    """Everything of one invocation: references, controls, chains and damage, on as many lanes as there are cores."""
    deadline = began + 60 * minutes - 3
    configs = random.Random(seed).sample(CONFIGS, len(CONFIGS))[:max(1, int(0.9 * minutes))]
    plans = [plan_of(seed, number, configs) for number in range(2 + int(4 * minutes))]
    result.plan = hashlib.sha256(json.dumps(plans).encode()).hexdigest()[:12]
    data, lanes = make_data(root), min(2, len(os.sched_getaffinity(0)))
    with concurrent.futures.ProcessPoolExecutor(lanes, multiprocessing.get_context("fork"), end_with_parent) as pool:
        try:
            other = pool.submit(undisturbed, root / "other", {"seed": 2, "n_embd": 24, "data_dir": data,
                                                              "checkpoint_interval": 4}, 0, 12)
            refer = lambda optimizer, ranks: pool.submit(
                undisturbed, root / f"reference-{optimizer}-{ranks}", settings_of(optimizer, ranks) | {
                    "data_dir": data, "checkpoint_interval": EVERY}, ranks or 1, LAST)
            references = {config: refer(*config) for config in configs}
            other = other.result()
            run = lambda plan: pool.submit(timely, deadline if plan["number"] else deadline + 60, 20, run_chain, plan,
                                           root / f"chain-{plan['number']}", other, data, deadline,
                                           0 if plan["number"] else 5)
            jobs = [run(plans[0]), controls := pool.submit(session_controls, root / "controls", data, deadline)]
            template = three_checkpoints(references[configs[0]].result(), root / "template")
            for plan in plans[1:]:
                jobs.append(run(plan))
                jobs.append(pool.submit(timely, deadline, 6, by_verify, template, other,
                                        root / f"verify-{plan['number']}", seed, plan["number"]))
            in_bulk(result, template, other, root / "bulk", seed, 60 if minutes >= 10 else max(2, int(5 * minutes)))
            for job in concurrent.futures.as_completed(jobs):
                collect(result, job, references, job is controls)
        except BaseException:  # a signal, too: nobody waits for what is under way
            for worker in multiprocessing.active_children():
                worker.kill()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def three_checkpoints(reference, place):
    """A copy of a reference with its three newest checkpoints."""
    return Path(shutil.copytree(reference, place, ignore=lambda _, names: [
        name for name in names if name.startswith("step_") and int(name[5:]) < LAST - 2 * EVERY]))


def collect(result, job, references, is_controls):
    """Takes over what a job has found; a job that broke is a finding too."""
    try:
        found = job.result()
        if is_controls:
            result.controls |= {f"session: {name}": told for name, told in found.items() if told is not None}
            result.not_run += [f"session: {name}" for name, told in found.items() if told is None]
        elif isinstance(found, list):
            for kind, name, verdict_ in found:
                note_damage(result, kind, name, verdict_)
            result.tally["damages by verify"] += len(found)
        elif found:
            collect_chain(result, found, references)
    except Exception as error:  # whatever broke in the bench must not pass for an equal run
        result.unequal.append(f"a part of the bench broke: {type(error).__name__}: {error}")


def collect_chain(result, chain, references):
    """Compares a chain's end with its reference and adds up what it has seen."""
    told = []
    if chain.state:
        wanted = state_of(references[chain.plan["optimizer"], chain.plan["ranks"]].result(), chain.end)
        told = differences(chain.state, wanted)
        if told:
            chain.unequal.append(f"{chain.out_dir}: {len(told)} differ at step {chain.end}: {', '.join(told[:4])}")
    tally, plan, state = chain.tally, chain.plan, json.dumps(chain.state, sort_keys=True)
    windows = not chain.state or any(key.startswith("windows of") for key in told)
    result.lines.append(
        f"{plan['number']:5}  {plan['optimizer']:9}  {plan['ranks'] or '1/2/4':5}  {tally['sessions']:8}  "
        f"{tally['kills']:5}  {len(chain.damages):7}  {sum(chain.redone):6}  {chain.end:8}  "
        f"{hashlib.sha256(state.encode()).hexdigest()[:12]}  {'no' if chain.unequal else 'yes':5}  "
        f"{'no' if windows else 'yes'}")
    result.tally += tally
    result.tally["chains equal"] += not chain.unequal
    for name in ("missed", "unequal", "recoveries", "redone"):
        getattr(result, name).extend(getattr(chain, name))
    result.cells.update(chain.damages)
    if not (chain.missed or chain.unequal):
        shutil.rmtree(chain.place)


def show(result):
    """The tables."""
    tally, kills = result.tally, result.tally["kills"]
    print("chain  optimizer  ranks  sessions  kills  damages  redone  end step  hash          equal  windows equal")
    print("\n".join(result.lines), "\n", sep="")
    for title in ("phase", "target", "ranks", "pass", "saves", "disk", "ended", "damage"):
        found = {key.partition(": ")[2]: count for key, count in sorted(tally.items()) if key.startswith(f"{title}: ")}
        total = {"disk": "  (full in the tensor files)", "ended": "", "damage": ""}.get(title, f"  of {kills} kills")
        print(f"{title:8}" + "".join(f"  {name} {count}" for name, count in found.items()) + total)
    in_save, cut = sum(tally[f"phase: {name}"] for name in IN_SAVE), tally["saves cut off"]
    print(f"inside a save: {in_save} of {kills} kills ({in_save / max(1, kills):.0%}); of rank 0 itself, with a half-"
          f"done save on disk afterwards: {cut} ({cut / max(1, kills):.0%})")
    print(f"\n{'damages':28}" + "".join(f"{name.partition('.safe')[0]:>15}" for name in FILES))
    for kind in KINDS:
        print(f"{kind:28}" + "".join(f"{result.cells.get((kind, name), '-'):>15}" for name in FILES))
    print(f"by a session {tally['damages by session']}, by checkpoint.py verify {tally['damages by verify']}; "
          f"missed {len(result.missed)}\nfell back: the pointer's hash was hit, so its checkpoint cannot be told from "
          "a damaged one and the older one is taken; refused: the pointer is another run's, and no run starts\n")
    for name, reported in sorted(result.controls.items()):
        print(f"control: {name}: {'reported' if reported else 'SILENT'}")
    for name in result.not_run:
        print(f"control: {name}: not run")
    print(f"controls in bulk, all checks off, for each cell of the table above: {sum(result.bulk.values())} of "
          f"{len(result.bulk)} reported\n")


def summary_of(result, seed, minutes, began):
    """The JSON line."""
    tally, in_save = result.tally, sum(result.tally[f"phase: {name}"] for name in IN_SAVE)
    import torch  # for its version
    return {
        "bench": "chaos", "seed": seed, "plan": result.plan, "minutes": minutes, "kills": tally["kills"],
        "in_save": in_save, "in_save_share": round(in_save / max(1, tally["kills"]), 3),
        "in_save_cut": tally["saves cut off"],
        "in_save_cut_share": round(tally["saves cut off"] / max(1, tally["kills"]), 3),
        "later_pass": tally["pass: later"], "damages": sum(result.cells.values()),
        "damages_by_session": tally["damages by session"], "damages_by_verify": tally["damages by verify"],
        "disk_full": tally["disk: lift"] + tally["disk: stay"], "world_changes": tally["world changes"],
        "sessions": tally["sessions"], "chains": tally["chains"], "chains_equal": tally["chains equal"],
        "steps_redone": sum(result.redone), "most_steps_redone": max(result.redone, default=0),
        "longest_recovery_s": round(max(result.recoveries, default=0), 1), "missed": len(result.missed),
        "refused": tally["damage: refused"], "fell_back": tally["damage: fell back"],
        "unequal": len(result.unequal), "controls": len(result.controls), "controls_bulk": len(result.bulk),
        "controls_silent": sum(not told for told in (*result.controls.values(), *result.bulk.values())),
        "controls_not_run": len(result.not_run),
        "python": platform.python_version(), "torch": torch.__version__, "cores": len(os.sched_getaffinity(0)),
        "wall_s": round(time.monotonic() - began, 1)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3)
    parser.add_argument("--seed", type=int, default=1)
    asked, began = parser.parse_args(), time.monotonic()
    print(f"python bench/chaos.py --minutes {asked.minutes:g} --seed {asked.seed}", flush=True)
    result = SimpleNamespace(tally=Counter(), cells=Counter(), missed=[], unequal=[], controls={}, bulk={}, not_run=[],
                             recoveries=[], redone=[], lines=[], plan="")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by way of every `finally`
    root = Path(tempfile.mkdtemp(prefix="chaos-"))
    os.environ["CHAOS_BENCH"] = str(root)
    try:
        work(result, root, asked.seed, asked.minutes, began)
    except BaseException:  # whatever ends the bench, a half-done result is none
        end(f"CHAOS_BENCH={root}")
        shutil.rmtree(root)
        raise
    show(result)
    found = summary_of(result, asked.seed, asked.minutes, began)
    silent = [name for name, told in (result.controls | result.bulk).items() if not told]
    wanted = result.not_run if asked.minutes >= 10 else []
    reasons = [*result.missed, *result.unequal, *(f"control {name} was not reported" for name in silent + wanted)]
    for reason in reasons:
        print(f"FAILED: {reason}")
    print(f"kept: {root}" if reasons else f"{found['chains_equal']} chains equal to the bit; "
          f"{found['steps_redone']} steps done again; longest recovery {found['longest_recovery_s']} s")
    if not reasons:
        shutil.rmtree(root)
    print(json.dumps(found))
    return int(bool(reasons) or found["kills"] < 1)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    if sys.argv[1:] and sys.argv[1].startswith("--as-rank="):
        as_rank(sys.argv[1].partition("=")[2], sys.argv[2:])
    else:
        sys.exit(main())
