"""The benches of throughput, start-up, loader, memory, logging: arithmetic on known numbers, a small run of each."""

import concurrent.futures
import importlib.util
import json
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch

import train
from driver import ROOT

sys.path.append(str(ROOT / "bench"))  # at the end: a bench has the name of a file beside it


def loaded(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "bench" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


startup, loader, memory, gains, tokens_to_loss, log_cost, data_bench, throughput = map(loaded, (
    "startup", "loader", "memory", "gains", "tokens_to_loss", "log_cost", "data", "throughput"))
TRAINER = """import sys
print("loading", flush=True)
for step in range(1, 1 + int(sys.argv[1])):
    sum(range(300_000))  # some milliseconds of work
    print("step", step, flush=True)
"""
ENDLESS = [sys.executable, "-c", TRAINER, str(10**9)]


def figures_of(name, *words):
    """The JSON line that a bench prints last, and what it prints before."""
    done = subprocess.run([sys.executable, ROOT / "bench" / f"{name}.py", *words], cwd=ROOT, capture_output=True,
                          text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    *table, last = done.stdout.splitlines()
    found = json.loads(last)
    assert found["bench"] == name and table
    return found, "\n".join(table)


# -- arithmetic

@pytest.mark.parametrize("percent,wanted", [(1, 1), (50, 50), (99, 99), (99.5, 100), (100, 100)])
def test_a_percentile_is_one_of_the_numbers(percent, wanted):
    assert loader.percentile(range(100, 0, -1), percent) == wanted


def test_a_percentile_of_one_number_is_that_number():
    assert loader.percentile([7.0], 1) == loader.percentile([7.0], 99) == 7.0


def test_shares_are_of_a_step_of_50_ms():
    found = loader.figures([100.0] * 98 + [1000.0, 5000.0])
    assert found == {"mean_us": 158.0, "median_us": 100.0, "p99_us": 1000.0, "max_us": 5000.0, "mean_share": 0.00316,
                     "median_share": 0.002, "p99_share": 0.02, "max_share": 0.1, "n": 100}


def test_the_slope_is_that_of_the_line():
    assert memory.slope([1, 2, 3, 10], [5, 7, 9, 23]) == pytest.approx(2)
    assert memory.slope([0, 100, 200], [4, 4, 4]) == 0
    assert memory.slope([0, 1, 2, 3], [0, 1, 0, 1]) == pytest.approx(0.2)


def test_steps_beside_a_pause_are_counted_apart():
    entered = [0.0, 0.01, 0.02, 0.04, 0.055, 0.065]  # step 3 lasts 20 ms: there is a save between it and step 4
    began = entered[:3] + [0.045] + entered[4:]  # and before step 4 a bare loop of 5 ms
    plain, paused = memory.steps_of(began, entered, 1, 3)
    assert plain == pytest.approx([10, 10, 10]) and paused == pytest.approx([20])


def test_memory_figures_count_from_the_warm_step_on():
    samples = [[step, 100 + step / 1000 if step > 10 else 900, 50, 40 - step / 1000] for step in (10, 20, 30, 40)]
    at = [0.01 * i for i in range(41)]
    row = memory.summary({"samples": samples, "began": at, "entered": at, "bare": [0.02] * 10, "foreign": 0.0}, 20, 10)
    assert (row["first_at"], row["last_at"], row["samples"]) == (20, 40, 3)
    assert row["rss_slope_kb_per_1000_steps"] == pytest.approx(1000) and row["anon_slope_kb_per_1000_steps"] == 0
    assert row["given_slope_kb_per_1000_steps"] == pytest.approx(-1000) and row["given_first_mb"] == 39.98
    assert row["step_p99_over_median"] == row["bare_p99_over_median"] == pytest.approx(1) and row["bare_ms"] == 20


def test_memory_is_that_of_this_process():
    before, held = memory.memory_mb(), torch.ones(10_000_000)
    after = memory.memory_mb()
    assert 10 < before[1] < before[0] < 10_000 and held.sum() == 10_000_000
    assert [later - earlier for earlier, later in zip(before, after)] == pytest.approx([40] * 3, abs=4)


def launched(seconds, load):
    return {"first_step_s": seconds, "stages": {"load": load}}


def test_differences_are_taken_within_a_round():
    found = {"bare_s": 2.0, "small": launched(2.5, 0), "huge": launched(2.75, 0), "fresh": launched(3.0, 0),
             "resume": launched(4.5, 1.5), "read_s": 0.5, "hash_s": 1.0}
    assert startup.differences(found) == {
        "small_over_bare_s": 0.5, "huge_over_bare_s": 0.75, "huge_over_small_s": 0.25, "resume_over_fresh_s": 1.5,
        "load_s": 1.5, "load_over_hash": 1.5}
    rows = startup.summary([found, found | {"bare_s": 1.0}, found | {"bare_s": 2.5}])
    assert rows["bare_s"] == {"median": 2.0, "least": 1.0, "most": 2.5}
    assert rows["small_over_bare_s"] == {"median": 0.5, "least": 0.0, "most": 1.5}


def test_foreign_work_is_what_neither_we_nor_idleness_took():
    assert startup.foreign_share((0, 100, 10), (10, 115, 20), 2) == 0.25
    assert startup.foreign_share((0, 100, 10), (10, 109.9, 20), 2) == 0


def test_the_compiler_is_found_in_a_list_of_imports():
    told = "import time:       765 |        982 |     torch._functorch\nimport time: 1 | 2 |   torch._dynamo{}\n"
    assert startup.has_compiler(told.format("")) and not startup.has_compiler(told.format("_config"))


def test_the_last_row_is_the_last_of_its_kind(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "start", "n": 1}\n{"event": "start", "n": 2}\n{"event": "stop", "n": 3}\n')
    assert startup.last_row(path, event="start")["n"] == 2 and startup.last_row(path)["n"] == 3


def test_a_sparse_folder_passes_the_checks_of_a_start(tmp_path):
    from data import prepare
    startup.write_small(tmp_path / "small")
    startup.write_sparse(tmp_path / "huge", tmp_path / "small", 8)
    manifest = prepare.read_manifest(tmp_path / "huge")
    assert sum(shard["tokens"] for shard in manifest["train"]) == 10**12
    assert sum(path.stat().st_blocks for path in (tmp_path / "huge").glob("*.bin")) * 512 < 1e6


# -- a small run of each

def test_startup_runs():
    found, table = figures_of("startup", "--rounds", "1", "--shards", "8", "--size", "tiny")
    assert {"bare_s", "small_s", "huge_s", "small_over_bare_s", "huge_over_bare_s", "resume_over_fresh_s", "load_s",
            "read_s", "hash_s"} <= found["figures"].keys()
    assert found["compiler"]["train"] is False, "an eager run has no use for the compiler, and it takes a second"
    for name in ("small", "huge", "fresh", "resume"):
        [run] = [one[name] for one in found["rounds"]]
        assert run["first_step_s"] == pytest.approx(sum(run["stages"].values()), abs=0.05)
        assert min(run["stages"].values()) >= 0 and run["stages"]["imports"] > 0.05
    assert "small_over_bare_s" in table and found["shards"] == 8 and found["bytes"] > 1000


def test_loader_runs():
    found, table = figures_of("loader", "--steps", "50", "--tokens", "400000")
    assert {name.partition(":")[0] for name in found["rows"] if ":" in name} == set(loader.SHAPES)
    assert found["rows"]["16 x 1,024 x 32: a step"]["n"] == 50
    assert found["rows"]["8 x 256: a read of many"]["n"] == 4, "1, 4, 16 and the rest"
    for row in found["rows"].values():
        assert 0 < row["median_us"] <= row["p99_us"] <= row["max_us"] and row["mean_us"] > 0
    assert "16 x 1,024 x 32: a step" in table


def test_data_runs(gpt2_vocabulary):
    found, table = figures_of("data", "--mb", "2", "--rounds", "1", "--tokens", "400000", "--steps", "50")
    assert 0 < found["tokenise"]["build"] and found["tokenise"]["ratios"] == [found["tokenise"]["ratio"]]
    assert found["cold"]["a read of many"]["n"] == 4 and found["cold"]["a step"]["n"] == 50
    assert list(found["size"]) == ["1e+06", "1e+08", "1e+10"] and "1e+10 windows" in table
    for row in found["size"].values():
        assert 0 < row["seconds"] < 5 and row["mb"] < 100


def test_text_to_tokenise_is_as_much_as_was_asked_for():
    texts = data_bench.documents(1e6)
    assert 1e6 <= sum(len(text.encode()) for text in texts) < 2e6 and len(set(texts)) > 20


def test_memory_runs():
    found, table = figures_of("memory", "--steps", "200", "--warm", "50", "--interval", "10", "--pause", "50")
    assert (found["steps"], found["first_at"], found["last_at"], found["samples"]) == (200, 50, 200, 16)
    assert found["rss_last_mb"] > found["anon_last_mb"] > found["given_last_mb"] > 10
    assert found["step_p99_ms"] >= found["step_ms"] > 0
    assert found["pause_ms"] > 0 and 0 <= found["foreign"] <= 1 and "VmRSS" in table
    assert found["quiet"] is (found["foreign"] < memory.MOST_FOREIGN)


# -- on paper

def test_a_roofline_is_peak_over_flops_and_its_shares_are_of_a_step():
    found, table = figures_of("roofline")
    t4, a5000, _, eight = found["rows"]
    assert t4["roofline_tokens_per_s"] == pytest.approx(2 * 65e12 / (t4["mflop_a_token"] * 1e6))
    assert a5000["target_mfu"] == pytest.approx(60_000 / a5000["roofline_tokens_per_s"])
    assert t4["exchange_share"] == pytest.approx(4 * 106_194_240 / 15.75e9 / (262_144 / 30_000))
    assert a5000["exchange_share"] == 0 and eight["step_ms"] == pytest.approx(1000 * 524_288 / 3_520_000)
    assert "2 x Tesla T4" in table


# -- throughput

def state_of(pid):
    """Of a process: 'T' is stopped; '' where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def within(seconds, holds):
    """Whether something holds before so many seconds have passed."""
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.001)
    return holds()


def test_a_trainer_stands_still_between_turns_and_is_gone_at_the_end(tmp_path):
    with open(tmp_path / "log", "wb") as log:
        trainer = throughput.Trainer(ENDLESS, tmp_path, log)
        try:
            for count in (3, 0, 1):
                assert len(marks := trainer.steps(count)) == count and marks == sorted(marks)
                assert within(10, lambda: state_of(trainer.process.pid) == "T")
            assert len(spans := trainer.turn(2)) == 2 and 0 <= min(spans) and trainer.wall > sum(spans)
            assert within(10, lambda: state_of(trainer.process.pid) == "T") and 0 <= trainer.foreign_share() <= 1
        finally:
            trainer.end()
    assert state_of(trainer.process.pid) == ""
    assert (tmp_path / "log").read_text().startswith("loading\nstep 1\nstep 2\nstep 3\n")


def test_a_trainer_that_ends_too_soon_or_is_not_there_is_told(tmp_path):
    with open(tmp_path / "log", "wb") as log:
        trainer = throughput.Trainer([*ENDLESS[:3], "2"], tmp_path, log)
        try:
            with pytest.raises(SystemExit, match="(?s)2 of 3 step lines came; the last it said:.*loading.*step 2"):
                trainer.steps(3)
        finally:
            trainer.end()
        with pytest.raises(SystemExit, match="no-such-trainer 7: .*No such file"):
            throughput.Trainer(["no-such-trainer", "7"], tmp_path, log)


@pytest.mark.parametrize("second", [["no-such-trainer"], [*ENDLESS[:3], "4"]], ids=["missing", "ends"])
def test_where_the_second_trainer_fails_the_first_is_ended(second, tmp_path, monkeypatch):
    started, start = [], throughput.Trainer

    def noted(*arguments):
        started.append(start(*arguments))
        return started[-1]
    monkeypatch.setattr(throughput, "Trainer", noted)
    commands = {"first": (ENDLESS, tmp_path, throughput.STEP_LINE), "second": (second, tmp_path, throughput.STEP_LINE)}
    with pytest.raises(SystemExit):
        throughput.one_round(commands, types.SimpleNamespace(warm=1, turns=3, steps=1), tmp_path)
    assert started and all(state_of(trainer.process.pid) == "" for trainer in started)


def test_a_bench_that_is_killed_leaves_no_trainer(tmp_path):
    (tmp_path / "other.py").write_text(TRAINER)
    code = f"import sys; sys.path.append({str(ROOT / 'bench')!r}); import throughput\n" \
           f"trainer = throughput.Trainer({ENDLESS!r}, '.', open('log', 'wb'))\n" \
           "trainer.steps(1); print(trainer.process.pid, flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True) as bench:
        pid = int(bench.stdout.readline())
        assert within(10, lambda: state_of(pid) == "T")
        bench.kill()
    assert within(10, lambda: state_of(pid) in ("", "Z")), "a killed bench takes a trainer that stands still with it"


def test_who_comes_first_in_a_turn_alternates(tmp_path, monkeypatch):
    turns = []

    class Stub:
        began, process = 0.0, types.SimpleNamespace(pid=None)

        def __init__(self, command, *_):
            self.name = command

        def steps(self, count):
            return [5.0] * count

        def turn(self, steps):
            turns.append(self.name)
            return [1.0] * steps

        foreign_share, end = (lambda self: 0.0), (lambda self: None)
    monkeypatch.setattr(throughput, "Trainer", Stub)
    monkeypatch.setattr(throughput, "peak_gb", lambda pid: 1.0)
    found = throughput.one_round({name: (name, tmp_path, None) for name in "ab"},
                                 types.SimpleNamespace(warm=1, turns=3, steps=2), tmp_path)
    assert "".join(turns) == "abbaab"
    assert found["a"] == {"first_s": 5.0, "turns": [[1.0, 1.0]] * 3, "peak_gb": 1.0, "foreign": 0.0, "step_s": 1.0}


def rounds_of(count, seconds, foreign=0.0, gb=1.0):
    return [{"turns": [[s, s] for s in seconds], "peak_gb": gb, "first_s": 4 * gb, "foreign": foreign,
             "step_s": seconds[0]}] * count


def test_ratios_are_taken_between_turns_that_follow_one_another_in_quiet_rounds():
    ours, other = rounds_of(5, [1.0, 2.0, 4.0]), rounds_of(5, [1.5, 4.0, 9.0], gb=2.0)
    assert throughput.ratios_of({"longhaul": ours, "other": other}) == {
        "tokens_per_s": pytest.approx([(1.5 * 2 * 2.25) ** (1 / 3)] * 5), "peak_gb": [0.5] * 5, "first_s": [0.5] * 5}
    noisy = rounds_of(1, [9.0, 9.0, 9.0], foreign=0.11)
    assert len(throughput.ratios_of({"longhaul": ours + noisy, "other": other * 2})["tokens_per_s"]) == 5
    assert throughput.ratios_of({"longhaul": ours[:4] + noisy, "other": other}) == {}, "too few quiet rounds"
    assert throughput.ratios_of({"longhaul": rounds_of(5, [0.24]), "other": rounds_of(5, [0.5])}) == {}, "too short"
    assert throughput.ratios_of({"longhaul": ours}) == {}
    assert throughput.spread([2.0, 4.0, 8.0]) == pytest.approx(
        {"median": 4, "least": 2, "most": 8, "mean": 4, "error": 4 * 0.6931472 / 3**0.5})


def test_throughput_runs(tmp_path):
    (tmp_path / "other.py").write_text(TRAINER)
    found, table = figures_of("throughput", "--shape", "byte", "--rounds", "1", "--turns", "1", "--steps", "1",
                              "--warm", "0", "--line", "step", "--against",
                              f"{sys.executable} {tmp_path}/other.py {{steps}}000000")
    for trainer in ("longhaul", "other"):
        [run] = found["shapes"]["byte"]["runs"][trainer]
        assert run["step_s"] > 0 and len(run["turns"]) == len(run["turns"][0]) == 1
        assert run["first_s"] > 0.01 and run["peak_gb"] > 0.005
    assert found["shapes"]["byte"]["ratios"] == {} and "no ratio: fewer than 5 rounds" in table


# -- gains

def test_the_unfused_update_is_the_same_update():
    def updated(update):
        torch.manual_seed(0)
        named = [(name, torch.nn.Parameter(torch.randn(3, 5))) for name in "ab"]
        state = {f"{slot}.{name}": torch.rand(3, 5) for slot in ("exp_avg", "exp_avg_sq") for name in "ab"}
        for _, parameter in named:
            parameter.grad = torch.randn(3, 5)
        opt = types.SimpleNamespace(state=state, betas=(0.9, 0.95), updates=torch.tensor(3.0))
        with torch.no_grad():
            update(opt, named, 1e-2, 0.1, torch.tensor(0.0))
        return [p.detach() for _, p in named], state
    torch.testing.assert_close(updated(gains.unfused_update), updated(train.adamw_update), rtol=1e-6, atol=1e-7)


def test_each_change_is_undone_beside_steps_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr(gains, "SHAPES", {"tiny": {"vocab": 60, "n_layer": 1, "n_head": 1, "n_embd": 16}})
    found = gains.session("tiny", types.SimpleNamespace(pairs=2, warm=2, steps=1, rows=512), tmp_path)
    assert tuple(found["times"]) == gains.CHANGES
    assert all(len(pairs) == 2 and 0 < min(map(min, pairs)) for pairs in found["times"].values())


def test_a_step_counts_for_what_was_switched_before_it():
    todo = [None, *gains.plan(("a", "b"), 2, 1), None]
    spans = [9.0, *(index + (100 if counts else 0) for index, (_, _, counts) in enumerate(todo[1:-1])), 9.0]
    assert [(change, on) for change, on, counts in todo[1:-1] if counts] == [
        ("a", False), ("a", True), ("b", False), ("b", True), ("a", True), ("a", False), ("b", True), ("b", False)]
    assert gains.times_of(todo, spans, ("a", "b"), 1) == {
        "a": [[101.0, 103.0], [111.0, 109.0]], "b": [[105.0, 107.0], [115.0, 113.0]]}
    assert gains.summary([[2.0, 1.0], [3.0, 1.0], [4.0, 1.0]]) == {"median": 3.0, "low": 2.5, "high": 3.5, "pairs": 3}


def test_a_change_is_undone_and_made_again():
    steps = types.SimpleNamespace(adamw_update="fused")
    model, memory = types.SimpleNamespace(loss_chunk_tokens=512), []
    host = types.SimpleNamespace(keep_freed_memory=memory.append)
    seen = {}
    for on in (False, True):
        for change in gains.CHANGES:
            gains.switch(change, on, steps, host, model, 512, "fused")
        seen[on] = steps.adamw_update, model.loss_chunk_tokens
    assert seen == {False: (gains.unfused_update, 0), True: ("fused", 512)} and memory == [False, True]


# -- tokens to a loss

@pytest.mark.parametrize("target, wanted", [
    (3.0, (100, "")), (3.5, (100, "<")), (2.0, (400, "")), (2.5, (200, "")), (1.5, (1600 ** 0.5 * 20, "")),
    (0.9, (1600, ">"))])
def test_tokens_to_a_loss_lie_between_horizons_or_beyond_them(target, wanted):
    tokens, bound = tokens_to_loss.tokens_to(target, [100, 400, 1600], [3.0, 2.0, 1.0])
    assert (pytest.approx(tokens), bound) == wanted


def test_the_best_rate_is_that_of_the_grid_and_the_other_seeds_run_at_it_alone(monkeypatch, tmp_path):
    ran = []

    def train_once(folder, key, recipe, steps, batch_tokens, rate, seed):
        ran.append((rate, seed))
        return {"loss": None if rate == 4 else abs(rate - 2) + seed / 100}
    monkeypatch.setattr(tokens_to_loss, "train", train_once)
    kept = {"gpt2-muon-4096-0.25-1": 9.0}  # from a launch before
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        row = tokens_to_loss.at_best_rate(kept, tmp_path, pool, "gpt2-muon", 4096)
    assert row == {"rate": 2.0, "inside": True, "losses": [0.01, 0.02, 0.03],
                   "grid": {0.25: 9.0, 0.5: 1.51, 1.0: 1.01, 2.0: 0.01, 4.0: None}}
    assert ran == [(0.5, 1), (1.0, 1), (2.0, 1), (4.0, 1), (2.0, 2), (2.0, 3)]
    again = [json.loads(line) for line in (tmp_path / "losses.jsonl").read_text().splitlines()]
    assert {line["run"]: line["loss"] for line in again} == {key: kept[key] for key in kept if "-0.25-" not in key}


def test_newton_schulz_is_counted():
    plain, both = tokens_to_loss.flops_of("gpt2-muon")
    square, wide = 5 * 6 * 128 ** 3, 5 * (4 * 128 * 128 * 512 + 2 * 128 ** 3)
    assert both - plain == pytest.approx(4 * (4 * square + 2 * wide) / 8192)  # queries, keys, values, output; the MLP
    assert tokens_to_loss.flops_of("gpt2-adamw") == (plain, plain)


def test_a_recipe_is_trained_and_its_loss_read(tmp_path):
    tokens_to_loss.write_data(tmp_path / "data")
    found = tokens_to_loss.train(tmp_path, "run", tokens_to_loss.RECIPES["modern-muon"], 4, 2048, 1.0, 1)
    assert 3 < found["loss"] < 6 and found["step_ms"] > 0 and not (tmp_path / "out" / "run").exists()


def test_log_cost_runs():
    found, table = figures_of("log_cost", "--steps", "5", "--rounds", "1")
    [row] = found["rounds"]
    assert row["plain_ms"] > 0 and row["all_ms"] > 0 and 0 < row["lines_us"] < 1e6
    assert found["lines_share"] == pytest.approx(row["lines_us"] / 1000 / row["plain_ms"])
    assert 0 < found["sample_us"] < 1e6 and found["sample_share"] == pytest.approx(found["sample_us"] / 1e7)
    assert "a sample of the machine" in table
