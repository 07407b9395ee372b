"""The schedule of learning rates, its horizon, and the checks of settings and host before the first step."""

import math
import random
import re

import pytest
import torch

import configurator
import preflight
import train

DEFAULTS = configurator.settings(vars(train))


def factor(i, **changes):
    words = dict(schedule="wsd", horizon=1000, warmup_steps=100, decay_ratio=0.2, min_lr_ratio=0.1)
    return train.lr_factor(i, **words | changes)


def curve(**changes):
    return [factor(i, **changes) for i in range(changes.get("horizon", 1000))]


# -- the factor on the learning rates


@pytest.mark.parametrize("schedule", ["wsd", "cosine", "constant"])
def test_the_first_step_has_a_rate_and_the_last_of_the_warmup_the_peak(schedule):
    assert factor(0, schedule=schedule) == 1 / 100
    assert factor(49, schedule=schedule) == 50 / 100
    assert factor(99, schedule=schedule) == 1
    assert factor(100, schedule=schedule) == 1


@pytest.mark.parametrize("schedule", ["wsd", "cosine", "constant"])
def test_without_warmup_the_first_step_has_the_peak(schedule):
    assert factor(0, schedule=schedule, warmup_steps=0) == 1
    assert factor(0, schedule=schedule, warmup_steps=1) == 1


@pytest.mark.parametrize("schedule", ["wsd", "cosine", "constant"])
def test_a_warmup_as_long_as_the_run_is_all_there_is(schedule):
    assert curve(schedule=schedule, horizon=50, warmup_steps=50) == [(i + 1) / 50 for i in range(50)]
    assert curve(schedule=schedule, horizon=50, warmup_steps=80) == [(i + 1) / 80 for i in range(50)]


def test_wsd_decays_in_its_last_share():
    """Steps 800 to 999 of 1,000: from 1 down by (1 - 0.1) / 200 a step, so that step 1,000 would be 0.1."""
    assert factor(799) == factor(800) == 1
    assert factor(801) == pytest.approx(0.1 + 0.9 * 199 / 200)
    assert factor(900) == pytest.approx(0.55)
    assert factor(999) == pytest.approx(0.1 + 0.9 / 200)
    assert curve()[100:801] == [1] * 701


def test_a_final_rate_of_nothing_is_reached_one_step_after_the_last():
    assert factor(999, min_lr_ratio=0.0) == pytest.approx(1 / 200)
    assert factor(999, min_lr_ratio=0.0, decay_ratio=0.001) == 1  # one decay step, which still has the peak


def test_a_final_rate_of_one_is_no_decay():
    assert curve(min_lr_ratio=1.0)[99:] == pytest.approx([1] * 901)
    assert curve(min_lr_ratio=1.0, schedule="cosine")[99:] == pytest.approx([1] * 901)


def test_wsd_with_a_decay_ratio_of_0_holds_the_peak_and_of_1_decays_from_the_start():
    assert curve(decay_ratio=0.0)[99:] == [1] * 901
    whole = curve(decay_ratio=1.0, warmup_steps=0)
    assert whole[0] == 1 and whole[500] == pytest.approx(0.55) and whole[999] == pytest.approx(0.1009)
    assert curve(decay_ratio=0.0004)[99:] == [1] * 901  # less than half a step


def test_cosine_goes_from_1_after_the_warmup_to_the_final_rate_at_the_last_step():
    assert factor(100, schedule="cosine") == 1
    assert factor(999, schedule="cosine") == pytest.approx(0.1)
    assert factor(999, schedule="cosine", min_lr_ratio=0.0) == pytest.approx(0, abs=1e-12)
    assert train.lr_factor(60, "cosine", 101, 20, 0.2, 0.1) == pytest.approx(0.55)  # half way
    assert factor(999, schedule="cosine", warmup_steps=998) == pytest.approx(0.1)  # the one after the peak


def test_constant_stays_at_the_peak():
    assert curve(schedule="constant")[99:] == [1] * 901


