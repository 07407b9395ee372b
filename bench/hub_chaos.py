"""Kills sessions of a run that only a stand-in for the Hub remembers, under server faults, and watches its pointer.

    python bench/hub_chaos.py --sessions 4 --seed 7     # a sample; exit 0 only where all is equal and nothing was wrong
    python bench/hub_chaos.py --sessions 24 --seed 1    # the committed result

Each session starts on an empty disk, with its own number of ranks and its own plan. Most are killed (-9): at a request
of a download, an upload, a commit, a verification, a pointer roll, a prune or a squash, before its answer leaves or
soon after; in a save or between two. Others are stopped, signalled, cut off from the Hub, or frozen while another
session takes the run over. The stand-in keeps and serves real bytes and strikes by a plan of faults. After each request
that it has done, before the answer leaves, a reader that shares no code with hub.py looks at what it holds: the pointer
must name a whole checkpoint, byte by byte, that descends from the one before. The last session must end as the run that
nothing disturbed: tensors, counters, every row of metrics.jsonl and every window of every step, to the bit.
The plan is a function of the seed; the instants vary. Prints tables, then one JSON line.
"""
import argparse
import contextlib
import hashlib
import json
import os
import platform
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "bench"), str(ROOT / "tests")]  # at the end: bench/ has a checkpoint.py of its own
import chaos
import hub_server

REPO = "me/run"
SETTINGS = chaos.SETTINGS | {  # files of more than the 1 MiB above which hub.py reads pieces, and steps of about 0.1 s
    "n_layer": 2, "n_head": 2, "n_embd": 128, "block_size": 64, "batch_size": 2, "batch_tokens": 1024,
    "eval_tokens": 1024, "schedule": "constant", "checkpoint_interval": 3, "milestone_interval": 20,
    "reproducible": True}
PARTS = ("model.safetensors", "optimizer.safetensors", "model.json", "trainer.json")  # a checkpoint has them at least
FIRST_AIMS = ("save", "upload", "commit", "verify", "pointer")  # those that an empty repository allows
AIMS = (*FIRST_AIMS, "start", "download", "train", "prune", "squash")
REQUESTS = {  # of a stage, from which one is drawn
    "start": 3, "download": 9, "upload": 4, "commit": 1, "verify": 8, "pointer": 4, "prune": 2, "squash": 1}
ENDINGS = {  # of a session; 'overtaken' is right too where it was shown a stale branch
    "kill": ("killed", "stopped", "refused"), "stop": ("stopped", "refused"), "outage": ("stopped", "refused"),
    "term": ("signal", "refused"), "freeze": ("overtaken",), "takeover": ("stopped",), "closed": ("refused",),
    "last": ("finished",)}
OURS = "/me/run|/lfs/"  # not what the client asks for itself
READS = "GET /lfs/|GET .*/resolve/"
COMMITS = "POST .*/commit/"
FAULTS = (  # a session gets some of these, of each one variant: (kind, match, more)
    (("status", OURS, {"chance": 0.05, "times": 4}), ("status", OURS, {"chance": 0.05, "times": 3, "code": 500}),
     ("status", OURS, {"chance": 0.08, "times": 3, "code": 429, "headers": {"Retry-After": "1"}})),
    (("drop", OURS, {"chance": 0.05, "times": 3}), ("drop", f"{COMMITS}|PUT", {"chance": 0.5, "times": 2})),
    (("hang", OURS, {"chance": 0.05, "seconds": 3, "drop": True}), ("hang", COMMITS, {"seconds": 2})),
    (("lost_reply", COMMITS, {"chance": 0.4, "times": 2}),
     ("lost_reply", f"{COMMITS}|super-squash", {"chance": 0.5, "times": 2, "drop": True})),
    (("stale_resolve", "GET", {"chance": 0.1}), ("stale_resolve", "GET", {"chance": 0.1, "back": 2})),
    (("norange", "GET /lfs/", {"chance": 0.2, "times": 2}),),
    (("truncate", READS, {"chance": 0.1, "times": 2}),),
    (("corrupt", READS, {"chance": 0.1, "times": 2}), ("corrupt", "PUT /lfs/", {"chance": 0.5})),
    (("missing", "GET .*/resolve/", {"chance": 0.05}),
     ("missing", "GET .*/tree/", {"chance": 0.3, "path": "optimizer"})),
    (("ignored", "/preupload/", {"chance": 0.5, "path": "optimizer"}),),
    (("race", COMMITS, {"chance": 0.4, "times": 2, "files": {"notes.txt": "another writer was here"}}),))
