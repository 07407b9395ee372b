"""The page and the run log tell what the run folder holds: every number, nothing that is not there, and no more."""

import base64
import builtins
import functools
import gzip
import json
import re
import time
from pathlib import Path

import browser
import driver
import pytest
import report
from driver import by_step, rows, session, words_of

HOSTILE = '</script><img src=x onerror="document.title=\'taken\'">&lt;b&gt;'
FIELDS = ("loss", "lr", "grad_norm", "tokens_per_s", "step_ms", "data_ms", "mem_gb", "free_gb")


def call(*words):
    return report.main([str(word) for word in words])


def page_of(*folders, **more):
    """The text of the page that the command writes."""
    assert call(*folders, *(f"--{name}={value}" for name, value in more.items())) == 0
    return Path(more.get("out", Path(folders[0], "report.html"))).read_text("utf-8")


def embedded(text):
    """The data that stand in a page."""
    return json.loads(re.search('<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


def lines_of(data):
    """{title of a chart: {name: line}}."""
    return {chart["title"]: {line["name"]: line for line in chart["lines"]}
            for chart in data["charts"] + data["probes"] + data["machine"]}


def numbers(data, run=0):
    return dict(data["runs"][run]["numbers"])


def row(step, session=1, time=None, **fields):
    return {"session": session, "step": step, "time": 1.8e9 + step if time is None else time, "loss": 5 - step / 100,
            "tokens_per_s": 100.0, **fields}


def event(name, step, session=1, **fields):
    return {"time": 1.8e9 + step, "session": session, "step": step, "event": name} | fields


def write(folder, torn="", **files):
    """A run folder of jsonl files and JSON objects."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        many = isinstance(content, list)
        lines = "".join(json.dumps(part) + "\n" for part in (content if many else [content]))
        (folder / (name + (".jsonl" if many else ".json"))).write_text(lines + torn * many)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory, data):
    """A run of three sessions: stopped at step 2, failed in step 8 after the save of step 4, finished."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "prompts.txt").write_text(f"the run \n{HOSTILE}\n")
    words = words_of(folder / "out", data, sample_interval=4, prompts_file=folder / "prompts.txt", eval_interval=4)
    assert session([*words, "--stop_after_steps=2"])[0] == 0
    assert session(words, train_step=driver.before_step(6, driver.boom), **driver.AT_ONCE)[0] == 1
    assert session(words)[0] == 0
    return folder / "out"


# -- the page of a real run

def test_every_number_on_the_page_is_the_one_of_metrics_jsonl(run):
    data, metrics = embedded(page_of(run)), run / "metrics.jsonl"
    assert [tuple(pair) for pair in data["runs"][0]["sessions"]] == [(1, 0), (2, 2), (3, 4)]
    charts = {name: line for lines in lines_of(data).values() for name, line in lines.items()}
    for name in FIELDS:
        line, again = ((charts["train"], charts["done again later"]) if name == "loss" else
                       (charts[name], charts[f"{name}, done again later"]))
        wanted = by_step(metrics, name)
        assert dict(zip(line["x"], line["y"])) == {step: value for step, [value] in wanted.items()}
        assert line["x"] == list(range(1, 13))
        taken_back = [(row["step"], row[name]) for row in rows(metrics) if row["session"] == 2 and row["step"] >= 4]
        assert list(zip(again["x"], again["y"])) == taken_back and len(taken_back) == 4 and again["kind"] == "dashed"
    assert "MFU" not in lines_of(data) and "muon_lr" not in charts  # this run has none


def test_the_page_shows_validation_resumes_samples_events_and_settings(run):
    data = embedded(page_of(run))
    loss, found = lines_of(data)["Loss (nats per token)"], data["runs"][0]
    evals = {row["step"]: row["val_loss"] for row in driver.events(run, "eval")}
    assert dict(zip(loss["validation"]["x"], loss["validation"]["y"])) == evals and len(evals) == 4
    assert loss["resume"]["x"] == [2, 4] and loss["resume"]["kind"] == "marks"
    assert [step for step, _ in found["samples"]] == [0, 4, 8, 12]
    for step, texts in found["samples"]:
        written = (run / f"samples/step_{step:08d}.md").read_text()
        assert [prompt for prompt, _ in texts] == ["the run ", HOSTILE]
        assert all(f"```\n{prompt}{text}\n```\n" in written for prompt, text in texts)
    [probes], told = data["probes"], driver.events(run, "probe")
    assert [row["step"] for row in told] == [0, 4, 4, 8, 12]  # session 3 began with those of step 4 again
    *each, mean = probes["lines"]
    for line, values in [(mean, [row["mean"] for row in told]),
                         *((line, [row["probes"][n]["value"] for row in told]) for n, line in enumerate(each))]:
        assert dict(zip(line["x"], line["y"])) == dict(zip((0, 4, 4, 8, 12), values)) and len(line["x"]) == 4, line
    assert len(each) == len((driver.ROOT / "data/probes.jsonl").read_text().splitlines())
    assert [row[:4] for row in found["events"]] == [
        [row["time"], row["session"], row["step"], row["event"]] for row in rows(run / "events.jsonl")]
    assert found["settings"]["n_layer"] == "2" and found["settings"]["schedule"] == "wsd"
    assert found["settings"].keys() == json.loads((run / "config.json").read_text()).keys()


def test_the_numbers_at_the_top(run):
    found, last = numbers(embedded(page_of(run))), rows(run / "metrics.jsonl")[-1]
    evals = [row["val_loss"] for row in driver.events(run, "eval")]
    assert found["state"] == "finished horizon" and found["step"] == "12 of 12" and found["tokens"] == f"{12 * 128:,}"
    assert found["loss, raw"] == f"{last['loss']:.4f}" and found["validation"] == f"{evals[-1]:.4f} at step 12"
    assert found["best validation"].startswith(f"{min(evals):.4f} at")
    gap = float(found["gap (validation - smoothed)"])
    assert gap == pytest.approx(evals[-1] - float(found["loss, smoothed"]), abs=2e-4)
    assert "time left at that rate" not in found and "energy" not in found and "cost" not in found


def test_nothing_comes_from_the_network_and_the_page_is_small(run):
    text = page_of(run)
    kept = re.search('id="library">(.*?)</script>', text, re.DOTALL)[1]
    assert gzip.decompress(base64.b64decode(kept)).startswith(b"/**\n* plotly.js v")
    text = text.replace(kept, "")
    assert not re.search(r"""\b(src|href|action)\s*=\s*["'](?!x\b)|@import|url\(|<link|fetch\(|XMLHttp|https?:""", text)
    assert "default-src 'none'" in text and len(text) < 200_000 and len(kept) < 2_500_000


def test_text_of_a_run_is_data_and_never_html(run):
    text = page_of(run)
    assert "<img" not in text and text.count("</script>") == 3
    assert HOSTILE in json.dumps(embedded(text)["runs"][0]["samples"][0][1][1][0]).replace('\\"', '"')


def test_hostile_words_in_every_place(tmp_path):
    bad = write(tmp_path / f"{HOSTILE.replace('/', '')}", metrics=[row(1, **{HOSTILE: 1.0})],
                events=[event(HOSTILE, 1, cause=HOSTILE)], config={HOSTILE: HOSTILE, "max_steps": 5},
                status={"state": HOSTILE, "reason": "__DATA__"}, machine=[{"time": 1.8e9, HOSTILE: 2}])
    text = page_of(bad)
    assert "<img" not in text and text.count("</script>") == 3
    assert embedded(text)["runs"][0]["settings"][HOSTILE] == HOSTILE


# -- the run log

def test_the_log_has_a_row_for_every_session_checkpoint_and_incident(run, capsys):
    assert call(run, "--log") == 0
    head, rule, *table = capsys.readouterr().out.splitlines()
    assert head == "| time (UTC) | step | tokens | loss | free GB | notes |" and re.fullmatch(r"[|:-]+", rule)
    cells = [line.strip("| ").split(" | ") for line in table]
    assert [(int(step), note) for _, step, _, _, _, note in cells if "save" not in note] == [
        (0, "session 1 begins from seed 1337, 1 rank(s)"), (2, "stop reason steps"),
        (2, 'session 2 resumes step_00000002, 1 rank(s), changed {"stop_after_steps": [2, 0]}'),
        (7, "session 2 ended without a stop on record: killed, or failed"),
        (4, "session 3 resumes step_00000004, 1 rank(s)"), (12, "finish reason horizon")]
    assert [int(step) for _, step, *_, note in cells if note.startswith("save checkpoint")] == [2, 4, 8, 12]
    assert all(re.fullmatch(r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d", time) for time, *_ in cells)
    assert [time for time, *_ in cells] == sorted(time for time, *_ in cells)
    loss = by_step(run / "metrics.jsonl", "loss", "free_gb")
    for _, step, tokens, found, free, _ in cells[1:]:
        if step != "7":
            assert tokens == f"{int(step) * 128:,}" and (found, free) == (
                f"{loss[int(step)][0]:.4f}", f"{loss[int(step)][1]:.1f}")


def test_the_log_joins_repeats_tells_a_failure_and_is_a_table_whatever_is_in_it(tmp_path, capsys):
    skips = [event("skip", step, cause="a|b\n\x1b<i>\ud800") for step in (3, 4, 5)]
    folder = write(tmp_path / "out", metrics=[row(1), row(2)], status={"state": "failed", "reason": "bad_steps"},
                   events=[event("init", 0, source="seed 1"), *skips, event("hub_error", 6, kind="gone")])
    (folder / "errors").mkdir()
    (folder / "errors/rank_0.txt").write_text("Traceback\nFailed: too many\n")
    assert call(folder, "--log") == 0
    notes = [line.split(" | ")[-1] for line in capsys.readouterr().out.splitlines()[2:]]
    assert notes == ["session 1 begins from seed 1 |", "skip cause a\\|b &lt;i> (and 2 more, to step 5) |",
                     "hub_error kind gone |", "session 1 failed (bad_steps): Failed: too many |"]


def test_the_log_of_a_run_that_never_began(tmp_path, capsys):
    """A start that fails after its checkpoint was set aside has only that on record."""
    folder = write(tmp_path / "out", events=[event("damaged", 0)], status={"state": "failed", "reason": "error"})
    assert call(folder, "--log") == 0
    notes = [line.split(" | ")[-1] for line in capsys.readouterr().out.splitlines()[2:]]
    assert notes == ["damaged |", "session 1 failed (error): |"] and page_of(folder)


def test_a_session_that_runs_or_stopped_before_its_last_push_has_not_ended_without_a_word(tmp_path, capsys):
    events = [event("init", 0), event("stop", 1), event("push", 1), event("resume", 1, 2)]
    folder = write(tmp_path / "out", metrics=[row(1)], events=events, status={"state": "running"})
    assert call(folder, "--log") == 0
    said = capsys.readouterr().out
    assert "session 2 resumes" in said and "ended" not in said and "push" not in said


@pytest.mark.parametrize("found, age_s, wanted", [
    ({"state": "running", "reason": ""}, 5, ("running", "")), ({"state": "finished", "reason": "horizon"}, 9e9, None),
    ({"state": "running", "reason": ""}, 3600, ("silent", "its last line is 1 h 00 min old; killed, perhaps"))])
def test_a_run_that_is_silent_for_long_does_not_count_as_running(found, age_s, wanted):
    run = {"status": found, "events": [{"event": "start", "time": 1.0}], "metrics": [{"time": time.time() - age_s}]}
    assert report.state_of(run) == (wanted or ("finished", "horizon"))


def test_without_a_status_the_events_tell_the_state():
    for last, wanted in (("start", ("silent", None)), ("finish", ("finished", "why")), ("stop", ("stopped", "why"))):
        events = [{"event": "start", "time": 1.0}, {"event": last, "time": 2.0, "reason": "why"},
                  {"event": "push", "time": 3.0}]
        found = report.state_of({"status": {}, "events": events, "metrics": []})
        assert found[0] == wanted[0] and (last == "start" or found[1] == "why")
    assert report.state_of({"status": {}, "events": [], "metrics": []}) == (None, None)


def test_reasons_that_hold_a_gpu_back_are_counted():
    assert dict(report.numbers_in({"gpus": [{"throttle": ["idle", "thermal", "power cap"], "power_w": 9.0}]})) == {
        "gpus.0.throttle reasons": 2, "gpus.0.power_w": 9.0}


# -- what is not there, torn or wrong

@pytest.mark.parametrize("files", [{"metrics": [row(1)]}, {"events": [event("init", 0)]}, {"metrics": [], "events": []},
                                   {"metrics": [row(1, loss=None)], "status": {"state": "running"}}])
def test_missing_files_are_missing_parts(tmp_path, files, capsys):
    folder = write(tmp_path / "out", **files)
    data = embedded(page_of(folder))
    assert not data["machine"] and not data["probes"] and not data["runs"][0]["samples"]
    assert call(folder, "--log") == 0


def test_a_torn_last_line_waits_and_a_broken_one_is_told(tmp_path):
    folder = write(tmp_path / "out", torn='{"session": 1, "st', metrics=[row(1), row(2)], events=[event("init", 0)])
    with open(folder / "events.jsonl", "a") as file:
        of_no_time = json.dumps(event("save", 1, time=1e300))
        file.write("\n".join(["", "[1]", '{"event": "save"}', "[" * 100_000, of_no_time, ""]))
    (folder / "config.json").write_text("{")
    data = embedded(page_of(folder))
    assert lines_of(data)["Loss (nats per token)"]["train"]["x"] == [1, 2]
    assert data["runs"][0]["notes"] == ["5 line(s) of events.jsonl could not be read and are left out"]


@pytest.mark.parametrize("words", [["page"], ["--log"]])
def test_a_folder_that_is_no_run_is_an_error(tmp_path, capsys, words):
    for place, said in ((tmp_path, "no run: it has neither"), (tmp_path / "none", "is not a folder")):
        assert call(place, *[word for word in words if word != "page"]) == 2
        assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_without_plotly_the_log_still_works(tmp_path, capsys, monkeypatch):
    folder, usual = write(tmp_path / "out", metrics=[row(1)]), builtins.__import__

    def without(name, *rest):
        if name.startswith("plotly"):
            raise ImportError(name)
        return usual(name, *rest)

    monkeypatch.setattr(report, "library", report.library.__wrapped__)
    monkeypatch.setattr(builtins, "__import__", without)
    assert call(folder) == 2 and "pip install -r requirements.txt" in capsys.readouterr().err
    assert call(folder, "--log") == 0 and not (folder / "report.html").exists()


# -- rules of the lines

def test_what_a_later_session_took_back_does_not_count_though_it_got_further(tmp_path):
    metrics = [*map(row, range(1, 10)), row(5, 2, loss=1.0), row(6, 2, loss=None), row(3, 3, loss=2.0)]
    folder = write(tmp_path / "out", metrics=metrics)
    loss = lines_of(embedded(page_of(folder)))["Loss (nats per token)"]
    assert list(zip(loss["train"]["x"], loss["train"]["y"])) == [(1, 4.99), (2, 4.98), (3, 2.0)]
    assert list(zip(loss["done again later"]["x"], loss["done again later"]["y"])) == [
        (2, 4.98), *((step, 5 - step / 100) for step in range(3, 10)), (9, None), (3, 2.0), (5, 1.0), (6, None)]


def test_many_rows_are_thinned_and_no_extreme_is_lost(tmp_path):
    metrics = [row(step, loss=4 + (step % 7) / 10) for step in range(1, 100_001)]
    metrics[54_321]["loss"], metrics[70_000]["loss"], metrics[80_000]["loss"] = 99.0, 0.5, None
    folder = write(tmp_path / "out", metrics=metrics, events=[event("init", 0)])
    text = page_of(folder)
    data = embedded(text)
    line = lines_of(data)["Loss (nats per token)"]["train"]
    assert len(line["x"]) < 2100 and len(text) < 2_500_000
    points = dict(zip(line["x"], line["y"]))
    assert points.items() <= {row["step"]: row["loss"] for row in metrics}.items()
    assert points[54_322] == 99.0 and points[70_001] == 0.5 and points[80_001] is None and {1, 100_000} <= points.keys()
    assert "100,000 rows are drawn as the least and the greatest of about 1,000 bins" in data["runs"][0]["notes"]


def test_the_smoothed_loss_starts_at_the_raw_one_and_follows():
    found = report.smoothed([(step, 3.0 if step < 50 else 2.0) for step in range(100)] + [(100, None)])
    assert found[0] == (0, 3.0) and found[49][1] == 3.0 and 2 < found[52][1] < 3
    assert found[-1] == (99, pytest.approx(2.0, abs=0.01)) and report.smoothed([]) == []


def test_sections_with_fences_and_headings_inside():
    text = '## "a \\"q\\""\n\n```\na "q" and\n```\n\n## "b"\n\n```\nno\n```\n\n## "b"\n\n```\nb\n\n```\n'
    assert report.sections_of(text) == [['a "q"', ' and\n```\n\n## "b"\n\n```\nno'], ["b", "\n"]]
    assert report.sections_of("") == report.sections_of("something else") == []
    no_json = '## "a"\n\n```\na\n## "\\q"\n\n```\n\n```\n'
    assert report.sections_of(no_json) == [["a", '\n## "\\q"\n\n```\n']]


def test_samples_of_steps_that_were_taken_back_are_not_shown(tmp_path):
    events = [event("init", 0), event("sample", 0), event("sample", 4), event("sample", 8), event("resume", 4, 2)]
    for events, steps in ((events, [0, 4]), ([*events, event("sample", 6, 2)], [0, 4, 6]), (events[:1], [0, 4, 6, 8])):
        folder = write(tmp_path / f"run-{len(events)}", metrics=[row(1)], events=events)
        (folder / "samples").mkdir()
        for step in (0, 4, 6, 8):
            (folder / f"samples/step_{step:08d}.md").write_text('## "a"\n\n```\na b\n```\n')
        (folder / "samples/reel.md").write_text("## it is another thing\n")
        found = embedded(page_of(folder))["runs"][0]["samples"]
        assert found == [[step, [["a", " b"]]] for step in steps]


def test_time_left_energy_and_cost(tmp_path):
    metrics = [row(step, time=1.8e9 + 36 * step) for step in range(1, 102)]
    machine = [{"time": 1.8e9 + 10 * i, "host": "a", "gpus": [{"power_w": 360.0, "power_limit_w": 700}] * 2, "cpu": 0.5}
               for i in range(361)]
    folder = write(tmp_path / "out", metrics=metrics, events=[event("init", 0)], machine=machine,
                   config={"max_steps": 201, "batch_tokens": 1000, "price_per_hour": 2.0, "price_per_kwh": 0.5},
                   status={"state": "running", "reason": "", "step": 0, "max_steps": 201})
    data = embedded(page_of(folder))
    found = numbers(data)
    assert found["step"] == "101 of 201" and found["time left at that rate"] == "1 h 00 min"
    assert found["tokens/s with evaluations and saves"] == "28" and found["energy"] == "0.720 kWh"
    assert found["cost"] == f"{2 * 101 * 36 / 3600 + 0.36:.2f}"
    charts = lines_of(data)
    assert set(charts["gpus.#.power_w"]) == {"gpus.0.power_w on a", "gpus.1.power_w on a"} and "cpu" in charts
    line = charts["cpu"]["cpu on a"]
    assert line["x"] == [round(1000 * row["time"]) for row in machine] and set(line["y"]) == {0.5}


@pytest.mark.parametrize("host", ["powernode1", "max-pc", "capella"])
def test_energy_is_that_of_the_gpus_whatever_the_name_of_the_host(tmp_path, host):
    machine = [{"time": 1.8e9 + 10 * i, "host": host, "cpu_ratio": 0.5, "ram_total_gb": 128.0,
                "gpus": [{"power_w": 360.0, "power_limit_w": 700.0, "busy_ratio": 0.9}]} for i in range(361)]
    folder = write(tmp_path / "out", metrics=[row(1)], events=[event("init", 0)], machine=machine)
    assert numbers(embedded(page_of(folder)))["energy"] == "0.360 kWh"


def test_the_machine_is_folded_as_it_grows_and_read_anew_where_another_file_lies(tmp_path):
    rows = [{"time": 1.8e9 + 10 * i + 600 * (i > 9), "power_w": 100.0 + (i == 5), "on": True} for i in range(20)]
    folder = write(tmp_path, machine=rows[:12])
    machine = report.Machine(report.Lines(folder / "machine.jsonl", ("time",)))
    for there in (rows[:12], rows):
        write(folder, machine=there)
        machine.read()
        times = [at for at, value in machine.series["power_w"] if value is not None]
        assert times == [row["time"] for row in there] and not machine.lines.rows
        assert machine.series.keys() == {"power_w"}
        assert [value for _, value in machine.series["power_w"]].index(None) == 10  # between two sessions
    assert machine.joules == {"power_w": 18 * 1000.0 + 10}
    many = [{"time": 1.8e9 + i, "power_w": float(i == 4321)} for i in range(9 * report.POINTS)]
    write(tmp_path / "new", machine=many)
    (tmp_path / "new/machine.jsonl").rename(folder / "machine.jsonl")
    machine.read()
    points = machine.series["power_w"]
    assert len(points) < 4 * report.POINTS and (1.8e9 + 4321, 1.0) in points and machine.joules == {"power_w": 1.0}


def test_probes_and_unknown_numbers_are_drawn(tmp_path):
    probes = [{"prompt": "2 + 2 =", "value": 0.25}, {"prompt": "Paris", "value": 0.75}]
    folder = write(tmp_path / "out", metrics=[row(1, new_gb=7.0)], events=[event("probe", 1, mean=0.5, probes=probes)])
    charts = lines_of(embedded(page_of(folder)))
    found = charts["P(right) / (P(right) + P(wrong)); 0.5 is no idea"]
    assert {name: line["y"] for name, line in found.items()} == {
        "1 2 + 2 =": [0.25], "2 Paris": [0.75], "mean": [0.5]}
    assert charts["new_gb"]["new_gb"]["y"] == [7.0]


# -- several runs, and a run that goes on

def test_runs_are_laid_over_one_another(run, tmp_path):
    other = write(tmp_path / "other", metrics=[row(1), row(2)], config={"n_layer": 9})
    data = embedded(page_of(run, other, out=tmp_path / "both.html"))
    loss = lines_of(data)["Loss (nats per token)"]
    assert loss["out: train"]["y"] == [value for [value] in by_step(run / "metrics.jsonl", "loss").values()]
    assert loss["other: train"]["y"] == [4.99, 4.98] and loss["out: train"]["color"] != loss["other: train"]["color"]
    assert [found["name"] for found in data["runs"]] == ["out", "other"] and not (other / "report.html").exists()
    same = write(tmp_path / "deeper/out", metrics=[row(1)])
    names = [found["name"] for found in embedded(page_of(run, same, out=tmp_path / "x.html"))["runs"]]
    assert names == [str(run), str(same)]


def test_watch_renews_the_page_until_the_run_has_ended(tmp_path, monkeypatch):
    status = {"state": "running", "reason": "", "step": 0, "max_steps": 9}
    folder = write(tmp_path / "out", torn='{"session": 1,', metrics=[row(1)], status=status)
    seen = []

    def between(seconds):
        assert seconds >= 15
        data = embedded((folder / "report.html").read_text())
        seen.append((data["every_s"], lines_of(data)["Loss (nats per token)"]["train"]["x"]))
        if len(seen) == 1:
            with open(folder / "metrics.jsonl", "a") as file:
                file.write(json.dumps(row(2)).removeprefix('{"session": 1,') + "\n")
        else:  # the file is another one, as after a pull
            write(tmp_path / "new", metrics=[row(1), row(2), row(3)])
            (tmp_path / "new/metrics.jsonl").rename(folder / "metrics.jsonl")
            write(folder, status=status | {"state": "finished"})

    monkeypatch.setattr(report.time, "sleep", between)
    assert call(folder, "--watch") == 0
    data = embedded((folder / "report.html").read_text())
    assert seen == [(15, [1]), (15, [1, 2])] and data["every_s"] == 0 and numbers(data)["state"] == "finished"
    assert lines_of(data)["Loss (nats per token)"]["train"]["x"] == [1, 2, 3]
    assert {path.name for path in folder.iterdir()} == {"metrics.jsonl", "status.json", "report.html"}


# -- in a browser

@functools.cache
def why_no_browser():
    return "" if browser.CHROMIUM else "no chromium on this machine (Debian: apt-get install chromium)"


@pytest.fixture
def tab(tmp_path):
    if why_no_browser():
        pytest.skip(why_no_browser())
    page = browser.Page(tmp_path / "profile")
    yield page
    page.close()


DRAWN = "document.body && document.body.dataset.drawn > 0"
MARKS = """(() => {  // what the eye sees of a line's marks: places on the screen, turned back into values
  const node = document.querySelector(".chart"), at = node.data.findIndex(line => line.name === "validation");
  const {xaxis, yaxis} = node._fullLayout, marks = node.querySelectorAll(".scatterlayer .trace")[at];
  return [...marks.querySelectorAll(".points path")].map(mark => {
    const [x, y] = mark.getAttribute("transform").match(/-?[\\d.]+/g).map(Number);
    return [xaxis.p2l(x), yaxis.p2l(y)];
  });
})()"""


def test_the_page_in_a_browser(run, tab):
    page_of(run)
    tab.open(run / "report.html", DRAWN)
    metrics = by_step(run / "metrics.jsonl", "loss")
    drawn = tab.ask("Object.fromEntries(document.querySelector('.chart').data.map(line => [line.name, [...line.y]]))")
    assert drawn["train"] == [value for [value] in metrics.values()]
    evals = {row["step"]: row["val_loss"] for row in driver.events(run, "eval")}
    assert tab.ask(MARKS) == [pytest.approx(pair, abs=0.02) for pair in sorted(evals.items())]
    shapes = tab.ask("document.querySelector('.chart').layout.shapes.map(({type, x0, x1}) => [type, x0, x1])")
    assert shapes == [["line", 2, 2], ["rect", 2, 4], ["line", 4, 4]]
    assert tab.ask("[...document.querySelectorAll('.chart')].every(node => node.querySelector('.trace path'))")
    assert tab.ask("document.querySelector('dd').textContent") == "finished horizon"

    said = "document.querySelector('#reel output').textContent + document.querySelector('#texts').textContent"
    seen = [tab.ask(said)]
    tab.ask("document.getElementById('slider').focus()")
    for _ in range(4):
        tab.press("ArrowLeft", 37)
        seen.append(tab.ask(said))
    assert seen[0].startswith("step 12the run ") and [text[:7] for text in seen[1:]] == [
        "step 8t", "step 4t", "step 0t", "step 0t"] and len(set(seen)) == 4

    count = "document.querySelectorAll('#events tbody tr:not([hidden])').length"
    total = len(rows(run / "events.jsonl"))
    assert tab.ask(count) == total
    tab.click("#find")
    tab.call("Input.insertText", text="SAVE checkpoint")
    assert tab.ask(count) == len(driver.events(run, "save"))
    tab.ask("(() => { const find = document.getElementById('find'); find.value = ''; find.oninput() })()")
    tab.click("#kinds button")  # the first kind by name
    kind = tab.ask("document.querySelector('#kinds button').textContent").split()[0]
    assert tab.ask(count) == total - len(driver.events(run, kind)) < total
    assert tab.ask("document.querySelector('#count').textContent") == f"{tab.ask(count)} of {total}"

    tab.ask("window.before = true")
    tab.call("Page.reload")  # keeps the filter
    driver.wait_for(lambda: tab.ask(f"!window.before && {DRAWN}"))
    assert tab.ask(count) == total - len(driver.events(run, kind))
    assert tab.ask("document.title") == "out" and tab.ask("document.images.length") == 0
    assert not tab.complaints and {url.partition(":")[0] for url in tab.loaded} <= {"file", "blob", "data"}


def test_light_and_dark_in_a_browser(run, tab):
    page_of(run)
    look = "[getComputedStyle(document.body).backgroundColor, document.querySelector('.chart').layout.font.color]"
    seen = []
    for scheme in ("light", "dark"):
        tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        tab.open(run / "report.html", DRAWN)
        seen.append(tab.ask(look))
    assert seen == [["rgb(252, 252, 251)", "#0b0b0b"], ["rgb(26, 26, 25)", "#ffffff"]]
    tab.click("#theme")
    assert tab.ask(look) == seen[0] and not tab.complaints


def test_hostile_words_and_two_runs_in_a_browser(run, tab, tmp_path):
    bad = write(tmp_path / "bad", metrics=[row(1, **{HOSTILE: 1.0})], events=[event(HOSTILE, 1, cause=HOSTILE)],
                config={HOSTILE: HOSTILE}, status={"state": HOSTILE}, machine=[{"time": 1.8e9, HOSTILE: 2}])
    for name, folders in (("one", [bad]), ("two", [run, bad]), ("empty", [write(tmp_path / "none", metrics=[])])):
        page_of(*folders, out=tmp_path / f"{name}.html")
        tab.open(tmp_path / f"{name}.html", "document.body && document.body.dataset.drawn !== undefined")
        assert tab.ask("document.title") in ("bad", "out + bad", "none") and tab.ask("document.images.length") == 0
        assert tab.ask("document.getElementById('trouble').hidden") and not tab.complaints
    assert not tab.complaints