def test_golden_values():
    """Frozen for ever."""
    for horizon, start in ((120_000, 96_000), (80_000, 64_000)):
        words = dict(horizon=horizon, warmup_steps=700, min_lr_ratio=0.0)
        assert factor(start - 1, **words) == factor(start, **words) == 1
        assert factor(start + 1, **words) == pytest.approx(1 - 1 / (horizon - start), rel=1e-12) != 1
    rate = 6e-4 * factor(3799, horizon=3814, min_lr_ratio=0.0)  # of the 3,800th step
    assert f"{rate:.2e}" == "1.18e-05"
    assert factor(150) == 1 and factor(950) == pytest.approx(0.325) and factor(9) == 0.1
    assert factor(550, schedule="cosine") == pytest.approx(0.549213729, abs=1e-9)


@pytest.mark.parametrize("schedule", ["wsd", "cosine"])
def test_the_rate_never_rises_after_the_warmup_and_moves_without_a_jump(schedule):
    draw = random.Random(30)
    for _ in range(100):
        horizon = draw.randint(20, 400)
        warmup, ratio = draw.randint(0, horizon // 2), draw.uniform(0.05, 0.5)
        words = dict(schedule=schedule, horizon=horizon, warmup_steps=warmup, decay_ratio=ratio,
                     min_lr_ratio=draw.choice([0.0, 0.1, draw.random()]))
        factors = curve(**words)
        rising, falling = factors[:warmup], factors[max(0, warmup - 1):]
        assert all(a < b for a, b in zip(rising, rising[1:]))
        assert all(b <= a + 1e-12 for a, b in zip(falling, falling[1:]))
        span = round(ratio * horizon) if schedule == "wsd" else (horizon - 1 - warmup) / (math.pi / 2)
        largest = max(1 / max(1, warmup), 1 / max(1, span))
        assert all(abs(b - a) <= largest * (1 + 1e-9) for a, b in zip(factors, factors[1:]))
        last = factors[-1] - words["min_lr_ratio"]
        assert -1e-12 <= last <= 1 / max(1, round(ratio * horizon)) + 1e-12


def test_every_step_of_every_schedule_has_a_rate_in_0_to_1():
    """No division by zero either, with zeros and ones everywhere."""
    for schedule in ("wsd", "cosine", "constant"):
        for horizon in (1, 2, 3, 10):
            for warmup in range(0, horizon + 3):
                for decay_ratio in (0.0, 1e-9, 0.2, 0.5, 1.0):
                    for min_lr_ratio in (0.0, 0.1, 1.0):
                        words = dict(schedule=schedule, horizon=horizon, warmup_steps=warmup,
                                     decay_ratio=decay_ratio, min_lr_ratio=min_lr_ratio)
                        factors = curve(**words)
                        assert all(0 <= value <= 1 + 1e-12 for value in factors), words
                        assert factors[0] > 0, words


def test_a_longer_horizon_changes_no_rate_before_both_decay():
    """What the rule on changing the horizon rests on."""
    for recorded, wanted in ((1000, 2000), (1000, 500), (1000, 1001)):
        first = min(recorded, wanted) - round(0.2 * min(recorded, wanted))
        assert curve(horizon=recorded)[:first] == curve(horizon=wanted)[:first]


# -- the horizon


def test_the_horizon_comes_from_tokens_per_parameter_else_tokens_else_steps():
    assert preflight.horizon_of(100, 0, 0.0, 1000, 64) == 100
    assert preflight.horizon_of(100, 6400 + 63, 0.0, 1000, 64) == 100  # whole steps only
    assert preflight.horizon_of(7, 6400, 0.0, 1000, 64) == 100
    assert preflight.horizon_of(7, 6400, 20.0, 1000, 64) == 20_000 // 64
    assert preflight.horizon_of(0, 0, 0.5, 1000, 64) == 500 // 64
    assert preflight.horizon_of(0, 10**13, 0.0, 1, 524288) == 10**13 // 524288


def test_a_run_without_a_step_is_refused():
    with pytest.raises(ValueError, match="no step to do: 63 tokens are less than batch_tokens 64"):
        preflight.horizon_of(100, 63, 0.0, 1000, 64)
    with pytest.raises(ValueError, match="no step to do: max_steps, max_tokens and .* are all 0"):
        preflight.horizon_of(0, 0, 0.0, 1000, 64)


def test_wsd_may_change_its_horizon_before_the_decay_start_of_both():
    for recorded, wanted in ((1000, 2000), (2000, 1000)):
        for step in (0, 1, 799):
            preflight.check_horizon("wsd", 0.2, step, recorded, wanted)
        for step in (800, 900, 1000):
            with pytest.raises(ValueError) as error:
                preflight.check_horizon("wsd", 0.2, step, recorded, wanted)
            assert str(error.value) == (
                f"the horizon cannot change from {recorded:,} to {wanted:,} steps at step {step:,}: one of "
                "the two begins to decay at step 800; go back before it with resume='step_...'")


def test_wsd_without_decay_may_change_its_horizon_up_to_its_end():
    preflight.check_horizon("wsd", 0.0, 999, 1000, 2000)
    with pytest.raises(ValueError, match="cannot change"):
        preflight.check_horizon("wsd", 0.0, 1000, 1000, 2000)
    with pytest.raises(ValueError, match="cannot change"):
        preflight.check_horizon("wsd", 1.0, 0, 1000, 2000)  # decays from its first step on


def test_cosine_may_never_change_its_horizon():
    with pytest.raises(ValueError, match="horizon of a cosine schedule cannot change: .* planned for 1,000 "
                                         "steps and 2,000 were asked for; a wsd schedule can be prolonged"):
        preflight.check_horizon("cosine", 0.2, 0, 1000, 2000)


def test_constant_may_always_change_its_horizon():
    for step, recorded, wanted in ((0, 1000, 2000), (1000, 1000, 2000), (900, 1000, 950), (900, 1000, 100)):
        preflight.check_horizon("constant", 0.2, step, recorded, wanted)


@pytest.mark.parametrize("schedule", ["wsd", "cosine", "constant"])
def test_the_same_horizon_is_no_change(schedule):
    for step in (0, 900, 1000):
        preflight.check_horizon(schedule, 0.2, step, 1000, 1000)


def test_a_warmup_that_reaches_the_decay_is_noted():
    assert preflight.schedule_note("wsd", 1000, 800, 0.2) == ""
    note = preflight.schedule_note("wsd", 1000, 801, 0.2)
    assert "warmup_steps 801 reaches past step 800 of 1,000" in note and "begins to decay" in note
    for schedule in ("cosine", "constant"):
        assert preflight.schedule_note(schedule, 1000, 1000, 0.2) == ""
        note = preflight.schedule_note(schedule, 1000, 1001, 0.2)
        assert f"past step 1,000 of 1,000, where the {schedule} schedule ends" in note


# -- the step cut into micro-batches


def test_micro_batches_of_a_step():
    assert preflight.micro_batches_of(524288, 1024, 16, 8) == 32
    assert preflight.micro_batches_of(524288, 1024, 64, 8) == 8
    assert preflight.micro_batches_of(1, 1, 1, 1) == 1


@pytest.mark.parametrize("batch_tokens, nearest", [
    (500_000, "491,520 or 507,904"), (16_385, "16,384 or 32,768"), (32_767, "16,384 or 32,768"),
    (5, "16,384")])
def test_a_step_that_cannot_be_cut_names_the_nearest_that_can(batch_tokens, nearest):
    with pytest.raises(ValueError) as error:
        preflight.micro_batches_of(batch_tokens, 1024, 16, 1)
    assert str(error.value) == (f"batch_tokens {batch_tokens:,} is not a multiple of block_size x batch_size "
                                f"= 1,024 x 16 = 16,384; nearest: {nearest}")
    for word in nearest.split(" or "):
        preflight.micro_batches_of(int(word.replace(",", "")), 1024, 16, 1)


def test_a_step_of_fewer_micro_batches_than_ranks_says_what_would_do():
    with pytest.raises(ValueError) as error:
        preflight.micro_batches_of(4 * 16384, 1024, 16, 8)
    for word in ("4 micro-batches", "too few for 8 ranks", "at least 131,072"):
        assert word in str(error.value)
    assert re.search(r"batch_size of (at most )?8 ", str(error.value))
    assert preflight.micro_batches_of(4 * 16384, 1024, 8, 8) == 8
    assert preflight.micro_batches_of(131_072, 1024, 16, 8) == 8


def test_a_batch_size_that_would_do_does():
    """Where a step has enough windows for every rank, the batch_size that the error names works as it is."""
    for windows, batch_size, world_size in ((12, 6, 5), (64, 32, 7), (20, 10, 3), (8, 8, 3)):
        with pytest.raises(ValueError) as error:
            preflight.micro_batches_of(windows * 16, 16, batch_size, world_size)
        named = int(re.search(r"batch_size of (?:at most )?(\d+) or", str(error.value))[1])
        assert preflight.micro_batches_of(windows * 16, 16, named, world_size) >= world_size


def test_a_step_of_fewer_windows_than_ranks_names_no_batch_size():
    with pytest.raises(ValueError, match=r"too few for 8 ranks; (a )?batch_tokens of at least 128 would do"):
        preflight.micro_batches_of(7 * 16, 16, 1, 8)


def test_vocabulary_and_length_of_the_data():
    assert preflight.vocabulary_of(0, 257, "data/x") == 257
    assert preflight.vocabulary_of(50304, 50257, "data/x") == 50304
    with pytest.raises(ValueError, match="vocab_size is 256, but data/x has ids up to 256"):
        preflight.vocabulary_of(256, 257, "data/x")
    preflight.check_length((0, 9), 8, "data/x")
    with pytest.raises(ValueError, match="data/x has 8 train tokens; a window of block_size 8 needs .* 9"):
        preflight.check_length((0, 8), 8, "data/x")


# -- settings against each other and against a resumed run


def test_the_defaults_are_settings_that_work():
    preflight.check_settings(DEFAULTS)


def test_every_name_in_the_checks_is_a_setting():
    for names in (preflight.CHOICES, preflight.AT_LEAST_ONE, preflight.RATIOS, preflight.MAY_DIFFER,
                  preflight.HORIZON):
        assert set(names) <= set(DEFAULTS)
    for name, choices in preflight.CHOICES.items():
        assert DEFAULTS[name] in choices


def test_all_problems_of_the_settings_are_in_one_message():
    wrong = {"schedule": "linear", "batch_size": 0, "decay_ratio": 1.5, "warmup_steps": -1, "n_layer": -2,
             "learning_rate": -0.1, "resume": "newest", "beta2": 1.0, "dtype": "fp16",
             "eval_only": True, "dry_run": True}
    with pytest.raises(ValueError) as error:
        preflight.check_settings(DEFAULTS | wrong)
    lines = str(error.value).split("\n  ")
    assert lines[0] == "settings that cannot work:" and len(lines) == 1 + 10
    for text in ("schedule is 'linear'; it is one of 'wsd', 'cosine', 'constant'",
                 "batch_size is 0; it must be at least 1",
                 "decay_ratio is 1.5; it must lie in 0 to 1", "warmup_steps is -1; it must not be negative",
                 "learning_rate is -0.1; it must not be negative", "n_layer -2 must be at least 1",
                 "beta1 and beta2 must be below 1", "eval_only and dry_run exclude each other",
                 "dtype is 'fp16'; it is one of 'auto', 'float32', 'bfloat16', 'float16'"):
        assert text in lines
    assert any(line.startswith("resume is 'newest'; it is 'auto', 'never', 'must' or a ") for line in lines)


@pytest.mark.parametrize("wrong", [
    {"decay_ratio": math.nan}, {"dropout": 1.0}, {"beta1": 1.0}, {"min_lr_ratio": -0.1}, {"max_steps": -1},
    {"block_size": 0}, {"log_interval": 0}, {"keep_checkpoints": 0}, {"max_bad_steps": 0}, {"resume": ""},
    {"prepare": "all"}, {"data_verify": "on"}, {"compile": "true"}, {"device": "gpu"},
    {"session_minutes": -1.0},
], ids=str)
def test_a_setting_out_of_its_range_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        preflight.check_settings(DEFAULTS | wrong)


@pytest.mark.parametrize("right", [
    {"resume": "step_00000030"}, {"max_steps": 0}, {"warmup_steps": 0}, {"eval_interval": 0},
    {"grad_clip": 0.0}, {"decay_ratio": 1.0}, {"min_lr_ratio": 1.0}, {"weight_decay": 0.0},
    {"beta1": 0.0}], ids=str)
def test_a_setting_at_the_edge_of_its_range_works(right):
    preflight.check_settings(DEFAULTS | right)


def other(value):
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, (int, float)) else value + "x"