AIM_S, SESSION_S, OUTAGE_S = 60, 300, 8  # longest wait for an instant, for a session's end; length of an outage


# -- the reader: it shares no code with what it judges

def new_reader():
    """What the reader knows: the pointer it saw last, digests of stored files, and what it found wrong."""
    return SimpleNamespace(pointed=None, digests={}, looks=0, moves=0, violations=[])


def want(right, problem):
    if not right:
        raise ValueError(problem)


def stored(hub, tree, path):
    """The bytes of a small file of a commit."""
    want(path in tree, f"{path} is not there")
    return (hub.blobs / tree[path][0]).read_bytes()


def digest_of(reader, path):
    """(sha256, bytes) of a stored file as it is now: it is read again unless it is the very file that was read."""
    status = path.stat()
    key = path.name, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    if key not in reader.digests:
        reader.digests[key] = hashlib.sha256(path.read_bytes()).hexdigest()
    return reader.digests[key], status.st_size


def check(reader, hub):
    """(pointer at the head, trainer.json of the whole checkpoint that it names), or two times None without a pointer.

    Raises: ValueError and others for what is wrong."""
    head = hub.files(REPO)
    if "latest.json" not in head:
        want(reader.pointed is None, "latest.json is gone")
        return None, None
    pointed = json.loads(stored(hub, head, "latest.json"))
    want(pointed["format"] == 1 and pointed["checkpoint"] == f"step_{pointed['step']:08d}", f"it says {pointed}")
    want(pointed["commit"] in ("", *hub.repos[REPO]["commits"]), f"commit {pointed['commit']} is not there")
    tree, folder = hub.files(REPO, pointed["commit"] or "main"), f"checkpoints/{pointed['checkpoint']}/"
    content = stored(hub, tree, f"{folder}manifest.json")
    want(hashlib.sha256(content).hexdigest() == pointed["manifest_sha256"], "manifest.json is not the one pointed at")
    listed = {folder + row["name"]: (row["sha256"], row["bytes"]) for row in json.loads(content)["files"]}
    there = {path for path in tree if path.startswith(folder)} - {f"{folder}manifest.json"}
    want(there == listed.keys() >= {folder + name for name in PARTS}, f"{sorted(there)} are there")
    for path, wanted in listed.items():
        found = digest_of(reader, hub.blobs / tree[path][0])
        want(found == wanted == tree[path], f"{path} is {found} and listed as {tree[path]}, its manifest: {wanted}")
    trainer = json.loads(stored(hub, tree, f"{folder}trainer.json"))
    check_cursor(pointed, trainer)
    return pointed, trainer


def check_cursor(pointed, trainer):
    """That the pointer, the checkpoint and its arithmetic agree. Raises: ValueError."""
    wrong = [name for name in ("run", "step", "tokens", "windows") if pointed[name] != trainer[name]]
    want(not wrong, f"the pointer has another {' and '.join(wrong)} than its checkpoint")
    want(trainer["lineage"][-1][0] == pointed["nonce"], "the pointer has another nonce than its checkpoint")
    settings, step = trainer["settings"], trainer["step"]
    want(trainer["windows"] * settings["block_size"] == trainer["tokens"] == step * settings["batch_tokens"],
         f"{trainer['tokens']} tokens and {trainer['windows']} windows at step {step}")


def comes_after(before, trainer):
    """Whether training came through a pointer's checkpoint: in its session, before the next one in the line began."""
    line = trainer["lineage"]
    at = next((i for i, (nonce, _) in enumerate(line) if nonce == before["nonce"]), None)
    if at is None or before["run"] != trainer["run"]:
        return False
    return before["step"] <= (line[at + 1][1] if at + 1 < len(line) else trainer["step"])


