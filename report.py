"""The story of a run, from its folder's files alone: one self-contained page, or the run log as a table.

python report.py OUT_DIR                     # writes OUT_DIR/report.html; it opens by a double click, without a network
python report.py OUT_DIR --watch             # renews it until status.json says that the run has ended, or until Ctrl-C
python report.py OUT_DIR --log               # the run log in Markdown: session boundaries, checkpoints, incidents
python report.py OUT_A OUT_B --out FILE      # runs laid over one another; without --out, in OUT_A/report.html

A row counts where no later session began before its step; what a kill or a rollback took back is drawn dashed. Of
more rows than a line has room for, each bin shows its least and its greatest, so that no spike is lost. The page holds
plotly.js, and a policy that forbids it any load. Everything that a run has written stands in it as data in JSON and
reaches the screen as text, never as HTML. Nothing is imported here that needs torch.
"""

import argparse
import base64
import bisect
import functools
import gzip
import html
import itertools
import json
import math
import os
import re
import sys
import time
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from watch import GAP_S, seconds_of

POINTS, MACHINE_POINTS = 2000, 500  # about so many points a line are drawn
EVENTS, DETAIL, SAMPLE_BYTES = 3000, 400, 2_000_000  # most events, characters of an event's fields, bytes of samples
SILENT_S = 600  # a run that should be going on and has written nothing for so long is taken for dead
# How the page draws metrics.jsonl: title, fields, whether the axis is logarithmic. Any other field gets its own chart.
CHARTS = [("Learning rate", ["lr", "muon_lr"], False), ("Gradient norm", ["grad_norm"], True),
          ("Tokens per second", ["tokens_per_s"], False), ("MFU", ["mfu"], False), ("Memory (GB)", ["mem_gb"], False),
          ("Time of a step (ms)", ["step_ms", "data_ms"], True), ("Free disk (GB)", ["free_gb"], False)]
NOT_DRAWN = {"session", "step", "tokens", "windows", "epoch", "time", "loss", "rank", "format"}
INCIDENTS = {"save_failed", "damaged", "adopt", "pull", "rollback", "horizon", "append", "hub_error", "wandb_error",
             "skip", "overflow", "spike", "price", "signal", "squash", "stop", "finish"}
SECTION = re.compile(r'^## ("(?:[^"\\\n]|\\.)*")\n\n```\n', re.MULTILINE)  # of a file of samples


# -- reading