FROZEN = """
    seed init_from data_seed
    block_size vocab_size n_layer n_head n_kv_head head_width n_embd norm norm_eps position rope_theta
    mlp mlp_ratio mlp_hidden bias dropout qk_norm value_residual logit_cap tie_embeddings
    batch_tokens optimizer learning_rate muon_learning_rate muon_momentum weight_decay beta1 beta2 grad_clip
    schedule warmup_steps decay_ratio min_lr_ratio reproducible""".split()


@pytest.mark.parametrize("name", FROZEN)
def test_a_frozen_setting_may_not_differ_from_the_recorded_one(name):
    value = other(DEFAULTS[name])
    with pytest.raises(ValueError) as error:
        preflight.check_resume(DEFAULTS, DEFAULTS | {name: value})
    assert f"\n  {name}: the run has {DEFAULTS[name]!r}, asked for {value!r}" in str(error.value)


def test_every_other_setting_may_differ():
    changed = {name: value if name in FROZEN else other(value) for name, value in DEFAULTS.items()}
    preflight.check_resume(DEFAULTS, changed)


def test_all_frozen_settings_that_differ_are_in_one_message():
    changed = {"n_layer": 3, "seed": 8, "learning_rate": 0.5, "out_dir": "else"}
    with pytest.raises(ValueError) as error:
        preflight.check_resume(DEFAULTS, DEFAULTS | changed)
    assert len([line for line in str(error.value).splitlines() if line.startswith("  ")]) == 3
    for word in ("n_layer", "seed", "learning_rate"):
        assert f"  {word}: the run has" in str(error.value)
    assert "out_dir: the run" not in str(error.value)


