"""wandb is a copy that can neither lose a row nor stop, slow or change a run; the machine, energy and prices."""

import contextlib
import gzip
import http.server
import importlib.util
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections import Counter
from pathlib import Path

import pytest

import checkpoint
import hub
import preflight
import report
import train
import watch
from checkpoint import append_line
from driver import (LIMIT_S, ROOT, assert_same, before_step, events, family, is_there, kill, pointed, reached, rows,
                    session, signal_self, start_command, status, wait_for, words_of)

KEY = "c0ffee00" * 5
SECRETS = ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_DIR", "NETRC")


@pytest.fixture(autouse=True)
def no_wandb_of_the_host(monkeypatch, tmp_path):
    """No key, mode or server but those that a test sets."""
    for name in SECRETS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))


# -- what a line becomes, and which lines are there

def line(event, step=5, **fields):
    return {"time": 9.0, "session": 2, "step": step, "event": event, **fields}


def test_evaluations_probes_and_samples_become_numbers_and_a_table(tmp_path):
    table = lambda columns, content: (columns, content)
    made = watch.of_event(line("eval", val_loss=2.5, bits_per_byte=3.5, perplexity=12.0, complete=True), tmp_path,
                          table)
    assert (made["val_loss"], made["bits_per_byte"], made["perplexity"], made["step"]) == (2.5, 3.5, 12.0, 5)
    cut = watch.of_event(line("eval", val_loss=None, complete=False), tmp_path, table)
    assert "val_loss" not in cut and cut["event/eval"] == 1
    probe = watch.of_event(line("probe", mean=0.5, probes=[{"prompt": "2 + 2 = 4.", "value": 0.25}]), tmp_path, table)
    assert probe["probe/mean"] == 0.5 and probe["probe/1 2 + 2 = 4 "] == 0.25
    assert "samples" not in watch.of_event(line("sample"), tmp_path, table), "its file is gone"
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples/step_00000005.md").write_text("## hello")
    assert watch.of_event(line("sample"), tmp_path, table)["samples"] == (["step", "text"], [[5, "## hello"]])


def test_any_other_event_is_a_mark_with_its_fields_and_without_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    made = watch.of_event(line("push", commit="abc", cause=f"key {KEY}", settings={"n": 1}), tmp_path, None)
    assert made["event"] == "push" and made["event/push"] == 1
    assert json.loads(made["event/text"]) == {"commit": "abc", "cause": "key ***"}
    assert watch.text_of(ValueError(f"bad\n{KEY}")) == "ValueError: bad ***" == hub.masked("ValueError: bad ***")


@pytest.mark.parametrize("place, there", [
    ((1, 7, 100.0), True), ((1, 8, 101.0), True), ((1, 9, 102.0), False), ((2, 3, 90.0), False), ((3, 1, 50.0), False),
    ((1, 5, 300.0), False)])
def test_a_run_on_a_server_has_the_lines_up_to_its_last_one(place, there):
    """Line 8 of session 1 is the last; session 3 is the present one; the last row is of another session 1."""
    assert watch.is_there(("mirror/metrics", *place), 3, None, {"mirror/metrics": [1, 8, 101.0]}) is there
    assert not watch.is_there(("mirror/events", *place), 3, None, {"mirror/metrics": [1, 8, 101.0]})


def test_a_run_on_this_disk_has_the_lines_that_its_files_hold():
    kept = {("mirror/events", 1, 7, 100.0)}
    assert watch.is_there(("mirror/events", 1, 7, 100.0), 2, kept, {})
    assert not watch.is_there(("mirror/events", 1, 7, 100.5), 2, kept, {})
    assert not watch.is_there(("mirror/metrics", 1, 7, 100.0), 2, kept, {})


def test_a_loss_that_was_taken_back_is_not_the_best():
    run = types.SimpleNamespace(summary={})
    take = watch.best_of(run)
    for row in (line("eval", 4, val_loss=3.0, complete=True), line("eval", 8, val_loss=1.0, complete=True),
                line("resume", 4), line("eval", 8, val_loss=2.0, complete=True),
                line("eval", 12, val_loss=2.5, complete=True), line("eval", 16, val_loss=None, complete=False)):
        take(row)
    assert run.summary == {"best_val_loss": 2.0, "last_val_loss": 2.5}