def bare(pointed):
    """A pointer without its commit, which a squash of the history changes."""
    return pointed and pointed | {"commit": ""}


def look(reader, hub, record):
    """Judges what the repository holds after a request, under the stand-in's lock, before the answer leaves."""
    if REPO not in hub.repos:
        return
    try:
        pointed, trainer = check(reader, hub)
        before, reader.pointed = reader.pointed, pointed
        reader.looks += pointed is not None
        if before and bare(before) != bare(pointed):
            reader.moves += 1
            want(comes_after(before, trainer), f"{before} was pointed at, and now {pointed}, of {trainer['lineage']}")
    except Exception as error:  # whatever cannot be read as it should be is a violation
        reader.violations.append(f"after {record['line'][:160]}: {type(error).__name__}: {error}"[:700])


def is_whole(folder):
    """Whether a checkpoint folder on a disk is what its manifest says."""
    listed = {row["name"]: row["sha256"] for row in chaos.read_json(folder / "manifest.json").get("files", ())}
    there = chaos.contents(folder)
    return bool(listed) and listed | {"manifest.json": there.get("manifest.json")} == there


# -- where a session is, by its requests

def stage_after(stage, line):
    """The stage of a session's work with the Hub once it has sent a request."""
    for pattern, name in ((r"/commit/\S+ step ", "commit"), (r"/commit/\S+ point ", "pointer"),
                          (r"/commit/\S+ prune ", "prune"), ("/super-squash/", "squash"), ("^PUT |/batch$", "upload")):
        if re.search(pattern, line):
            return name
    if "/preupload/" in line:  # of a large file, or of a pointer that is about to be rolled
        return "pointer" if stage in ("commit", "verify", "squash") else "upload"
    if not line.startswith("GET ") or not re.search(OURS, line):
        return stage
    if re.search(r"^GET /api/models/\S+/run(\?|$)", line) and stage != "start":
        return "push"  # the head, with which each round of a push begins
    of_files = "latest.json" not in line and re.search(READS, line)
    return {"start": "download" if of_files else "start", "commit": "verify",
            "pointer": "prune" if "trainer.json" in line else "pointer"}.get(stage, stage)


def new_watch(mark, plan):
    """Follows a session to the request that was drawn for it."""
    return SimpleNamespace(
        mark=mark, stage="start", aim=plan["aim"] if plan["aim"] in REQUESTS else "", left=plan["request"],
        at_once=plan["delay"] == 0, number=signal.SIGSTOP if plan["kind"] == "freeze" else signal.SIGKILL, reached=0,
        is_there=threading.Event())


def follow(watch, record):
    """Keeps the stage; strikes, where that is to be at once, before the answer to the request that was drawn leaves."""
    watch.stage = stage_after(watch.stage, record["line"])
    watch.left -= watch.stage == watch.aim
    if watch.left == 0 and not watch.is_there.is_set():
        watch.reached = send(watch.mark, watch.number) if watch.at_once else 0
        watch.is_there.set()


