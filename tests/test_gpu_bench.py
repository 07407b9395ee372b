"""The GPU bench, rehearsed on CPU: every part reports, a broken one is told and stops no other, time is kept."""

import importlib.util
import json
import math
import re
import subprocess
import sys
import time

import pytest
import torch

from driver import ROOT, is_there, wait_for

spec = importlib.util.spec_from_file_location("gpu_bench", ROOT / "bench" / "gpu.py")
gpu = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gpu)
SPEEDS = [name for name in gpu.PARTS if name.startswith(("124m", "350m"))]


def bench(*words):
    """The bench by its command line; (exit status, text, the JSON line or {})."""
    done = subprocess.run([sys.executable, "bench/gpu.py", *words], cwd=ROOT, capture_output=True, text=True,
                          timeout=300)
    last = (done.stdout.splitlines() or [""])[-1]
    return done.returncode, done.stdout + done.stderr, json.loads(last) if last.startswith("{") else {}


def test_the_rehearsal_passes_and_every_part_reports_its_figures():
    status, text, found = bench("--rehearse", "--", "--peak_tflops=0.01")
    assert status == 0, text
    parts = found["parts"]
    assert list(parts) == list(gpu.PARTS) and {part["verdict"] for part in parts.values()} == {"passed"}
    assert found["failed"] == [] and found["rehearsal"] and found["seconds"] < 300
    assert found["hardware"] == "cpu" and found["versions"]["torch"]
    for name in SPEEDS:
        figures = parts[name]["figures"]
        assert figures["steps"] == 3 and min(figures["tokens_per_s"], figures["mfu"], figures["peak_gb"]) > 0
        assert figures["fastest_ms"] <= figures["step_ms"] <= figures["slowest_ms"]
        assert figures["tokens_per_s"] == pytest.approx(512 * 1000 / figures["step_ms"], rel=0.9)
        assert f"  {name:18} {figures['tokens_per_s']:9,} tokens/s  MFU" in text
    save = parts["124m_muon"]["figures"]
    assert 0 < save["save_stall_s"] <= save["save_durable_s"] and save["save_bytes"] > 100_000
    assert parts["resume"]["figures"].items() >= {"steps": 8, "different": 0}.items()
    assert parts["resume"]["figures"]["tensors"] > 20
    assert sum(parts["profile"]["figures"]["shares"].values()) == pytest.approx(1, abs=0.01)
    assert {"matmul", "attention", "optimizer"} <= parts["profile"]["figures"]["shares"].keys()
    ways = parts["correctness"]["figures"]
    assert {way.partition(", ")[2] for way in ways} == gpu.BOUNDS.keys()
    assert all(figures["gradient_off"] > 0 for way, figures in ways.items() if "bfloat16" in way)
    assert parts["facts"]["figures"]["sdpa_chosen"] in text
    assert sum(parts["gpu_tests"]["figures"].values()) > 5


def test_a_broken_part_is_told_and_the_others_still_run():
    status, text, found = bench("--rehearse", "--parts", "124m_adamw", "facts", "--", "--resume=must")
    assert status == 1 and found["failed"] == ["124m_adamw"]
    assert found["parts"]["124m_adamw"]["verdict"] == "failed" and found["parts"]["facts"]["verdict"] == "passed"
    assert "holds no checkpoint" in text and "exit status 2" in text


@pytest.mark.parametrize("way, loss, off, wrong", [
    ("bfloat16", 5.0, 0.02, 0), ("bfloat16", 5.0, 0.04, 1), ("bfloat16", 5.1, 0.0, 1), ("bfloat16", math.nan, 0.0, 1),
    ("bfloat16", 5.0, math.nan, 1), ("TF32", 5.0, 0.02, 1), ("float32 on CPU", 5.001, None, 1)])
def test_figures_beyond_their_bounds_are_a_failure(monkeypatch, way, loss, off, wrong):
    gradient = torch.ones(4)
    found = {"float32": (5.0, gradient), way: (loss, None if off is None else gradient * (1 + off))}
    monkeypatch.setattr(gpu, "words_of", lambda *_: [])
    monkeypatch.setattr(gpu, "ways_of_computing", lambda settings: dict(found))
    figures, problems = gpu.correctness(gpu.parse(["--rehearse"]))
    assert len(figures) == 2 and len(problems) == 2 * wrong and all(f", {way}: " in text for text in problems)