def test_a_setting_that_the_record_does_not_know_is_let_alone():
    recorded = {name: value for name, value in DEFAULTS.items() if name != "n_head"}
    preflight.check_resume(recorded, DEFAULTS)


@pytest.mark.parametrize("name", ["batch_size", "compile", "loss_chunk_tokens"])
def test_what_would_change_a_bit_is_frozen_too_in_a_reproducible_run(name):
    recorded = DEFAULTS | {"reproducible": True}
    preflight.check_resume(recorded, recorded | {"checkpoint_interval": 7})
    with pytest.raises(ValueError, match=f"{name}: the run has"):
        preflight.check_resume(recorded, recorded | {name: other(DEFAULTS[name])})


@pytest.mark.parametrize("micro_batches, blocks", [(1, 1), (2, 2), (3, 1), (4, 4), (6, 2), (8, 8), (12, 4), (40, 8)])
def test_the_blocks_of_a_reproducible_step_depend_on_the_step_alone(micro_batches, blocks):
    for world_size in range(1, 9):
        if blocks % world_size == 0:
            assert preflight.blocks_of(micro_batches, world_size, "cpu", "float32") == blocks
        else:
            with pytest.raises(ValueError, match=f"{micro_batches} micro-batches of a step in {blocks} equal blocks, "
                                                 f"which {world_size} ranks cannot share; 1"):
                preflight.blocks_of(micro_batches, world_size, "cpu", "float32")