@dataclass
class Lines:
    """The rows of a jsonl file that grows: each look reads what is new."""

    path: Path
    needs: tuple  # numbers that a row must have
    offset: int = 0
    inode: int = 0
    unreadable: int = 0
    rows: list = field(default_factory=list)

    def read(self):
        """Every row so far. A torn last line waits for its end; a line that is no row is counted and passed over."""
        try:
            with open(self.path, "rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self.inode or found.st_size < self.offset:  # another file has taken its place
                    self.offset, self.inode, self.unreadable, self.rows = 0, found.st_ino, 0, []
                file.seek(self.offset)
                new = file.read()
        except FileNotFoundError:
            return []
        whole = new[:new.rfind(b"\n") + 1]
        self.offset += len(whole)
        rows = [self._row(line) for line in whole.split(b"\n")[:-1]]
        self.rows += [row for row in rows if row is not None]
        self.unreadable += rows.count(None)
        return self.rows

    def _row(self, line):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            return None
        whole = isinstance(row, dict) and all(is_number(row.get(name)) for name in self.needs)
        return row if whole and 0 <= row["time"] < 1e11 else None  # a time that no calendar has stops a browser


@dataclass
class Machine:
    """machine.jsonl as lines over time, folded as it grows: each look costs what is new, however long the run."""

    lines: Lines
    series: dict = field(default_factory=dict)  # {path of a number: [(time in s, value or None for a gap), ...]}
    joules: dict = field(default_factory=dict)  # {path of a power in watts: its energy}

    def read(self):
        inode, rows = self.lines.inode, self.lines.read()
        if inode != self.lines.inode:
            self.series, self.joules = {}, {}
        for row in rows:
            host = f" on {row['host']}" if isinstance(row.get("host"), str) else ""
            for path, value in numbers_in({key: part for key, part in row.items() if key not in NOT_DRAWN}):
                self._add(path + host, row["time"], value)
        self.lines.rows = []

    def _add(self, path, at, value):
        points = self.series.setdefault(path, [])
        took_s = at - points[-1][0] if points else 0
        name = path.partition(" on ")[0]  # without the host's, which may be any word
        if "power" in name and not re.search("limit|cap|max", name):
            self.joules[path] = self.joules.get(path, 0) + (took_s * value if 0 < took_s <= GAP_S else 0)
        if took_s > GAP_S:
            points.append((at - took_s / 2, None))
        points.append((at, value))
        if len(points) > 8 * POINTS:
            points[:] = thin(points)


def is_number(value):
    """Whether a value is a finite number; bools are none, and neither are integers too large for a float."""
    return type(value) in (int, float) and -1e300 < value < 1e300


def open_run(folder):
    """The jsonl files of a run folder. Raises: ValueError where the folder is no run."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; name a run's out_dir")
    if not any((folder / name).is_file() for name in ("metrics.jsonl", "events.jsonl")):
        raise ValueError(f"{folder} is no run: it has neither metrics.jsonl nor events.jsonl; name the out_dir of a "
                         "run, or bring one with: python hub.py pull owner/name --out DIR")
    metrics, events = (Lines(folder / name, ("session", "step", "time")) for name in ("metrics.jsonl", "events.jsonl"))
    return folder, metrics, events, Machine(Lines(folder / "machine.jsonl", ("time",)))


def read_object(path):
    """A JSON object, {} where there is none or it cannot be read."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read_run(folder, metrics, events, machine):
    """All that a run has written so far, put in order: a dict. `machine` is left to be read for a page."""
    status = read_object(folder / "status.json")  # first: what it says has ended has written its last line
    files = metrics, events, machine.lines
    metrics, events = metrics.read(), [row for row in events.read() if isinstance(row.get("event"), str)]
    started = [row["settings"] for row in events if isinstance(row.get("settings"), dict)]
    sessions = sessions_of(metrics, events)
    line, redone = line_of(metrics, sessions)
    sampled = {row["step"] for row in line_of(events, sessions, "sample")[0]}
    pieces = [[*line[:up_to(line, rows[0]["step"] - 1, of_step)][-1:], *rows] for rows in redone.values()]
    return {"folder": folder, "name": folder.resolve().name, "status": status, "metrics": metrics, "events": events,
            "machine": machine, "settings": read_object(folder / "config.json") or (started or [{}])[-1],
            "sessions": sessions, "line": line, "pieces": pieces, "samples": read_samples(folder, sampled),
            "evals": [row for row in line_of(events, sessions, "eval")[0] if row.get("split") == "val"
                      and row.get("complete") and is_number(row.get("val_loss"))],
            "probes": line_of(events, sessions, "probe")[0], "files": files}


def of_step(row):
    return row["step"]


def up_to(rows, last, key):
    """How many of some sorted rows have a key of at most `last`."""
    return bisect.bisect_right(rows, last, key=key)


def sessions_of(metrics, events):
    """{session: the step it began after}, in order."""
    began = {}
    for row in events:
        if row["event"] in ("start", "init", "resume"):
            began.setdefault(row["session"], row["step"])
    for row in metrics:
        began.setdefault(row["session"], row["step"] - 1)
    return dict(sorted(began.items()))


def line_of(rows, sessions, event=None):
    """(the rows that count, by step; {session: its rows that a later session took back}) of metrics or one event."""
    until, least = {}, math.inf
    for session, began in reversed(sessions.items()):
        until[session], least = least, min(least, began)
    counts, redone = {}, {}
    for row in rows:
        if row.get("event") != event:
            continue
        if row["step"] <= until.get(row["session"], math.inf):
            counts[row["step"]] = row
        else:
            redone.setdefault(row["session"], []).append(row)
    return [counts[step] for step in sorted(counts)], redone


def read_samples(folder, steps):
    """[[step, [[prompt, continuation], ...]], ...] of samples/step_*.md; of too many, some spread evenly. Of steps that
    were taken back none; `steps`: those that count, or nothing where no event tells."""
    paths = sorted((int(found[1]), path) for path in folder.glob("samples/step_*.md")
                   if (found := re.fullmatch(r"step_(\d{8,})", path.stem)) and (not steps or int(found[1]) in steps))
    size = sum(path.stat().st_size for _, path in paths)
    keep = max(2, len(paths) * SAMPLE_BYTES // max(size, 1))
    if len(paths) > keep:
        paths = [paths[round(i * (len(paths) - 1) / (keep - 1))] for i in range(keep)]
    return [[step, sections_of(path.read_text("utf-8", "replace"))] for step, path in paths]


def sections_of(text):
    """[[prompt, continuation], ...] of a file of samples; a fence or a heading inside a continuation belongs to it."""
    heads = [(found, prompt) for found in SECTION.finditer(text)
             if (prompt := prompt_of(found[1])) is not None and text.startswith(prompt, found.end())]
    ends = [found.start() for found, _ in heads[1:]] + [len(text)]
    return [[prompt, text[found.end() + len(prompt):end].rstrip("\n").removesuffix("```").removesuffix("\n")]
            for (found, prompt), end in zip(heads, ends)]


def prompt_of(heading):
    """The prompt in a heading, None where it is no JSON: a model writes much."""
    try:
        return json.loads(heading, strict=False)
    except ValueError:
        return None


# -- lines of charts

def thin(points, most=POINTS):
    """[(x, y), ...] for drawing: all, or of each bin the least, the greatest and the first that is no number."""
    if len(points) <= most:
        return points
    size, kept = math.ceil(2 * len(points) / most), {0, len(points) - 1}
    for first in range(0, len(points), size):
        part = range(first, min(first + size, len(points)))
        there = [i for i in part if points[i][1] is not None]
        kept |= {f(there, key=lambda i: points[i][1]) for f in (min, max) if there}
        kept |= set([i for i in part if points[i][1] is None][:1])
    return [points[i] for i in sorted(kept)]


def drawn(name, points, kind, color, most=POINTS):
    """A line of a chart, as the page reads it; kinds: line, faint, dots, dotted, dashed, marks."""
    kept = thin(points, most)
    return {"name": name, "kind": kind, "color": color, "x": [x for x, _ in kept], "y": [y for _, y in kept]}


def points_of(rows, name):
    """[(step, value), ...]; None, a gap in the line, for what was not finite."""
    return [(row["step"], row[name] if is_number(row.get(name)) else None) for row in rows]


def taken_back(run, name):
    """The points of every piece that was done again, each from the row it forked at, with gaps between them."""
    points = []
    for rows in run["pieces"]:
        points += [*points_of(rows, name), (rows[-1]["step"], None)]
    return points[:-1]


def smoothed(points):
    """[(step, mean)]: exponential over half a percent of the rows and at least 10, over a quarter of those before."""
    over, mean, found = max(10, len(points) // 200), 0.0, []
    for step, value in points:
        if value is not None:
            mean += (value - mean) / min(1 + len(found) // 4, over)
            found.append((step, mean))
    return found


def loss_lines(run, color, alone, prefix):
    """Train raw and smoothed, validation, the pieces that were done again, and a mark at every resume."""
    raw = points_of(run["line"], "loss")
    lines = [drawn(prefix + "train", raw, "faint", color),
             drawn(prefix + "train, smoothed", smoothed(raw), "line", color)]
    if run["evals"]:
        lines.append(drawn(prefix + "validation", points_of(run["evals"], "val_loss"), "dots", color + alone))
    if again := taken_back(run, "loss"):
        lines.append(drawn(prefix + "done again later", again, "dashed", 2 if alone else color))
    resumes = [row for row in run["events"] if row["event"] == "resume"] if raw else []
    if resumes:
        at = [raw[max(0, up_to(raw, row["step"], lambda point: point[0]) - 1)][1] for row in resumes]
        lines.append(drawn(prefix + "resume", [(row["step"], y) for row, y in zip(resumes, at)], "marks", color))
    return lines


def step_charts(runs, prefixes):
    """The charts over steps: loss, those of CHARTS, and one for every other number that a row holds."""
    alone = len(runs) == 1  # else a run's lines share one colour
    charts = [{"title": "Loss (nats per token)", "log": False,
               "lines": [line for i, run in enumerate(runs) for line in loss_lines(run, i, alone, prefixes[i])]}]
    known = {name for _, names, _ in CHARTS for name in names} | NOT_DRAWN
    more = {name for run in runs for row in (*run["metrics"][:1], *run["metrics"][-1:]) for name in row} - known
    for title, names, is_log in [*CHARTS, *((name, [name], False) for name in sorted(more))]:
        lines = []
        for (i, run), (n, name) in itertools.product(enumerate(runs), enumerate(names)):
            points, again = points_of(run["line"], name), taken_back(run, name)
            if any(y is not None for _, y in points):
                color, kind = (n, "line") if alone else (i, "dotted" if n else "line")
                lines.append(drawn(prefixes[i] + name, points, kind, color))
                lines += [drawn(f"{prefixes[i]}{name}, done again later", again, "dashed", color)] if again else []
        charts.append({"title": title, "log": is_log, "lines": lines})
    return [chart for chart in charts if any(line["y"] for line in chart["lines"])]


def probe_chart(runs, prefixes):
    """P(right) / (P(right) + P(wrong)): the mean, and each probe where the events hold a list of them."""
    lines = []
    for i, run in enumerate(runs):
        each = {}
        for row in run["probes"]:
            items = next((value for value in row.values() if isinstance(value, list)), [])
            for n, item in enumerate(items):
                fields = list(item.values()) if isinstance(item, dict) else [item]
                prompt = item.get("prompt", "") if isinstance(item, dict) else ""
                value = next((value for value in fields if is_number(value) and 0 <= value <= 1), None)
                each.setdefault(f"{n + 1} {prompt}"[:60], []).append((row["step"], value))
        if len(runs) == 1:
            lines += [drawn(label, points, "faint", 1) for label, points in each.items()]
        if run["probes"]:
            lines.append(drawn(prefixes[i] + "mean", points_of(run["probes"], "mean"), "dots", i))
    title = "P(right) / (P(right) + P(wrong)); 0.5 is no idea"
    return [{"title": title, "log": False, "lines": lines}] if lines else []


def numbers_in(value, path=""):
    """(dotted path, number) for every number in nested dicts and lists; of a list of reasons why a GPU is held back,
    how many there are."""
    if is_number(value):
        yield path, value
    elif path.endswith(".throttle"):
        yield f"{path} reasons", sum(reason != "idle" for reason in value)
    elif isinstance(value, (dict, list)):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from numbers_in(part, f"{path}.{key}".strip("."))


def machine_charts(runs, prefixes):
    """A chart for each number of machine.jsonl; those that differ only in a digit (of GPUs, disks) share one."""
    charts = {}
    for i, run in enumerate(runs):
        for path, points in run["machine"].series.items():
            lines = charts.setdefault(re.sub(r"\d+", "#", path.partition(" on ")[0]), [])
            points = [(round(1000 * x), y) for x, y in points]
            lines.append(drawn(prefixes[i] + path, points, "line", len(lines), MACHINE_POINTS))
    return [{"title": title, "log": False, "time": True, "lines": lines} for title, lines in charts.items()]


# -- numbers, events, the run log

def duration(seconds):
    """'2 d 03 h', '1 h 02 min', '3 min 20 s'."""
    for unit, least, small, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if seconds >= least:
            return f"{int(seconds // least)} {unit} {int(seconds % least // part):02d} {small}"
    return f"{seconds:.0f} s"


def utc(seconds):
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")


def step_of(run):
    """The step that the run stands at."""
    known = [run["status"].get("step"), *list(run["sessions"].values())[-1:], *map(of_step, run["line"][-1:])]
    return max(filter(is_number, known), default=0)


def pace_of(run):
    """(steps, seconds) between the first and the last row of the newest session with two, evaluations and saves
    included; None where there is none."""
    for session in reversed(run["sessions"]):
        rows = [row for row in run["line"] if row["session"] == session]
        if len(rows) > 1 and rows[-1]["time"] > rows[0]["time"]:
            return rows[-1]["step"] - rows[0]["step"], rows[-1]["time"] - rows[0]["time"]
    return None


def seconds_trained(run):
    return seconds_of((*run["events"], *run["metrics"]))


def state_of(run):
    """(state, reason) of a run; 'silent' where it should be running and has written nothing for long. Without a
    status.json, as on the Hub, by its events."""
    state, reason = run["status"].get("state"), run["status"].get("reason")
    ends = [row for row in run["events"] if row["event"] in ("start", "stop", "finish")]
    if not state and ends:
        state = {"start": "running", "stop": "stopped", "finish": "finished"}[ends[-1]["event"]]
        reason = ends[-1].get("reason")
    lines = [row["time"] for row in (*run["events"][-1:], *run["metrics"][-1:])]
    if state == "running" and lines and time.time() - max(lines) > SILENT_S:
        state, reason = "silent", f"its last line is {duration(time.time() - max(lines))} old; killed, perhaps"
    return state, reason


def numbers_of(run):
    """[(label, text), ...]: what a person asks first."""
    settings, status, step = run["settings"], run["status"], step_of(run)
    horizon, batch_tokens = settings.get("max_steps") or status.get("max_steps"), settings.get("batch_tokens")
    state = " ".join(filter(None, map(str, (part or "" for part in state_of(run)))))
    found = [("state", state or "no status.json"),
             ("step", f"{step:,}" + (f" of {horizon:,}" if is_number(horizon) else ""))]
    if is_number(batch_tokens):
        found.append(("tokens", f"{step * batch_tokens:,}"))
    raw = points_of(run["line"], "loss")
    smooth = dict(smoothed(raw))
    if raw:
        text = "not finite" if raw[-1][1] is None else f"{raw[-1][1]:.4f}"
        found += [("loss, smoothed", f"{list(smooth.values())[-1]:.4f}" if smooth else "-"), ("loss, raw", text)]
    if run["evals"]:
        last, best = run["evals"][-1], min(run["evals"], key=lambda row: row["val_loss"])
        found += [("validation", f"{last['val_loss']:.4f} at step {last['step']:,}"),
                  ("best validation", f"{best['val_loss']:.4f} at step {best['step']:,}")]
        before = [mean for at, mean in smooth.items() if at <= last["step"]]
        if before:
            found.append(("gap (validation - smoothed)", f"{last['val_loss'] - before[-1]:+.4f}"))
    return found + rates_of(run, step, horizon, batch_tokens) + costs_of(run)


def rates_of(run, step, horizon, batch_tokens):
    found, pace = [], pace_of(run)
    if run["line"] and is_number(rate := run["line"][-1].get("tokens_per_s")):
        found.append(("tokens/s", f"{rate:,.0f}"))
    if pace and is_number(batch_tokens):
        found.append(("tokens/s with evaluations and saves", f"{pace[0] * batch_tokens / pace[1]:,.0f}"))
    if pace and is_number(horizon) and step < horizon:
        found.append(("time left at that rate", duration(pace[1] / pace[0] * (horizon - step))))
    return [*found, ("sessions", f"{len(run['sessions'])} in {duration(seconds_trained(run))}")]


def costs_of(run):
    """Energy where machine.jsonl records power, and what it and the hours have cost by the prices in the settings."""
    joules, prices = run["machine"].joules, [run["settings"].get(name) for name in ("price_per_hour", "price_per_kwh")]
    by_hour, by_kwh = (price if is_number(price) else 0 for price in prices)
    energy = sum(joules.values()) / 3.6e6
    found = [("energy", f"{energy:.3f} kWh")] if joules else []
    if by_hour or by_kwh and joules:
        found.append(("cost", f"{by_hour * seconds_trained(run) / 3600 + by_kwh * energy:,.2f}"))
    return found


def details(row):
    """An event's own fields in one line; settings have a place of their own."""
    own = {key: value for key, value in row.items() if key not in ("time", "session", "step", "event", "settings")}
    text = ", ".join(f"{key} {value if isinstance(value, str) else json.dumps(value)}" for key, value in own.items())
    return text if len(text) <= DETAIL else f"{text[:DETAIL]} ..."


def end_note(run, session):
    """How a session ended that has no stop on record; '' while it runs or where status.json says the same."""
    state = run["status"].get("state")
    if session != max(run["sessions"], default=session):
        return "ended without a stop on record: killed, or failed"
    if state != "failed":
        return ""
    causes = [path.read_text("utf-8", "replace").strip().splitlines()[-1:] for path in
              sorted(run["folder"].glob("errors/rank_*.txt"))[:1]]
    return f"failed ({run['status'].get('reason', '')}): " + " ".join(itertools.chain(*causes))


def begin_note(rows):
    """How a session began, from its events."""
    found = {row["event"]: row for row in rows}
    start, resume, init = (found.get(name, {}) for name in ("start", "resume", "init"))
    source = f"resumes {resume.get('checkpoint')}" if resume else f"begins from {init.get('source', '?')}"
    ranks = f", {start['world_size']} rank(s)" if "world_size" in start else ""
    changed = resume.get("changed") or {}
    return f"session {rows[0]['session']} {source}{ranks}" + (f", changed {json.dumps(changed)}" if changed else "")


def log_rows(run):
    """[(event, note), ...] for the run log, in the order in which it happened."""
    found, rows_of = [], {session: [] for session in run["sessions"]}
    for row in sorted([*run["events"], *run["metrics"]], key=lambda row: row["time"]):
        rows_of.setdefault(row["session"], []).append(row)
    for session, rows in rows_of.items():
        begin = [row for row in rows if row.get("event") in ("start", "resume", "init")]
        if begin:
            found.append((begin[0], begin_note(begin)))
        told = [row for row in rows if is_told(row.get("event", ""))]
        for event, group in itertools.groupby(told, lambda row: row["event"]):
            group = list(group)
            found += [(row, f"{event} {details(row)}") for row in (group if event == "save" else group[:1])]
            if event != "save" and len(group) > 1:
                found[-1] = group[0], f"{found[-1][1]} (and {len(group) - 1:,} more, to step {group[-1]['step']:,})"
        ended = any(row.get("event") in ("stop", "finish") for row in rows)
        if rows and not ended and (note := end_note(run, session)):
            found.append((rows[-1], f"session {session} {note}"))
    return found


def is_told(event):
    """Whether an event has a row of its own in the run log: a checkpoint, or an incident."""
    return event == "save" or event in INCIDENTS or event.endswith(("_error", "_failed"))


def print_log(run):
    """Print the run log as a Markdown table; loss and disk are those of the last row before an entry."""
    place, batch_tokens = lambda row: (row["step"], row["session"]), run["settings"].get("batch_tokens")
    rows = sorted(run["metrics"], key=place)
    print("| time (UTC) | step | tokens | loss | free GB | notes |\n|---|---:|---:|---:|---:|---|")
    for event, note in log_rows(run):
        until = reversed(rows[:up_to(rows, place(event), place)])
        row = next((row for row in until if row["session"] <= event["session"]), {})
        tokens = f"{event['step'] * batch_tokens:,}" if is_number(batch_tokens) else "-"
        loss, free = (f"{row[name]:.{digits}f}" if is_number(row.get(name)) else "-"
                      for name, digits in (("loss", 4), ("free_gb", 1)))
        note = " ".join("".join(c if c.isprintable() else " " for c in note).split())
        note = note.replace("|", "\\|").replace("<", "&lt;")
        print(f"| {utc(event['time'])} | {event['step']:,} | {tokens} | {loss} | {free} | {note} |")


# -- the page

def for_page(run, name):
    """What the page says of one run beside its lines."""
    told = [row for row in run["events"] if row["event"] != "save" and is_told(row["event"])][-EVENTS // 2:]
    room = {id(row) for row in (*told, *run["events"][-(EVENTS - len(told)):])}
    notes = [f"{lines.unreadable} line(s) of {lines.path.name} could not be read and are left out"
             for lines in run["files"] if lines.unreadable]
    if len(room) < len(run["events"]):
        notes.append(f"{len(room):,} of {len(run['events']):,} events are listed: the newest, and older incidents")
    if len(run["line"]) > POINTS:
        notes.append(f"{len(run['line']):,} rows are drawn as the least and the greatest of about {POINTS // 2:,} bins")
    return {"name": name, "numbers": numbers_of(run), "samples": run["samples"], "notes": notes,
            "sessions": list(run["sessions"].items()), "step": step_of(run),
            "events": [[row["time"], row["session"], row["step"], row["event"], details(row)]
                       for row in run["events"] if id(row) in room],
            "settings": {key: value if isinstance(value, str) else json.dumps(value)
                         for key, value in run["settings"].items()}}


def page(runs, every_s=0):
    """The page of some runs, in one piece. Raises: ValueError where the plotting library is missing."""
    names = [run["name"] for run in runs]
    names = names if len(set(names)) == len(names) else [str(run["folder"]) for run in runs]
    prefixes = [f"{name}: " for name in names] if len(runs) > 1 else [""]
    data = {"written": utc(time.time()), "every_s": every_s, "charts": step_charts(runs, prefixes),
            "probes": probe_chart(runs, prefixes), "machine": machine_charts(runs, prefixes),
            "runs": [for_page(run, name) for run, name in zip(runs, names)]}
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))  # ASCII; and no "<" can end the script it stands in
    parts = {"TITLE": html.escape(" + ".join(names)), "LIBRARY": library(),
             "DATA": text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")}
    return re.sub("__(TITLE|DATA|LIBRARY)__", lambda found: parts[found[1]], PAGE)


@functools.cache
def library():
    """plotly.js, compressed: a third of its size. Raises: ValueError where it is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ValueError("the page is drawn by plotly, which is not installed: pip install -r requirements.txt "
                         "(--log needs nothing)") from error
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()


def write_page(path, text):
    """Replace the page in one instant: whoever opens it finds a whole one."""
    temporary = path.with_name(f".{path.name}.new")  # not .tmp-*: a session that starts clears those away
    try:
        temporary.write_text(text, "utf-8", "replace")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def renew(opened, path, watch, every_s):
    """Write the page, and with `watch` again and again until no run is under way, at a twentieth of a core at most."""
    while True:
        began = time.monotonic()
        runs = [read_run(*files) for files in opened]
        for run in runs:
            run["machine"].read()
        ended = not watch or all(state_of(run)[0] in ("stopped", "finished", "failed", "silent") for run in runs)
        write_page(path, page(runs, 0 if ended else every_s))
        if ended:
            return
        time.sleep(max(every_s, 20 * (time.monotonic() - began)))


def main(words=None):
    """Run one command; returns the exit status: 0, or 2 for an error that a person can mend."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir", nargs="+", help="run folders")
    parser.add_argument("--log", action="store_true", help="print the run log in Markdown, and write no page")
    parser.add_argument("--watch", action="store_true", help="renew the page until the run has ended")
    parser.add_argument("--every", type=float, default=15.0, metavar="S", help="seconds between renewals (15)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the page; else report.html in the first folder")
    asked = parser.parse_args(words)
    path = asked.out or Path(asked.out_dir[0], "report.html")
    try:
        if not asked.every > 0:
            raise ValueError(f"--every is {asked.every}; wanted seconds above 0")
        opened = [open_run(folder) for folder in asked.out_dir]
        if asked.log:
            for files in opened:
                print_log(read_run(*files))
            return 0
        renew(opened, path, asked.watch, asked.every)
    except (ValueError, OSError) as error:
        print(f"report.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
    return 0


PAGE = r"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline';
 style-src 'unsafe-inline'; img-src data: blob:">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>__TITLE__</title>
<style>
:root { color-scheme: light dark; --line: light-dark(#e1e0d9, #2c2c2a); --quiet: light-dark(#5f5e5a, #a09f98);
  --accent: light-dark(#2a78d6, #3987e5) }
:root[data-theme=light] { color-scheme: light } :root[data-theme=dark] { color-scheme: dark }
body { margin: 0 auto; padding: 1rem 1.5rem 4rem; max-width: 80rem; font: 15px/1.5 system-ui, sans-serif;
  background: light-dark(#fcfcfb, #1a1a19); color: light-dark(#0b0b0b, #fff) }
header { display: flex; flex-wrap: wrap; gap: .3rem 1rem; align-items: baseline }
header small { flex: 1 } small, dt, .quiet, th { color: var(--quiet); font-weight: normal }
h1 { font-size: 1.4rem; margin: 0 } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
h3 { font-size: 1rem; margin: 1rem 0 0 }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(10.5rem, 1fr)); gap: .6rem 1rem; margin: .6rem 0 }
dt { font-size: .8rem } dd { margin: 0; font-size: 1.1rem; font-variant-numeric: tabular-nums }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(26rem, 100%), 1fr)); gap: .5rem 1rem }
.chart { height: 15rem; min-width: 0 } .chart.wide { grid-column: 1 / -1; height: 24rem }
table { border-collapse: collapse; width: 100%; font-size: .85rem; font-variant-numeric: tabular-nums }
td, th { text-align: left; vertical-align: top; padding: .15rem .8rem .15rem 0; border-bottom: 1px solid var(--line) }
td { overflow-wrap: anywhere } #events td:not(:last-child) { white-space: nowrap }
tr.differs td { color: var(--accent) }
.scroll { max-height: 28rem; overflow: auto; border: 1px solid var(--line); border-radius: 4px; padding: 0 .6rem }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line); border-radius: 4px; padding: .6rem;
  margin: .3rem 0; font-size: .85rem; max-height: 16rem; overflow: auto } pre b { color: var(--accent) }
button, input { font: inherit; color: inherit } input[type=range] { width: min(40rem, 100%); vertical-align: middle }
button { background: none; border: 1px solid var(--line); border-radius: 1rem; padding: .1rem .7rem; margin: .1rem;
  cursor: pointer } button[aria-pressed=false] { opacity: .45; text-decoration: line-through }
#find { background: none; border: 1px solid var(--line); border-radius: 4px; padding: .15rem .5rem; width: 16rem }
</style></head><body>
<header><h1>__TITLE__</h1><small id="written"></small><label id="again" hidden><input type="checkbox" checked> reload
</label><button id="theme">light / dark</button></header>
<div id="numbers"></div><p id="trouble" role="alert" hidden></p>
<section><div class="charts" id="steps"></div></section>
<section id="probes" hidden><h2>Probes</h2><div class="charts"></div></section>
<section id="machine" hidden><h2>The machine, over time (UTC)</h2><small>Many samples are drawn as the least and the
 greatest of bins.</small><div class="charts"></div></section>
<section id="reel" hidden><h2>Samples</h2><label><input type="range" id="slider" min="0"> <output></output></label>
<div id="texts"></div></section>
<section id="events" hidden><h2>Events</h2><input id="find" type="search" placeholder="words in an event"
 aria-label="words in an event"> <span id="kinds"></span> <span class="quiet" id="count"></span>
<div class="scroll"><table><tbody></tbody></table></div></section>
<section id="settings" hidden><h2>Settings</h2><div class="scroll"><table><thead></thead><tbody></tbody></table></div>
</section>
<script type="application/json" id="data">__DATA__</script>
<script type="text/plain" id="library">__LIBRARY__</script>
<script>
"use strict";
const $ = id => document.getElementById(id), data = JSON.parse($("data").textContent), one = data.runs.length === 1;
const COLORS = {light: ["#2a78d6", "#eb6834", "#1baf7a", "#b27700", "#d0588c", "#008300", "#4a3aa7", "#e34948"],
                dark: ["#3987e5", "#d95926", "#199e70", "#c98500", "#d55181", "#3fa63f", "#9085e9", "#e66767"]};
const systemIsDark = matchMedia("(prefers-color-scheme: dark)");
let kept = {};  // what a reload keeps: theme, slider, words, kinds left out, the range of steps
try { kept = JSON.parse(sessionStorage.getItem(data.runs[0].name)) || {} } catch { }
function keep(more) {
  Object.assign(kept, more);
  try { sessionStorage.setItem(data.runs[0].name, JSON.stringify(kept)) } catch { }
}
function add(parent, tag, text = "", className = "") {  // all text of a run comes to the screen through here
  const node = document.createElement(tag);
  node.textContent = text;
  node.className = className;
  return parent.appendChild(node);
}

function showNumbers() {
  $("written").textContent = `written ${data.written} UTC`;
  for (const run of data.runs) {
    if (!one) add($("numbers"), "h3", run.name);
    const list = add($("numbers"), "dl");
    for (const [label, value] of run.numbers) {
      const pair = add(list, "div");
      add(pair, "dt", label), add(pair, "dd", value);
    }
    for (const note of run.notes) add($("numbers"), "small", note);
  }
}

function showReel() {
  const steps = [...new Set(data.runs.flatMap(run => run.samples.map(([step]) => step)))].sort((a, b) => a - b);
  if (!steps.length) return;
  const slider = $("slider"), places = $("texts");
  slider.max = steps.length - 1;
  slider.value = steps.includes(kept.slider) ? steps.indexOf(kept.slider) : steps.length - 1;
  slider.oninput = () => {
    const step = steps[slider.value];
    document.querySelector("#reel output").textContent = `step ${step.toLocaleString("en")}`;
    places.replaceChildren();
    for (const run of data.runs) {
      const found = run.samples.filter(([at]) => at <= step).at(-1);
      if (found && !one) add(places, "h3", `${run.name}, step ${found[0].toLocaleString("en")}`);
      for (const [prompt, text] of found ? found[1] : []) {
        const block = add(places, "pre");
        add(block, "b", prompt), add(block, "span", text);
      }
    }
  };
  slider.onchange = () => keep({slider: slider.value === slider.max ? undefined : steps[slider.value]});
  slider.oninput();
  $("reel").hidden = false;
}

function showEvents() {
  const all = data.runs.flatMap(run => run.events.map(event => [...event, run.name])).sort((a, b) => a[0] - b[0]);
  if (!all.length) return;
  const body = document.querySelector("#events tbody"), without = new Set(kept.without), counts = {};
  const rows = all.map(([time, session, step, kind, text, name]) => {
    const row = add(body, "tr"), when = new Date(1000 * time).toISOString().slice(0, 19).replace("T", " ");
    const cells = [when, ...(one ? [] : [name]), session, step.toLocaleString("en"), kind, text];
    for (const cell of cells) add(row, "td", cell);
    counts[kind] = (counts[kind] || 0) + 1;
    return [row, kind, row.textContent.toLowerCase()];
  });
  const filter = () => {
    const words = $("find").value.toLowerCase().split(/\s+/);
    let shown = 0;
    for (const [row, kind, text] of rows) {
      row.hidden = without.has(kind) || !words.every(word => text.includes(word));
      shown += !row.hidden;
    }
    $("count").textContent = `${shown} of ${rows.length}`;
    keep({find: $("find").value, without: [...without]});
  };
  for (const kind of Object.keys(counts).sort()) {
    const chip = add($("kinds"), "button", `${kind} ${counts[kind]}`);
    const press = () => chip.setAttribute("aria-pressed", !without.has(kind));
    chip.onclick = () => { without.delete(kind) || without.add(kind); press(); filter() };
    press();
  }
  $("find").value = kept.find || "";
  $("find").oninput = filter;
  $("events").hidden = false;
  filter();
}

function showSettings() {
  const names = [...new Set(data.runs.flatMap(run => Object.keys(run.settings)))];
  if (!names.length) return;
  const head = add(document.querySelector("#settings thead"), "tr");
  for (const title of one ? [] : ["", ...data.runs.map(run => run.name)]) add(head, "th", title);
  for (const name of names) {
    const values = data.runs.map(run => name in run.settings ? run.settings[name] : "-");
    const row = add(document.querySelector("#settings tbody"), "tr", "", new Set(values).size > 1 ? "differs" : "");
    for (const cell of [name, ...values]) add(row, "td", cell);
  }
  $("settings").hidden = false;
}

const isDark = () => (kept.theme || (systemIsDark.matches ? "dark" : "light")) === "dark";
const plain = text => text.replace(/&/g, "&amp;").replace(/</g, "&lt;");  // plotly reads some HTML in its labels
function trace(line, loss) {
  const colors = COLORS[isDark() ? "dark" : "light"], color = colors[line.color % colors.length];
  const marks = line.kind === "marks", dots = line.kind === "dots" || line.y.filter(y => y !== null).length === 1;
  const dash = {dashed: "dash", dotted: "dot"}[line.kind] || "solid";
  return {x: line.x, y: line.y, name: plain(line.name), type: "scatter", connectgaps: false,
          mode: marks ? "markers" : dots ? "lines+markers" : "lines",
          opacity: line.kind === "faint" ? .45 : 1, showlegend: loss || line.kind !== "dashed",
          line: {color, width: line.kind === "line" || line.kind === "dots" ? 2 : 1.3, dash},
          marker: {color, size: marks ? 9 : 5, symbol: marks ? "triangle-down-open" : "circle"}};
}
const traces = chart => chart.lines.map(line => trace(line, chart === data.charts[0]));
function sessionShapes(ink) {  // every resume is a line; every other session is shaded, where there is one run
  return data.runs.flatMap(run => run.sessions.flatMap(([session, began], i) => {
    const later = run.sessions.slice(i + 1).map(([, step]) => step), end = Math.min(run.step, ...later);
    const across = {xref: "x", yref: "paper", y0: 0, y1: 1, layer: "below"};
    const mark = {...across, type: "line", x0: began, x1: began, opacity: Math.min(.6, 6 / run.sessions.length),
                  line: {color: ink, width: 1, dash: "dot"}};
    const shade = {...across, type: "rect", x0: began, x1: end, fillcolor: ink, opacity: .07, line: {width: 0}};
    return [...(i ? [mark] : []), ...(one && i % 2 && end > began ? [shade] : [])];
  }));
}
function layout(chart) {
  const ink = isDark() ? "#ffffff" : "#0b0b0b", grid = isDark() ? "#2c2c2a" : "#e1e0d9";
  const axis = {gridcolor: grid, zeroline: false, automargin: true, exponentformat: "SI", minexponent: 5};
  const last = Math.max(1, ...data.runs.map(run => run.step));
  const range = chart.time ? null : kept.range || [-.01 * last, 1.01 * last];
  const named = chart.lines.filter(line => line.kind !== "dashed").length;
  return {title: {text: plain(chart.title), font: {size: 14}, x: 0, xanchor: "left", xref: "container"}, hovermode: "x",
          font: {color: ink, family: "system-ui, sans-serif"}, paper_bgcolor: "#0000", plot_bgcolor: "#0000",
          margin: {l: 50, r: 10, t: 34, b: 30}, showlegend: named > 1 && (named < 6 || chart === data.charts[0]),
          legend: {orientation: "h", y: 1, yanchor: "bottom", x: 1, xanchor: "right", bgcolor: "#0000"},
          xaxis: {...axis, type: chart.time ? "date" : "linear", ...(range ? {range} : {})},
          yaxis: {...axis, type: chart.log ? "log" : "linear"},
          shapes: chart.time ? [] : sessionShapes(ink)};
}
const drawnCharts = [];
async function draw(place, charts, isFirstWide) {
  for (const [i, chart] of charts.entries()) {
    const node = add(place, "div", "", isFirstWide && !i ? "chart wide" : "chart");
    await Plotly.newPlot(node, traces(chart), layout(chart), {displayModeBar: false, responsive: true});
    drawnCharts.push([node, chart]);
    if (!chart.time) node.on("plotly_relayout", change => follow(node, change));
  }
}
let following = false;
async function follow(node, change) {  // charts over steps share their range
  const range = change["xaxis.range[0]"] === undefined ? null : [change["xaxis.range[0]"], change["xaxis.range[1]"]];
  if (following || !(range || change["xaxis.autorange"])) return;
  following = true;
  keep({range});
  for (const [other, chart] of drawnCharts) {
    const change = range ? {"xaxis.range": [...range]} : {"xaxis.autorange": true};
    if (other !== node && !chart.time) await Plotly.relayout(other, change);
  }
  following = false;
}
async function showCharts() {
  const bytes = Uint8Array.from(atob($("library").textContent), c => c.charCodeAt(0));
  const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  add(document.head, "script", await new Response(unpacked).text());
  await draw($("steps"), data.charts, true);
  for (const name of ["probes", "machine"]) {
    $(name).hidden = !data[name].length;
    await draw(document.querySelector(`#${name} .charts`), data[name], false);
  }
  document.body.dataset.drawn = drawnCharts.length;
}
function setTheme() {
  if (kept.theme) document.documentElement.dataset.theme = kept.theme;
  for (const [node, chart] of drawnCharts) Plotly.react(node, traces(chart), layout(chart));
}
$("theme").onclick = () => { keep({theme: isDark() ? "light" : "dark"}); setTheme() };
systemIsDark.onchange = setTheme;
$("again").hidden = !data.every_s;
if (data.every_s) setInterval(() => $("again").firstElementChild.checked && location.reload(), 1000 * data.every_s);
setTheme(), showNumbers(), showReel(), showEvents(), showSettings();
showCharts().catch(error => {
  $("trouble").textContent = `The charts cannot be drawn by this browser: ${error}. The rest of the page holds.`;
  $("trouble").hidden = false;
  console.error(error);
});
</script></body></html>
"""


if __name__ == "__main__":
    sys.exit(main())