def send(mark, number):
    """A signal to all processes of a session at one instant; how many it reached."""
    reached = 0
    for pid, _ in chaos.members(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            reached += 1
    return reached


# -- the plan

def plans_of(seed, sessions):
    """A plan for each session but those that take over: a function of the seed and the number of sessions."""
    draw, count = random.Random(f"hub chaos {seed}"), sessions - 1
    special = (["stop"] if count < 5 else ["term", "outage", "freeze"] if count < 11 else
               ["term", "outage", "freeze", "closed", "stop", "stop", "term", "freeze"])
    kinds = ["kill"] * (count - 1 - len(special)) + special
    draw.shuffle(kinds)
    later = AIMS if count > 10 else AIMS[:-1]  # a history that is to be squashed takes some sessions to grow
    aims = [draw.choice(FIRST_AIMS), *(aim for _ in kinds for aim in draw.sample(later, len(later)))]
    plans = [plan_of(draw, kind, 1 + (i % 3 == 1), aims) for i, kind in enumerate(["kill", *kinds])]
    return [*plans, plan_of(draw, "last", 1, aims)]


def plan_of(draw, kind, ranks, aims):
    """The plan of one session."""
    aim = aims.pop(0) if kind == "kill" else draw.choice(("train", *FIRST_AIMS[1:])) if kind == "freeze" else ""
    faults = [draw.choice(variants) for variants in draw.sample(FAULTS, 6)]
    faults.append(("status", "GET .*/me/run", {"code": draw.choice((429, 500, 503)), "headers": {"Retry-After": "0"},
                                               "after": draw.randrange(4)}))
    flips = any(match.startswith("PUT") for _, match, _ in faults)  # of which a sample would find one only by chance
    settings = {
        "stop_after_steps": {"outage": 60, "last": 0}.get(kind, draw.randint(6, 12)),
        "hub_keep": 1 if aim == "prune" else draw.randint(1, 2), "hub_prune_local": draw.random() < 0.5,
        "hub_verify": "full" if flips or draw.random() < 0.2 else "sample", "hub_exit_minutes": 3}
    return {"kind": kind, "aim": aim, "ranks": 1 if kind in ("term", "freeze", "closed", "takeover") else ranks,
            "request": draw.randint(1, REQUESTS.get(aim, 3)), "delay": draw.choice((0, round(draw.uniform(0, 0.1), 3))),
            "faults": [] if kind in ("freeze", "takeover", "closed", "last") else faults, "settings": settings,
            "squash": aim == "squash" or draw.random() < 0.7,
            "takeover": plan_of(draw, "takeover", 1, aims) if kind == "freeze" else None}


def horizon_of(plans):
    """Steps that the sessions before the last cannot reach together."""
    every = [*plans, *(plan["takeover"] for plan in plans if plan["takeover"])]
    return 5 + sum(plan["settings"]["stop_after_steps"] for plan in every)


# -- one session

def start(bench, plan):
    """Starts a session on an empty disk; its processes are known by a mark in their environment."""
    number, mark = len(bench.rows) + len(bench.open), os.urandom(8).hex()
    place = bench.root / f"session-{number}"
    place.mkdir()
    words = SETTINGS | plan["settings"] | {
        "out_dir": place / "run", "data_dir": bench.data, "max_steps": bench.horizon, "hub_repo": REPO,
        "hub_max_gb": 9e-9 * bench.size if plan["squash"] else 80.0}
    environment = {name: value for name, value in bench.hub.environment(place / "home").items()
                   if "RANK" not in name and name != "WORLD_SIZE"}
    front = [sys.executable] if plan["ranks"] == 1 else [chaos.TORCHRUN, "--standalone", "--nproc_per_node=2"]
    watch = bench.watch = new_watch(f"HUB_CHAOS_SESSION={mark}", plan)
    with bench.hub.lock:
        bench.hub.seed = f"{bench.seed} {number}"
        for kind, match, more in plan["faults"]:
            bench.hub.add_fault(kind, match, **more)
    session = SimpleNamespace(number=number, mark=watch.mark, watch=watch, place=place, out_dir=place / "run",
                              log=bench.root / f"session-{number}.log", began=time.time(), phase="", met=False,
                              pointed=bench.reader.pointed)
    with open(session.log, "wb") as file:
        session.process = subprocess.Popen(
            [*front, "train.py", *(f"--{name}={value}" for name, value in words.items())], cwd=ROOT, stdout=file,
            stderr=file, stdin=subprocess.DEVNULL, preexec_fn=chaos.end_with_parent,
            env=environment | {"HUB_CHAOS_SESSION": mark, "OMP_NUM_THREADS": "1", "TMPDIR": str(place)})
    bench.open.append(session)
    return session


def own(session, name):
    """The rows of a jsonl file that a session has written itself: those before came from the Hub."""
    return [row for row in chaos.rows(session.out_dir, name) if row["time"] >= session.began]


def reach(plan, session):
    """Waits for the instant that was drawn, and whether it came; what is to be done at once has been done then."""
    if plan["aim"] not in ("train", "save"):
        return chaos.wait(session, session.watch.is_there.is_set, AIM_S, 0.005) or session.watch.is_there.wait(1)
    steps = lambda: len(own(session, "metrics")) >= plan["request"]
    return chaos.wait(session, steps, AIM_S, 0.005) and (
        plan["aim"] == "train" or chaos.wait(session, lambda: chaos.phase(session.out_dir), AIM_S))


def kill(bench, plan, session):
    """Kills everything of a session at the instant that was drawn, or when that has not come for long."""
    session.met, watch = reach(plan, session), session.watch
    if not watch.reached:
        time.sleep(plan["delay"] if plan["aim"] != "save" else 0)
        watch.reached = send(session.mark, signal.SIGKILL) if session.process.poll() is None else 0
    phase = plan["aim"] if session.met and plan["aim"] == "train" else watch.stage
    chaos.end(session.mark)
    if plan["aim"] == "save" and session.met:
        phase = "save" if chaos.phase(session.out_dir) else "train"  # what lies on disk decides
    session.phase = phase if watch.reached else ""


def let_end(bench, plan, session):
    """Waits for a session to end by itself."""
    if not chaos.gone(session, SESSION_S):
        bench.wrong.append(f"session {session.number} hangs: {chaos.tail(session.log)}")


def terminate(bench, plan, session):
    """Asks for a stop once some steps are done."""
    if chaos.wait(session, lambda: len(own(session, "metrics")) >= plan["request"], AIM_S, 0.005):
        session.process.send_signal(signal.SIGTERM)
    let_end(bench, plan, session)


def outage(bench, plan, session):
    """Lets the Hub answer nothing but 503 for a while, in which steps must go on."""
    steps = lambda: len(own(session, "metrics"))
    if chaos.wait(session, steps, AIM_S, 0.005):
        with bench.hub.lock:
            fault, before = bench.hub.add_fault("status", times=0), steps()
        time.sleep(OUTAGE_S)
        bench.outage_steps.append(steps() - before)
        with bench.hub.lock:
            bench.hub.faults.remove(fault)
            bench.faults["status"] += fault["fired"]
        if bench.outage_steps[-1] < 5 or not fault["fired"]:
            bench.wrong.append(f"session {session.number}: {bench.outage_steps[-1]} steps and {fault['fired']} refused "
                               f"requests in an outage of {OUTAGE_S} s")
    let_end(bench, plan, session)


def closed(bench, plan, session):
    """Starts a session while the Hub answers nothing but 503."""
    with bench.hub.lock:
        bench.hub.add_fault("status", times=0)
    let_end(bench, plan, session)


def freeze(bench, plan, session):
    """Holds a session still while another, on another disk, takes the run over; it must notice and change nothing."""
    session.met = reach(plan, session)
    if not session.watch.reached:
        send(session.mark, signal.SIGSTOP)
    run_session(bench, plan["takeover"])
    before, bench.watch = bare(bench.reader.pointed), None
    if not before or before == bare(session.pointed):
        bench.wrong.append(f"session {session.number} was not taken over")
    send(session.mark, signal.SIGCONT)
    let_end(bench, plan, session)
    if bare(bench.reader.pointed) != before:
        bench.wrong.append(f"session {session.number} moved the pointer after it was taken over")
    bench.wrong += [f"session {session.number}, taken over: {folder.name} is not whole"
                    for folder in chaos.folders(session.out_dir) if not is_whole(folder)]


KINDS = {"kill": kill, "stop": let_end, "term": terminate, "outage": outage, "closed": closed, "freeze": freeze,
         "takeover": let_end, "last": let_end}


def run_session(bench, plan):
    """A session from its start to the end of its last process, and what it has shown; the session."""
    session = start(bench, plan)
    try:
        KINDS[plan["kind"]](bench, plan, session)
    finally:
        chaos.end(session.mark)
    session.process.wait(chaos.GONE_S)
    settle(bench, plan, session)
    return session


def has(session, event):
    return any(row["event"] == event for row in own(session, "events"))


def ending_of(session):
    """How a session has ended, in a word; 'broke' where it is none of the ways in which one may."""
    status, code = chaos.read_json(session.out_dir / "status.json"), session.process.returncode
    how = status.get("state"), status.get("reason"), code == 0
    if session.phase:
        return "killed"
    if code and not has(session, "start") and "train.py: " in session.log.read_text(errors="replace"):
        return "refused"
    return {("stopped", "steps", True): "stopped", ("stopped", "signal", True): "signal",
            ("finished", "horizon", True): "finished", ("failed", "hub", False): "overtaken"}.get(how, "broke")


def settle(bench, plan, session):
    """Takes up what a session has shown, and clears its faults and its disk."""
    with bench.hub.lock:  # what was under way at a kill may still land
        bench.hub.lock.wait_for(lambda: all(record["status"] is not None for record in bench.hub.log[-99:]), 10)
        fired = Counter()
        for fault in bench.hub.faults:
            fired[fault["kind"]] += fault["fired"]
        bench.hub.faults.clear()
        heal(bench.hub, bench.flipped)
    ended, events, steps = ending_of(session), own(session, "events"), own(session, "metrics")
    bench.wrong += [f"session {session.number} ({plan['kind']} {plan['aim']}): {problem}: {chaos.tail(session.log)}"
                    for problem in problems_of(plan, session, ended, events, fired)]
    bench.faults += fired
    bench.endings[ended] += 1
    bench.phases.update([session.phase] * (ended == "killed"))
    bench.off_target += plan["kind"] == "kill" and not session.met
    redone = max(0, bench.reached - steps[0]["step"] + 1) if steps else 0
    if ended != "overtaken":
        bench.redone += redone
        bench.reached = max((row["step"] for row in steps), default=bench.reached)
    bench.unsafe += ended == "stopped" and bench.reached != (bench.reader.pointed or {}).get("step")
    measure(bench, events)
    span = f"{steps[0]['step']}-{steps[-1]['step']}" if steps else "-"
    bench.open.remove(session)
    bench.rows.append(f"{session.number:7}  {plan['kind']:8}  {plan['aim'] or '-':8}  {plan['ranks']:5}  {ended:9}  "
                      f"{session.phase or '-':8}  {span:9}  {redone:6}  "
                      f"{(bench.reader.pointed or {}).get('step', '-'):7}  {fired.total():6}  "
                      f"{time.time() - session.began:7.1f}")
    print(bench.rows[-1], flush=True)
    if plan["kind"] != "last" and not bench.wrong:
        shutil.rmtree(session.place)


def problems_of(plan, session, ended, events, fired):
    """What a session did that it must not do, in words."""
    if ended not in ENDINGS[plan["kind"]] and not (ended == "overtaken" and fired["stale_resolve"]):
        yield f"it ended as '{ended}' ({session.process.returncode})"
    if session.pointed and has(session, "init"):
        yield f"it began anew, though {session.pointed['checkpoint']} was pointed at"
    for row in events if session.pointed and not fired["stale_resolve"] else ():
        if row["event"] == "resume" and row["checkpoint"] != session.pointed["checkpoint"]:
            yield f"it went on from {row['checkpoint']}, and {session.pointed['checkpoint']} was pointed at"
    if ended == "refused" and not fired.total():
        yield "it was refused without a fault"


def heal(hub, flipped):
    """Turns back the bits that faults have flipped in the store, as the Hub's own copies would; what was sent stays."""
    for sha256 in flipped:
        data = bytearray((hub.blobs / sha256).read_bytes())
        if hashlib.sha256(data).hexdigest() != sha256:
            data[len(data) // 2] ^= 1
            hub_server.keep(hub.blobs / sha256, data)
    flipped.clear()


def measure(bench, events):
    """Collects the seconds of cycles and cold starts from a session's own events."""
    cycle = {}
    for row in (row for row in events if not row.get("skipped")):
        if row["event"] in ("push", "verify", "pointer"):
            cycle = (cycle if row["event"] != "push" else {}) | {row["event"]: row}
        if row["event"] == "pointer" and len(cycle) == 3:
            bench.cycles.append((cycle["push"]["bytes"], [cycle[name]["seconds"] for name in cycle]))
        if row["event"] == "pull":
            bench.cold.append({name: row[name] for name in ("look_s", "download_s", "verify_s")})
        if row["event"] == "start":
            bench.stages.append(row["stages"])
        bench.events[row["event"]] += row["event"] != "prune" or "remote" in row  # on a disk they are pruned too
        bench.errors.update([row["kind"]] if row["event"] == "hub_error" else [])


# -- the whole

def make_data(place):
    """Two small documents by the real command; a pass over them takes some steps."""
    draw = random.Random("hub chaos data")
    for name, words in (("a.txt", 20_000), ("b.txt", 2_000)):
        (place / name).write_text("".join(draw.choices(["the ", "run ", "goes ", "on ", "and on\n"], k=words)))
    subprocess.run([sys.executable, "data/prepare.py", "build", place / "a.txt", place / "b.txt", "--out",
                    place / "data", "--workers", "1"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return place / "data"


def end_state(out_dir, step):
    """All that must not depend on what a run went through, at its horizon."""
    found = [row["val_loss"] for row in chaos.rows(out_dir, "events") if row["event"] == "eval" and row["step"] == step]
    return chaos.state_of(out_dir, step) | {"evaluation at the horizon": found[-1:]}


def compare(bench, out_dir, references):
    """What differs between the last disk, the runs that nothing disturbed, and the Hub, in words."""
    wanted, other = (end_state(reference, bench.horizon) for reference in references)
    told = [f"1 and 2 undisturbed ranks: {key}" for key in chaos.differences(other, wanted)]
    found = end_state(out_dir, bench.horizon)
    bench.hash = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:12]
    told += chaos.differences(found, wanted)
    folder = f"checkpoints/step_{bench.horizon:08d}"
    there = {path: sha256 for path, (sha256, _) in bench.hub.files(REPO).items() if path.startswith(f"{folder}/")}
    here = {f"{folder}/{name}": sha256 for name, sha256 in chaos.contents(out_dir / folder).items()}
    told += [f"the Hub's {path}" for path in chaos.differences(there, here)]
    if (bench.reader.pointed or {}).get("step") != bench.horizon:
        told.append("the Hub's pointer is not at the horizon")
    return told


def work(bench, sessions):
    """The references, all sessions and the comparison."""
    plans = plans_of(bench.seed, sessions)
    bench.plan = hashlib.sha256(json.dumps(plans).encode()).hexdigest()[:12]
    bench.horizon, bench.data = horizon_of(plans), make_data(bench.root)
    settings = SETTINGS | {"data_dir": bench.data, "checkpoint_interval": 0, "milestone_interval": 0}
    references = [chaos.undisturbed(bench.root / f"reference-{ranks}", settings, ranks, bench.horizon)
                  for ranks in (0, 2)]
    bench.size = sum(path.stat().st_size for path in chaos.folders(references[0])[-1].iterdir())
    print(f"{bench.horizon} steps, checkpoints of {bench.size / 1e6:.1f} MB\n\nsession  kind      aim       ranks  "
          "ended      phase     steps      redone  pointer  faults  seconds", flush=True)

    def after_request(hub, record):
        look(bench.reader, hub, record)
        if record["method"] == "PUT" and "corrupt" in record["fault"]:
            bench.flipped.add(record["path"].rpartition("/")[2])
        if bench.watch:
            follow(bench.watch, record)
    with hub_server.Hub(bench.root / "hub", after_request=after_request) as bench.hub:
        for plan in plans:
            session = run_session(bench, plan)
        bench.unequal = compare(bench, session.out_dir, references) if not bench.wrong else ["not compared"]
        bench.wrong += [f"the stand-in: {error!r}" for error in bench.hub.errors]
        bench.requests = len(bench.hub.log)


def median(values):
    return round(statistics.median(values), 3) if values else None


def medians(rows):
    """{name: median} of rows of numbers by name."""
    return {name: median([row[name] for row in rows if name in row])
            for name in dict.fromkeys(name for row in rows for name in row)}


def summary_of(bench, began):
    """The JSON line."""
    import torch  # for its version
    whole = sum(sum(seconds) for _, seconds in bench.cycles)
    return {
        "bench": "hub_chaos", "seed": bench.seed, "plan": bench.plan, "sessions": len(bench.rows),
        "steps": bench.horizon, "endings": dict(bench.endings), "kills": bench.endings["killed"],
        "kills_by_phase": dict(bench.phases), "kills_off_target": bench.off_target, "faults": bench.faults.total(),
        "faults_by_kind": dict(bench.faults), "steps_redone": bench.redone, "outage_steps": bench.outage_steps,
        "stops_before_the_push": bench.unsafe, "events": {name: bench.events[name] for name in (
            "push", "verify", "pointer", "prune", "squash", "pull")}, "errors": dict(bench.errors),
        "requests": bench.requests, "looks": bench.reader.looks, "pointer_moves": bench.reader.moves,
        "checkpoint_mb": round(bench.size / 1e6, 1), "cycles": len(bench.cycles),
        "cycle_s": median([sum(seconds) for _, seconds in bench.cycles]),
        "cycle_parts_s": [median(part) for part in zip(*(seconds for _, seconds in bench.cycles))],
        "s_per_gb": round(whole / max(1e-9, sum(size for size, _ in bench.cycles) / 1e9), 1),
        "cold_start_s": medians(bench.stages) | medians(bench.cold),
        "hash": bench.hash, "unequal": len(bench.unequal), "pointer_violations": len(bench.reader.violations),
        "wrong": len(bench.wrong), "python": platform.python_version(), "torch": torch.__version__,
        "cores": len(os.sched_getaffinity(0)), "wall_s": round(time.monotonic() - began, 1)}


def show(found):
    """The tables after that of the sessions."""
    for title in ("endings", "kills_by_phase", "faults_by_kind", "events", "errors", "cold_start_s"):
        print(f"\n{title:16}" + "".join(f"  {name} {count}" for name, count in sorted(found[title].items())), end="")
    print(f"\nsteps done again  {found['steps_redone']}\na cycle           {found['cycle_s']} s, the median of "
          f"{found['cycles']}; upload and commit, verification, pointer: {found['cycle_parts_s']} s; "
          f"{found['s_per_gb']} s/GB of checkpoints of {found['checkpoint_mb']} MB"
          f"\npointer           looked at after {found['looks']} of {found['requests']} requests, moved "
          f"{found['pointer_moves']} times, {found['pointer_violations']} violations\n")


def too_little(found):
    """What a run must have had to show anything."""
    sessions = found["sessions"]
    if found["kills"] < max(1, sessions // 4) or found["faults"] < sessions // 2:
        yield f"only {found['kills']} kills and {found['faults']} faults in {sessions} sessions"
    if sessions >= 20 and (len(found["kills_by_phase"]) < 5 or len(found["faults_by_kind"]) < 8):
        yield "too few phases or kinds of faults were met"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=24, help="at least 3; those that take over come on top")
    parser.add_argument("--seed", type=int, default=1)
    asked, began = parser.parse_args(), time.monotonic()
    print(f"python bench/hub_chaos.py --sessions {asked.sessions} --seed {asked.seed}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by way of every `finally`
    root = Path(tempfile.mkdtemp(prefix="hub-chaos-"))
    os.environ["CHAOS_BENCH"] = str(root)
    bench = SimpleNamespace(
        root=root, seed=asked.seed, plan="", horizon=0, size=0, hash="", reader=new_reader(), watch=None, flipped=set(),
        rows=[], open=[], wrong=[], unequal=["not compared"], faults=Counter(), endings=Counter(), phases=Counter(),
        events=Counter(), errors=Counter(), cycles=[], cold=[], stages=[], outage_steps=[], reached=0, redone=0,
        unsafe=0, off_target=0, requests=0)
    try:
        work(bench, max(3, asked.sessions))
    except BaseException as error:  # whatever ended the bench, a signal too, must not pass for an equal run
        bench.wrong.append(f"the bench broke: {type(error).__name__}: {error}")
    finally:
        chaos.end(f"CHAOS_BENCH={root}")
    found = summary_of(bench, began)
    show(found)
    reasons = [*bench.wrong, *bench.reader.violations[:20], *bench.unequal[:20], *too_little(found)]
    for reason in reasons:
        print(f"FAILED: {reason}")
    if reasons:
        print(f"kept: {root}")
    else:
        shutil.rmtree(root)
    print(json.dumps(found))
    return int(bool(reasons))


if __name__ == "__main__":
    sys.exit(main())