@pytest.mark.parametrize("device, dtype", [("cuda", "float32"), ("cpu", "bfloat16"), ("cpu", "float16")])
def test_reproducible_is_refused_where_it_is_not_promised(device, dtype):
    with pytest.raises(ValueError, match=f"found {device} with {dtype}"):
        preflight.blocks_of(8, 1, device, dtype)


# -- the device


@pytest.mark.parametrize("name, device_type, bf16_native, recorded, expected", [
    ("auto", "cpu", False, "", "float32"),
    ("auto", "mps", False, "", "float32"),
    ("auto", "cuda", True, "", "bfloat16"),
    ("auto", "cuda", False, "", "float16"),  # a T4, which says that it supports bfloat16
    ("auto", "cuda", True, "float32", "float32"),
    ("auto", "cuda", True, "float16", "float16"),
    ("auto", "cuda", True, "bfloat16", "bfloat16"),
    ("auto", "cuda", False, "float16", "float16"),
    ("auto", "cuda", False, "float32", "float32"),
    ("auto", "cpu", False, "float32", "float32"),
    ("float32", "cuda", True, "bfloat16", "float32"),
    ("float16", "cuda", True, "bfloat16", "float16"),
    ("float16", "cuda", False, "bfloat16", "float16"),
    ("bfloat16", "cuda", True, "float32", "bfloat16"),
    ("bfloat16", "cpu", False, "", "bfloat16"),
])
def test_dtype(name, device_type, bf16_native, recorded, expected):
    assert preflight.pick_dtype(name, device_type, bf16_native, recorded) == expected