def test_a_tail_waits_for_the_end_of_a_line_and_passes_over_what_is_none(tmp_path):
    tail, path = watch.Tail(tmp_path / "metrics.jsonl"), tmp_path / "metrics.jsonl"
    assert tail.read() == []
    path.write_text('{"session": 1, "step": 1, "time": 2}\nnot a row\n[1]\n{"session": 1, "st')
    assert tail.read() == [(1, {"session": 1, "step": 1, "time": 2})] and tail.read() == []
    with open(path, "a") as file:
        file.write('ep": 2, "time": 3}\n')
    assert tail.read() == [(4, {"session": 1, "step": 2, "time": 3})]


def test_a_key_is_found_in_the_environment_or_in_netrc(tmp_path, monkeypatch):
    assert not watch.has_key()
    (tmp_path / "no-netrc").write_text(f"machine api.wandb.ai login user password {KEY}\n")
    assert watch.has_key()
    monkeypatch.setenv("WANDB_BASE_URL", "https://other.example:8080")
    assert not watch.has_key()
    for host in ("other.example", "other.example:8080"):
        (tmp_path / "no-netrc").write_text(f"machine {host} login user password {KEY}\n")
        assert watch.has_key()
    (tmp_path / "no-netrc").write_text("")
    assert not watch.has_key()
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    assert watch.has_key()


@pytest.mark.parametrize("name, kind, wanted", [("", None, watch.LIMITS["finish_s"]), ("SIGTERM", None, 3),
                                                ("", ValueError, 3)])
def test_wandb_has_seconds_after_a_signal_or_an_error(tmp_path, name, kind, wanted):
    interrupt, seconds = train.Interrupt(), []
    if name:
        interrupt.name, interrupt.at = name, time.monotonic()
    journal = checkpoint.Journal(str(tmp_path), False, train.Run())
    watcher = watch.Watcher(journal, "cpu", (0, 0), print, interrupt, math.inf)
    watcher.mirror = types.SimpleNamespace(close=lambda left: seconds.append(left()))
    watcher.close(kind)
    assert seconds[0] == pytest.approx(wanted, abs=2.5) and seconds[0] <= wanted


# -- several sessions, read back by wandb's own reader

def inspected(path):
    """The records of a .wandb file, by the program behind `wandb leet inspect --json`, which reads a torn one too."""
    program = Path(importlib.util.find_spec("wandb").origin).parent / "bin/wandb-core"
    done = subprocess.run([program, "leet", "inspect", "--no-observability", "--json", "--run-file", path, path.parent],
                          capture_output=True, text=True, timeout=LIMIT_S)
    return [json.loads(text) for text in done.stdout.splitlines()]