def test_a_part_that_hangs_is_killed_with_all_it_has_started(tmp_path):
    child = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    began = time.monotonic()
    found = gpu.one_part([sys.executable, "-c", code], 5, tmp_path / "log")
    assert time.monotonic() - began < 30 and found["verdict"] == "failed"
    assert found["problems"] == ["ended: killed at its limit of 5 s"]
    wait_for(lambda: not is_there(int(found["said"][0])))


def test_what_a_part_says_last_is_what_was_found(tmp_path):
    say = lambda line, status: [sys.executable, "-c", f"print('a\\nb'); print({line!r}); raise SystemExit({status})"]
    good = json.dumps({"figures": {"speed": 1}, "problems": []})
    found = gpu.one_part(say(good, 0), 30, tmp_path / "log")
    assert found["verdict"] == "passed" and found["figures"] == {"speed": 1} and "said" not in found
    found = gpu.one_part(say(json.dumps({"figures": {"speed": 1}, "problems": ["slow"]}), 0), 30, tmp_path / "log")
    assert found["verdict"] == "failed" and found["figures"] == {"speed": 1} and found["said"] == ["a", "b"]
    found = gpu.one_part(say(good, 3), 30, tmp_path / "log")
    assert found["verdict"] == "failed" and found["problems"] == ["exit status 3"] and good in found["said"]


def test_no_part_begins_when_the_time_is_over():
    status, text, found = bench("--rehearse", "--minutes=0")
    assert status == 0 and {part["verdict"] for part in found["parts"].values()} == {"not run (time)"}
    assert text.count("not run (time)") >= 2 * len(gpu.PARTS) and found["seconds"] < 20


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so():
    status, text, _ = bench()
    assert status == 2 and "no CUDA device was found" in text


def test_a_step_with_a_number_that_is_not_finite_is_no_speed(monkeypatch, tmp_path):
    """The rows of a run are judged, not only counted."""
    folder = tmp_path / "124m_adamw"
    folder.mkdir()
    row = {"step": 0, "tokens": 0, "loss": 5.0, "step_ms": 10.0, "tokens_per_s": 51200.0, "mfu": 0.5, "mem_gb": 1.0,
           "data_ms": 0.1}
    lines = [json.dumps(row | {"step": step, "tokens": 512 * step}) for step in range(1, 7)]
    monkeypatch.setattr(gpu, "start", lambda words: subprocess.Popen([sys.executable, "-c", "pass"]))
    asked = gpu.parse(["--rehearse", f"--folder={tmp_path}", "--part=124m_adamw", "--limit=60"])
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    figures, problems = gpu.speed(asked, "124m", "adamw")
    assert not problems and figures["tokens_per_s"] == 51200 and figures["mfu"] == 0.5 and figures["target"] == "none"
    (folder / "metrics.jsonl").write_text("\n".join([*lines[:5], json.dumps(row | {"step": 6, "loss": None})]) + "\n")
    assert "not finite" in gpu.speed(asked, "124m", "adamw")[1][0]
    (folder / "metrics.jsonl").write_text("\n".join(lines[:4]) + "\n")
    assert "4 steps were logged" in gpu.speed(asked, "124m", "adamw")[1][0]


def test_kernels_fall_into_their_groups():
    names = {"matmul": ["nvjet_hsh_128x256", "sm90_xmma_gemm_bf16", "void cutlass::Kernel2<x>", "aten::addmm"],
             "attention": ["flash_fwd_kernel", "cudnn_generated_fort_native_sdpa_sm90", "fmha_cutlassB_bf16"],
             "nccl": ["ncclDevKernel_AllReduce_Sum_f32"], "copies": ["Memcpy DtoH (Device -> Pinned)", "aten::copy_"],
             "norm, elementwise, fused": ["triton_red_fused_add_native_layer_norm_3", "aten::mul",
                                          "void at::native::vectorized_elementwise_kernel<4>"]}
    for group, kernels in names.items():
        for kernel in kernels:
            assert group == next(g for g, parts in gpu.GROUPS if re.search(parts, kernel, re.IGNORECASE)), kernel