@pytest.mark.parametrize("name, device_type, recorded, text", [
    ("bfloat16", "cuda", "", "bfloat16 is asked for, but this cuda device only emulates it"),
    ("bfloat16", "cuda", "float16", "bfloat16 is asked for, but this cuda device only emulates it"),
    ("auto", "cuda", "bfloat16", "bfloat16 is what this run recorded, but this cuda device only emulates it"),
    ("auto", "cpu", "bfloat16", "bfloat16 is what this run recorded, but this cpu device only emulates it"),
    ("float16", "mps", "", "float16 is not built for mps"),
    ("auto", "mps", "float16", "float16 is not built for mps"),
])
def test_a_dtype_that_the_device_lacks_is_refused_with_one_that_would_do(name, device_type, recorded, text):
    with pytest.raises(ValueError, match=f"{text}.* would do"):
        preflight.pick_dtype(name, device_type, False, recorded)


def test_device(monkeypatch):
    for cuda, mps, best in ((True, False, "cuda"), (False, True, "mps"), (False, False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda mps=mps: mps)
        assert preflight.pick_device("auto") == best
        assert preflight.pick_device("cpu") == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device='cuda' was asked for, but this torch finds only cpu"):
        preflight.pick_device("cuda")


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert preflight.take_place("cuda", False) == (5, 8, torch.device("cuda", 1))
    assert chosen == [torch.device("cuda", 1)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="4 ranks on this host need a GPU each, found 2; --nproc_per_node=2 or device"):
        preflight.take_place("cuda", False)  # on the ranks that have one as well
    assert preflight.take_place("cpu", False) == (5, 8, torch.device("cpu"))


def test_compile_is_on_for_cards_of_capability_8_and_up(monkeypatch):
    assert preflight.pick_compile("auto", "cuda", True)
    assert not preflight.pick_compile("auto", "cuda", False)
    assert not preflight.pick_compile("auto", "cpu", False)
    assert not preflight.pick_compile("off", "cuda", True)
    assert preflight.pick_compile("on", "cuda", False)
    monkeypatch.setattr(preflight.shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match=r"needs a C\+\+ compiler on CPU"):
        preflight.pick_compile("on", "cpu", False)


@pytest.mark.parametrize("cores, ranks_on_host, omp_num_threads, threads", [
    (8, 1, 0, 8), (8, 1, 3, 3), (8, 1, 1, 1),  # one process: all cores, or as wished
    (8, 2, 0, 4), (8, 3, 0, 2), (8, 8, 0, 1), (2, 4, 0, 1),  # ranks share them
    (8, 2, 1, 4), (2, 4, 1, 1),  # torchrun's own 1 is no wish
    (8, 2, 3, 3), (8, 4, 2, 2),
])
def test_threads(cores, ranks_on_host, omp_num_threads, threads):
    assert preflight.threads_of(cores, ranks_on_host, omp_num_threads) == threads


@pytest.mark.parametrize("name, dtype, tflops", [
    ("NVIDIA A100-SXM4-80GB", "bfloat16", 312), ("NVIDIA A100-PCIE-40GB", "float16", 312),
    ("NVIDIA H100 80GB HBM3", "bfloat16", 989), ("NVIDIA H100 PCIe", "bfloat16", 756),
    ("NVIDIA H100 NVL", "bfloat16", 835), ("NVIDIA H200", "bfloat16", 989),
    ("NVIDIA H200 NVL", "bfloat16", 836), ("NVIDIA GH200 480GB", "bfloat16", 989),
    ("NVIDIA B200", "bfloat16", 2250),
    ("Tesla T4", "float16", 65), ("Tesla V100-SXM2-16GB", "float16", 125),
    ("NVIDIA L4", "bfloat16", 121), ("NVIDIA L40S", "bfloat16", 362), ("NVIDIA A10G", "bfloat16", 70),
    ("NVIDIA RTX A5000", "bfloat16", 111.1), ("NVIDIA GeForce RTX 4090", "float16", 165.2),
    ("NVIDIA GeForce RTX 3090", "float16", 71), ("NVIDIA A100-SXM4-80GB", "float32", 156), ("Tesla T4", "float32", 8.1),
    ("NVIDIA GeForce RTX 4090", "float32", 82.6),
])
def test_peak_of_a_device_in_the_table(monkeypatch, name, dtype, tflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: name)
    assert preflight.peak_flops("cuda", dtype, 0.0) == tflops * 1e12
    assert preflight.peak_flops("cuda", dtype, 1.5) == 1.5e12


@pytest.mark.parametrize("name, dtype", [
    ("NVIDIA Something 9000", "bfloat16"), ("NVIDIA Something 9000", "float32"), ("Tesla T4", "bfloat16"),
    ("NVIDIA L40", "bfloat16"), ("NVIDIA T400 4GB", "float16"), ("NVIDIA GeForce RTX 3090 Ti", "bfloat16"),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16"), ("NVIDIA GeForce RTX 4090 D", "bfloat16"),
])
def test_an_unknown_device_has_no_peak_rather_than_anothers(monkeypatch, name, dtype):
    """Neither one whose name only begins like a known one's."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: name)
    assert preflight.peak_flops("cuda", dtype, 0.0) == 0


def test_cpu_has_no_peak_but_the_one_that_is_set():
    assert preflight.peak_flops("cpu", "float32", 0.0) == 0
    assert preflight.peak_flops("mps", "float32", 0.0) == 0
    assert preflight.peak_flops("cpu", "float32", 0.25) == 0.25e12


# -- what a person reads and writes


def test_prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes("one\n\n  two  \ndef f(x):\\n    return\r\nlast \u00e9".encode())
    assert preflight.read_prompts(str(path)) == ["one", "  two  ", "def f(x):\n    return", "last \u00e9"]
    assert preflight.read_prompts("") == [""]
    with pytest.raises(ValueError, match="prompts_file '.*none.txt' cannot be read .*No such file or "
                                         "directory.*; sample_interval=0 turns samples off"):
        preflight.read_prompts(str(tmp_path / "none.txt"))


@pytest.mark.parametrize("seconds, text", [
    (0, "0 s"), (14.9, "14 s"), (59.99, "59 s"), (60, "1 min 00 s"), (200, "3 min 20 s"),
    (3599, "59 min 59 s"), (3600, "1 h 00 min"), (3720, "1 h 02 min"), (360_000, "100 h 00 min")])
def test_duration(seconds, text):
    assert preflight.duration(seconds) == text


@pytest.mark.parametrize("step, interval, horizon, due", [
    (0, 500, 2000, 500), (499, 500, 2000, 500), (500, 500, 2000, 1000), (1999, 500, 2000, 2000),
    (0, 500, 300, 300), (1900, 500, 1950, 1950), (7, 0, 2000, 2000), (2000, 500, 2000, 2000)])
def test_next_due(step, interval, horizon, due):
    assert preflight.next_due(step, interval, horizon) == due


def test_control_loss_beyond_its_tolerance_is_refused():
    preflight.check_control(3.0005, 3.0, 0.001, "step_00000010")
    for found in (3.002, 2.998, math.nan):
        with pytest.raises(ValueError, match="the weights of step_00000010 give a loss .* 3.000000 was"):
            preflight.check_control(found, 3.0, 0.001, "step_00000010")


def test_free_disk(tmp_path):
    free = preflight.free_gb(tmp_path)
    assert preflight.free_gb(tmp_path / "not" / "there") == pytest.approx(free, abs=0.5)
    preflight.check_disk(tmp_path, 0.0)
    with pytest.raises(ValueError, match="min_free_gb asks for 1000000000.0 GB free"):
        preflight.check_disk(tmp_path, 1e9)