def kill_in_the_middle(process, out_dir):
    """Kills a run of which some rows have been handed over and some have not, after a checkpoint; its last step."""
    wait_for(lambda: (out_dir / "latest.json").exists() and reached(out_dir) > 100, process)
    process.send_signal(signal.SIGSTOP)  # so that wandb gets on in good time, whatever the cores do
    wait_for(lambda: any(path.stat().st_size > 32768 for path in out_dir.glob("wandb/offline-run-*/*.wandb")))
    [child] = [pid for pid in family(process.pid) if b"watch.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(child, signal.SIGSTOP)
    more = reached(out_dir) + 40
    process.send_signal(signal.SIGCONT)
    wait_for(lambda: reached(out_dir) > more, process)
    kill(process)
    return reached(out_dir)


@pytest.fixture(scope="module")
def several(tmp_path_factory, data):
    """(out_dir, records by .wandb file): a session that is killed, one that does its steps again and stops, a third."""
    folder = tmp_path_factory.mktemp("several")
    words = words_of(folder / "out", data, schedule="constant", max_steps=10**6, trace_windows=False,
                     checkpoint_interval=60, eval_interval=30, sample_interval=60, wandb_log=True,
                     wandb_run_name="several")
    with pytest.MonkeyPatch.context() as patch:
        for name in SECRETS:
            patch.delenv(name, raising=False)
        patch.setenv("NETRC", str(folder / "none"))
        process = start_command(folder / "log", *words)
        at = kill_in_the_middle(process, folder / "out")
        for more in (f"--stop_after_steps={at - 100}", "--stop_after_steps=30"):
            assert session([*words, more])[0] == 0
    files = sorted((folder / "out").glob("wandb/offline-run-*/*.wandb"))
    return folder / "out", {path: inspected(path) for path in files}


def history(several):
    return [row["history"]["item"] for found in several[1].values() for row in found if row["type"] == "history"]


def test_every_row_of_every_session_is_in_one_wandb_run_once_steps_done_again_too(several):
    out_dir, written = several[0], rows(several[0] / "metrics.jsonl")
    place = lambda number, row: (row["session"], number, row["time"])
    wanted = {place(number, row): row for number, row in enumerate(written, start=1)}
    found = [item for item in history(several) if "mirror/metrics" in item]
    nonces = {row["session"]: row["nonce"] for row in events(out_dir, "start")}
    assert list(nonces.values()) == [nonce for nonce, _ in pointed(out_dir)[1]["lineage"]]
    assert Counter(tuple(item["mirror/metrics"]) for item in found) == Counter(list(wanted)), "each once, none is lost"
    for item in found:
        row = wanted[tuple(item["mirror/metrics"])]
        assert {name: item[name] for name in row} == pytest.approx(row)
        assert item["nonce"] == nonces[row["session"]]
    steps = Counter(row["step"] for row in written)
    assert {row["session"] for row in written} == {1, 2, 3} and 2 in steps.values(), "some steps were done again"
    assert len(several[1]) == 3 and {path.stem for path in several[1]} == {f"run-{pointed(out_dir)[1]['run']}"}


def test_the_killed_session_had_delivered_some_and_the_next_one_the_rest(several):
    first, second, _ = several[1].values()
    sessions = [Counter(row["history"]["item"]["mirror/metrics"][0] for row in found if row["type"] == "history"
                        and "mirror/metrics" in row["history"]["item"]) for found in (first, second)]
    assert set(sessions[0]) == {1} and sessions[0][1] > 20 and sessions[1][1] > 20
    assert sessions[0][1] + sessions[1][1] == sum(row["session"] == 1 for row in rows(several[0] / "metrics.jsonl"))


def test_every_event_evaluation_and_sample_is_there(several):
    out_dir, written = several[0], rows(several[0] / "events.jsonl")
    found = {tuple(item["mirror/events"]): item for item in history(several) if "mirror/events" in item}
    assert len(found) == len([item for item in history(several) if "mirror/events" in item]) == len(written)
    for number, row in enumerate(written, start=1):
        item = found[row["session"], number, row["time"]]
        assert (item["event"], item["step"], item["session"]) == (row["event"], row["step"], row["session"])
        assert item["nonce"] == pointed(out_dir)[1]["lineage"][row["session"] - 1][0]
        if row["event"] == "eval":
            assert item["val_loss"] == pytest.approx(row["val_loss"])
        if row["event"] == "probe":
            each = {name: value for name, value in item.items() if name.startswith("probe/")}
            assert each.pop("probe/mean") == pytest.approx(row["mean"])
            assert each and sorted(each.values()) == pytest.approx(sorted(
                probe["value"] for probe in row["probes"]))
        if row["event"] == "sample":
            tables = list(out_dir.glob(f"wandb/*/files/{item['samples.path']}"))
            assert json.loads(tables[0].read_text())["data"][0][0] == row["step"]
    assert {"start", "init", "resume", "save", "eval", "sample", "probe", "stop"} <= {row["event"] for row in written}


def test_probes_are_one_chart_of_all_steps_up_to_then(several):
    out_dir, written = several[0], [row for row in rows(several[0] / "events.jsonl") if row["event"] == "probe"]
    charts = [item for item in history(several) if item.get("event") == "probe"]
    assert len(charts) == len(written) > 2 and all("probes_table.path" in item for item in charts)
    tables = [json.loads(next(iter(out_dir.glob(f"wandb/*/files/{item['probes_table.path']}"))).read_text())
              for item in charts]
    assert [len(table["data"]) for table in tables] == [
        len(written[0]["probes"]) * count for count in range(1, len(written) + 1)]


def test_a_finished_run_sends_what_it_has_not_sent(tmp_path, data):
    words = words_of(tmp_path / "out", data)
    assert session(words)[0] == 0 and not (tmp_path / "out/wandb").exists()
    wanted = [number for number, _ in enumerate(rows(tmp_path / "out/metrics.jsonl"), start=1)]
    status_before = status(tmp_path / "out")
    result, said = session([*words, "--wandb_log=True"])
    assert result == 0 and status(tmp_path / "out") == status_before and "nothing is left to do" in said
    [path] = (tmp_path / "out").glob("wandb/offline-run-*/*.wandb")
    found = [row["history"]["item"] for row in inspected(path) if row["type"] == "history"]
    assert [item["mirror/metrics"][1] for item in found if "mirror/metrics" in item] == wanted


def test_config_and_summary_are_those_of_the_run(several):
    out_dir, last = several[0], list(several[1].values())[-1]
    [run] = [row["run"] for row in last if row["type"] == "run"][:1]
    config = {item["key"]: item.get("value", item.get("value_json")) for item in run["config"]["update"]} if isinstance(
        run["config"].get("update"), list) else run["config"].get("update", run["config"])
    wanted = json.loads((out_dir / "config.json").read_text())
    assert {name: config.get(name) for name in wanted} == wanted
    assert run["run_id"] == pointed(out_dir)[1]["wandb_run_id"] == pointed(out_dir)[1]["run"]
    summary = {}
    for row in last:
        if row["type"] == "summary":
            summary |= row["summary"].get("update", {})
    losses = {row["step"]: row["val_loss"] for row in events(out_dir, "eval")}
    assert summary["best_val_loss"] == pytest.approx(min(losses.values()))
    assert summary["last_val_loss"] == pytest.approx(losses[max(losses)])


def test_our_reader_finds_what_wandbs_own_finds(several):
    out_dir = several[0]
    wanted = {(name, *item[name]) for item in history(several) for name in ("mirror/metrics", "mirror/events")
              if name in item}
    assert watch.kept_back(str(out_dir), pointed(out_dir)[1]["run"]) == wanted
    assert not watch.kept_back(str(out_dir), "another")


def test_what_wandb_keeps_is_in_no_checkpoint_and_in_no_push(several):
    out_dir, (folder, _) = several[0], pointed(several[0])
    place, _ = hub.payload_of(out_dir, folder)
    sent = [path.relative_to(place) for path in place.rglob("*")]
    assert sent and not [path for path in sent if "wandb" in str(path)]
    assert not [path for path in folder.rglob("*") if "wandb" in path.name]
    assert "\nwandb/\n" in (ROOT / ".gitignore").read_text()


# -- whatever wandb does, the run is the same

class Known(watch.Mirror):
    """A Mirror that a test can find."""
    last = None

    def __init__(self, *arguments):
        super().__init__(*arguments)
        Known.last = self


def core():
    """The pid of wandb's own process, once there is one."""
    child = Known.last.child.pid
    with contextlib.suppress(OSError):
        pids = map(int, Path(f"/proc/{child}/task/{child}/children").read_text().split())
        return next((pid for pid in pids if b"wandb-core" in Path(f"/proc/{pid}/cmdline").read_bytes()), None)


def kill_child():
    wait_for(lambda: is_there(Known.last.child.pid))
    os.kill(Known.last.child.pid, signal.SIGKILL)


def kill_core():
    wait_for(lambda: list(Path(Known.out_dir).glob("wandb/offline-run-*/*.wandb")))
    os.kill(wait_for(core), signal.SIGKILL)


@pytest.fixture(scope="module")
def straight(tmp_path_factory, data):
    out_dir = tmp_path_factory.mktemp("straight") / "out"
    assert session(words_of(out_dir, data))[0] == 0
    return out_dir


def watched(out_dir, data, limits=None, stop_after_steps=0, **patches):
    """A session with wandb in this process: (exit status, text, its wandb_error events, seconds)."""
    Known.out_dir, began = out_dir, time.monotonic()
    limits = watch.LIMITS | {"poll_s": 0.05} | (limits or {})
    words = words_of(out_dir, data, wandb_log=True, stop_after_steps=stop_after_steps)
    code, text = session(words, **{"watch.Mirror": Known, "watch.LIMITS": limits}, **patches)
    assert not is_there(Known.last.child.pid) and not Known.last.thread.is_alive()
    return code, text, events(out_dir, "wandb_error"), time.monotonic() - began


def assert_one_error_and_the_same_run(found, out_dir, straight, cause, seconds=LIMIT_S):
    code, text, errors, took_s = found
    assert code == 0 and [cause in error["cause"] for error in errors] == [True], (text, errors)
    assert text.count("training goes on, and every row is in the run's files") == 1 and took_s < seconds
    assert status(out_dir) == ("finished", "horizon", 12)
    assert_same(out_dir, straight)


@pytest.mark.parametrize("action, cause", [(kill_child, "its process ended by -9"), (kill_core, "Error")])
def test_a_killed_process_of_wandb_costs_one_event(tmp_path, data, straight, action, cause):
    found = watched(tmp_path / "out", data, train_step=before_step(6, action))
    assert_one_error_and_the_same_run(found, tmp_path / "out", straight, cause)


def test_a_missing_package_costs_one_event(tmp_path, data, straight, monkeypatch):
    (tmp_path / "wandb.py").write_text("raise ModuleNotFoundError(\"No module named 'wandb'\")\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = watched(tmp_path / "out", data)
    assert_one_error_and_the_same_run(found, tmp_path / "out", straight, "No module named 'wandb'", 20)


class Server(http.server.BaseHTTPRequestHandler):
    """As much of a wandb server as its client asks for to keep the rows of one run."""
    protocol_version = "HTTP/1.1"
    refuses, rows, summary, log_message = False, [], "{}", lambda *_: None

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.refuses:
            return self.answer(401, {"errors": [{"message": "invalid api key"}]})
        body = json.loads(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body or b"{}")
        if self.path.endswith("/file_stream"):
            files = {name: part.get("content", []) for name, part in body.get("files", {}).items()}
            Server.rows = Server.rows + [json.loads(text) for text in files.get("wandb-history.jsonl", [])]
            Server.summary = (files.get("wandb-summary.json") or [Server.summary])[-1]
        self.answer(200, {"data": self.data(body.get("operationName") or body.get("query", ""), body)})

    def do_PUT(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.answer(200, {})

    def do_GET(self):
        self.answer(401 if self.refuses else 200, {})

    def data(self, asked, body):
        project = {"id": "p", "name": "longhaul", "entity": {"id": "e", "name": "me"}}
        run = {"id": "r", "name": body.get("variables", {}).get("name"), "displayName": "run", "description": "",
               "config": "{}", "sweepName": None, "tags": [], "project": project, "projectId": "p",
               "summaryMetrics": self.summary, "eventsLineCount": 0,
               "historyLineCount": len(self.rows), "logLineCount": 0, "eventsTail": "[]", "stopped": False,
               "historyTail": json.dumps([json.dumps(row) for row in self.rows[-1:]]), "wandbConfig": '{"t": 1}'}
        if "RunResumeStatus" in asked:
            return {"model": project | {"bucket": run if self.rows else None}}
        if "UpsertBucket" in asked:
            return {"upsertBucket": {"bucket": run, "inserted": not self.rows}}
        if "CreateRunFiles" in asked:
            files = [{"name": name, "uploadUrl": f"http://{self.headers['Host']}/put"}
                     for name in body["variables"]["files"]]
            return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}
        return {}

    def answer(self, code, content):
        content = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def server(monkeypatch):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as started:
        started.daemon_threads, started.handle_error = True, lambda *_: None
        thread = threading.Thread(target=started.serve_forever)
        thread.start()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{started.server_port}")
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        monkeypatch.setattr(Server, "rows", [])
        yield Server
        started.shutdown()
        thread.join()


@pytest.fixture
def silent(monkeypatch):
    """A server that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        yield


def kept_rows(out_dir):
    return sorted(place[2] for place in watch.kept_back(str(out_dir), pointed(out_dir)[1]["run"])
                  if place[0] == "mirror/metrics")


def assert_no_secret(out_dir, text):
    assert KEY not in text
    holds = [path for path in Path(out_dir).rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert not holds


def test_a_refused_key_costs_one_event_and_the_rows_are_kept_on_this_disk(tmp_path, data, straight, server,
                                                                          monkeypatch):
    monkeypatch.setattr(server, "refuses", True)
    found = watched(tmp_path / "out", data)
    assert_one_error_and_the_same_run(found, tmp_path / "out", straight, "rows are kept on this disk: CommError")
    assert kept_rows(tmp_path / "out") == list(range(1, 13))
    assert_no_secret(tmp_path / "out", found[1])


def test_sessions_on_a_server_are_one_run_and_bring_what_it_lacks(tmp_path, data, server):
    """The second of three sessions goes without wandb; the third hands its rows over too."""
    out_dir = tmp_path / "out"
    found = watched(out_dir, data, stop_after_steps=5)
    assert found[0] == 0 and not found[2] and f"/me/longhaul/runs/{pointed(out_dir)[1]['run']}" in found[1]
    assert session(words_of(out_dir, data, stop_after_steps=4))[0] == 0
    assert watched(out_dir, data)[0] == 0 and not events(out_dir, "wandb_error")
    for name in ("metrics", "events"):
        wanted = [[row["session"], number, row["time"]]
                  for number, row in enumerate(rows(out_dir / f"{name}.jsonl"), start=1)]
        assert [row[f"mirror/{name}"] for row in server.rows if f"mirror/{name}" in row] == wanted
    assert {row["session"] for row in server.rows} == {1, 2, 3} and reached(out_dir) == 12
    assert_no_secret(out_dir, found[1])


def test_a_server_that_never_answers_costs_one_event_and_a_bounded_wait(tmp_path, data, straight, silent):
    found = watched(tmp_path / "out", data, {"finish_s": 2.0})
    assert_one_error_and_the_same_run(found, tmp_path / "out", straight, "the time for its end was over", 30)
    assert_no_secret(tmp_path / "out", found[1])


def test_what_one_session_could_not_deliver_the_next_one_does(tmp_path, data):
    out_dir = tmp_path / "out"
    at_once = {"watch.AFTER_SIGNAL_S": 0.0, "train_step": before_step(5, lambda: signal_self("SIGTERM"))}
    assert watched(out_dir, data, **at_once)[0] == 0
    assert len(events(out_dir, "wandb_error")) == 1
    assert watched(out_dir, data)[0] == 0
    assert kept_rows(out_dir) == list(range(1, 13)) and reached(out_dir) == 12
    assert len(events(out_dir, "wandb_error")) == 1, "of the first session alone"


def test_after_a_signal_the_end_takes_seconds(tmp_path, data, silent):
    """Where wandb would wait for a server, the process is ended 3 s after the save."""
    at = []
    code, text, errors, _ = watched(tmp_path / "out", data, train_step=before_step(
        5, lambda: (at.append(time.monotonic()), signal_self("SIGTERM"))))
    took_s = time.monotonic() - at[0]
    assert code == 0 and status(tmp_path / "out") == ("stopped", "signal", 5) and took_s < 3 + 10
    assert len(errors) == 1 and "the time for its end was over" in errors[0]["cause"]


def test_nothing_is_started_where_it_is_not_wanted(tmp_path, data, monkeypatch):
    monkeypatch.setattr(watch, "Mirror", None)
    assert session(words_of(tmp_path / "out", data, stop_after_steps=1))[0] == 0
    assert session(words_of(tmp_path / "out", data, wandb_log=True, dry_run=True))[0] == 0
    assert not (tmp_path / "out/wandb").exists()


# -- the machine

class NVMLError(Exception):
    pass


def stand_in_nvml(watts=300.0):
    """A module like pynvml with two GPUs, of which one does not tell its temperature."""
    def temperature(gpu, sensor):
        if gpu == "GPU-1":
            raise NVMLError("not supported")
        return 65 + sensor
    told = types.SimpleNamespace
    return types.SimpleNamespace(
        NVMLError=NVMLError, nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=str,
        nvmlDeviceGetUtilizationRates=lambda gpu: told(gpu=97, memory=50),
        nvmlDeviceGetMemoryInfo=lambda gpu: told(used=10e9, total=80e9), nvmlDeviceGetTemperature=temperature,
        nvmlDeviceGetPowerUsage=lambda gpu: 1000 * watts, nvmlDeviceGetEnforcedPowerLimit=lambda gpu: 700_000,
        nvmlDeviceGetClockInfo=lambda gpu, kind: 1000 * kind,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda gpu: 0b100100)


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", stand_in_nvml())
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda number: types.SimpleNamespace(uuid=number))


def machine_of(out_dir, gpus, monkeypatch, every_s=0.02):
    """A Machine that has written some rows; what it said."""
    said = []
    monkeypatch.setattr(watch, "EVERY_S", every_s)
    machine = watch.Machine(out_dir, gpus, said.append)
    wait_for(lambda: len(rows(out_dir / "machine.jsonl")) >= 4 or not machine.thread.is_alive())
    machine.close()
    assert not machine.thread.is_alive()
    return machine, said


def test_the_machine_is_sampled_with_every_field_that_nvml_gives(tmp_path, two_gpus, monkeypatch):
    machine, said = machine_of(tmp_path, 2, monkeypatch)
    row = rows(tmp_path / "machine.jsonl")[-1]
    whole = {"busy_ratio": 0.97, "memory_gb": 10.0, "memory_total_gb": 80.0, "power_w": 300.0, "power_limit_w": 700.0,
             "temperature_c": 65, "clock_mhz": 1000, "memory_clock_mhz": 2000, "throttle": ["power cap", "thermal"]}
    assert row["gpus"] == [whole, {name: value for name, value in whole.items() if name != "temperature_c"}]
    assert {"time", "host", "load", "cpu_ratio", "ram_gb", "ram_total_gb", "disk_read_mb_s", "disk_written_mb_s",
            "net_in_mb_s", "net_out_mb_s"} <= row.keys() and row["host"] == socket.gethostname()
    assert 0 <= row["cpu_ratio"] <= 1 and 0 < row["ram_gb"] < row["ram_total_gb"] and not said


def test_energy_is_power_times_time_and_goes_on_from_the_last_line(tmp_path, two_gpus, monkeypatch):
    machine, _ = machine_of(tmp_path, 2, monkeypatch)
    written = rows(tmp_path / "machine.jsonl")
    lines = report.Machine(report.Lines(tmp_path / "machine.jsonl", ("time",)))
    lines.read()
    first, last = written[0], written[-1]
    joules = 600 * (last["time"] - first["time"])
    assert sum(lines.joules.values()) == pytest.approx(joules, rel=0.01), "as the report adds it up"
    assert 3.6e6 * (last["energy_kwh"] - first["energy_kwh"]) == pytest.approx(joules, abs=600 * 0.02 + 8)
    append_line(tmp_path / "machine.jsonl", {"time": last["time"], "energy_kwh": 5.0})
    assert watch.last_energy(tmp_path / "machine.jsonl") == 5.0
    append_line(tmp_path / "machine.jsonl", {"time": 9.0, "host": "a", "load": 1.0})
    assert watch.last_energy(tmp_path / "machine.jsonl") == 5.0, "a session that knew no power loses none"
    again, _ = machine_of(tmp_path, 2, monkeypatch)
    assert 5.0 <= again.energy_kwh < 5.01


def test_without_its_packages_the_standard_library_is_what_it_knows(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    machine, said = machine_of(tmp_path, 1, monkeypatch)
    assert set(rows(tmp_path / "machine.jsonl")[-1]) == {"time", "host", "load"} and machine.energy_kwh is None
    assert len(said) == 1 and "psutil" in said[0] and "nvidia-ml-py" in said[0]


def test_a_full_disk_costs_the_line(tmp_path, monkeypatch):
    calls = []

    def full(*arguments):
        calls.append(arguments)
        raise OSError(28, "No space left on device")
    monkeypatch.setattr("checkpoint.append_line", full)
    monkeypatch.setattr(watch, "EVERY_S", 0.01)
    machine = watch.Machine(tmp_path, 0, print)
    wait_for(lambda: len(calls) > 3)
    assert machine.thread.is_alive()
    machine.close()
    assert not (tmp_path / "machine.jsonl").exists()


def test_a_run_samples_its_machine_on_one_rank_of_a_host_and_ends_it(tmp_path, data, monkeypatch):
    monkeypatch.setattr(watch, "EVERY_S", 0.01)
    threads = threading.active_count()
    assert session(words_of(tmp_path / "out", data))[0] == 0
    assert rows(tmp_path / "out/machine.jsonl") and threading.active_count() == threads
    monkeypatch.setenv("LOCAL_RANK", "1")
    journal = types.SimpleNamespace(writes=False, out_dir=tmp_path)
    other = watch.Watcher(journal, "cpu", (0, 0), print, preflight.Interrupt(), float("inf"))
    assert other.machine is None and other.costs() == ""
    other.close()


# -- energy and prices

def test_hours_are_those_of_all_sessions_and_prices_make_them_money():
    told = [{"session": 1, "time": 100.0}, {"session": 1, "time": 3700.0}, {"session": 2, "time": 9000.0},
            {"session": 2, "time": 9000.0}]
    assert watch.seconds_of(told) == 3600 and watch.seconds_of([]) == 0
    assert watch.costs_text(3600, 0.72, 2.0, 0.5) == "0.720 kWh, 2.36 spent"
    assert watch.costs_text(3600, None, 2.0, 0.5) == "2.00 spent"
    assert watch.costs_text(3600, 0.72, 0, 0) == "" == watch.costs_text(3600, None, 0, 0.5)


def test_live_and_end_lines_tell_what_is_spent_over_all_sessions(tmp_path, data):
    words = words_of(tmp_path / "out", data, price_per_hour=3600.0)  # one a second
    assert session([*words, "--stop_after_steps=4"])[0] == 0
    earlier = watch.seconds_of(rows(tmp_path / "out/events.jsonl"))
    code, text = session(words)
    live = [found for found in text.splitlines() if found.startswith("step ")]
    spent = [float(found.partition(" spent")[0].split()[-1].replace(",", "")) for found in live]
    assert code == 0 and len(spent) == 8 and earlier - 0.01 <= spent[0] <= spent[-1] < earlier + LIMIT_S
    [end] = [found for found in text.splitlines() if found.startswith("costs ")]
    assert end.endswith("spent in all sessions")
    assert " spent" not in session([*words, "--price_per_hour=0", "--max_steps=12"])[1]


def test_the_live_line_has_the_running_mean_and_the_notes():
    row = {"step": 10, "loss": 3.0, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_s": 1000.0, "mfu": None}
    assert preflight.live_line(row, 100, 90, None, 3.25, "", "mem 41.2 GB, 98.1 free", "2.36 spent") == (
        "step     10/100  loss 3.0000 mean 3.2500  lr 1.00e-03  norm 1.000      1,000 tokens/s  "
        "mem 41.2 GB, 98.1 free  2.36 spent  1 min 30 s left")
    assert "mean" not in preflight.live_line(row, 100, 90, -1) and "safe none" in preflight.live_line(row, 100, 90, -1)
    assert preflight.memory_note(train.torch.device("cpu"), 1.0) == ""
