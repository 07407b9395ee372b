"""The house: who reads settings, what importing does, who imports whom, what config files claim."""

import ast
import contextlib
import functools
import io
import json
import os
import re
import shlex
import subprocess
import symtable
import sys
import tokenize
from pathlib import Path

import pytest
import torch

import configurator
import preflight
import train
from data import prepare
from model import GPT, GPTConfig, parameter_counts
from ranks import share_of

ROOT = Path(__file__).resolve().parents[1]
KNOWN = {f"{name}.py" for name in ("train", "model", "configurator", "checkpoint", "hub", "preflight",
                                   "sample", "export", "plan", "report", "ranks", "watch")}
SCRIPTS = ("train.py", "sample.py")  # with settings
CONFIGS = sorted(f"config/{path.name}" for path in ROOT.glob("config/*.py"))
TOP = sorted(path.name for path in ROOT.glob("*.py"))
CODE = [*TOP, *CONFIGS, *sorted(str(path.relative_to(ROOT)) for folder in ("data", "bench")
                                for path in ROOT.glob(f"{folder}/*.py"))]
TESTS = sorted(f"tests/{path.name}" for path in ROOT.glob("tests/*.py"))
# What each file may import of the files beside it; a file that is not named here imports none of them.
MAY_IMPORT = {
    "train.py": {"configurator.py", "model.py", "checkpoint.py", "preflight.py", "ranks.py", "sample.py", "hub.py",
                 "watch.py", "data/prepare.py", "data/shuffle.py"},
    "watch.py": {"checkpoint.py", "hub.py"},
    "sample.py": {"configurator.py", "model.py", "checkpoint.py", "preflight.py", "hub.py",
                  "data/prepare.py"},
    "export.py": {"configurator.py", "model.py", "checkpoint.py", "preflight.py", "hub.py",
                  "data/prepare.py"},
    "preflight.py": {"model.py"},
    "ranks.py": {"preflight.py"},
    "data/prepare.py": {"data/building.py", "data/download.py", "data/shards.py", "data/sources.py",
                        "data/vocabulary.py"},
    "data/building.py": {"data/download.py", "data/shards.py", "data/sources.py", "data/vocabulary.py"},
    "data/download.py": {"data/sources.py"},
    "data/shards.py": {"data/vocabulary.py"},
    "hub.py": {"configurator.py", "checkpoint.py"},
    "plan.py": {"configurator.py", "checkpoint.py", "preflight.py"},
    "report.py": {"configurator.py", "checkpoint.py", "preflight.py", "watch.py"},
}
VOCABULARY = {"data/stdlib": 257, "data/fineweb_edu": 50257}  # where a config leaves it to the manifest


def text(name):
    return (ROOT / name).read_text(encoding="utf-8")


@functools.cache
def tree(name):
    return ast.parse(text(name), name)


@functools.cache
def comments(name):
    """{line number: text of the comment on it}."""
    tokens = tokenize.generate_tokens(io.StringIO(text(name)).readline)
    return {token.start[0]: token.string.strip("# ") for token in tokens if token.type == tokenize.COMMENT}


# -- settings

def is_guard(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


def setting_nodes(name):
    """[(name of the setting, its node)]: what a file assigns to lower-case names before its first guard."""
    body = tree(name).body
    first_guard = next(i for i, node in enumerate(body) if is_guard(node))
    assigned = [(target.id, node) for node in body[:first_guard]
                if isinstance(node, (ast.Assign, ast.AnnAssign))
                for target in getattr(node, "targets", None) or [node.target]]
    return [(target, node) for target, node in assigned if target == target.lower()]


def defaults(name):
    return {setting: ast.literal_eval(node.value) for setting, node in setting_nodes(name)}


def scopes(table, inside_main=False):
    """(scope, whether it is main or a lambda or comprehension in main) for all below a symbol table."""
    for child in table.get_children():
        at_top = table.get_type() == "module"
        small = child.get_name() in ("lambda", "listcomp", "setcomp", "dictcomp", "genexpr")
        of_main = inside_main and small or at_top and child.get_name() == "main"
        yield child, of_main
        yield from scopes(child, of_main)


def globals_read(scope):
    return {symbol.get_name() for symbol in scope.get_symbols()
            if symbol.is_global() and symbol.is_referenced()}


def module_table(name):
    return symtable.symtable(text(name), name, "exec")


@pytest.mark.parametrize("name", SCRIPTS)
def test_only_main_reads_settings(name):
    settings, wrong = set(defaults(name)), []
    for scope, of_main in scopes(module_table(name)):
        if not of_main and globals_read(scope) & settings:
            found = sorted(globals_read(scope) & settings)
            wrong.append(f"line {scope.get_lineno()}: {scope.get_name()} reads {found}")
    allowed = [node for node in tree(name).body if is_guard(node) or getattr(node, "name", "") == "main"]
    in_allowed = {id(node) for part in allowed for node in ast.walk(part)}
    for node in ast.walk(tree(name)):
        whole = isinstance(node, ast.Call) and ast.unparse(node) in ("globals()", "vars()")
        if whole and id(node) not in in_allowed:
            wrong.append(f"line {node.lineno}: {ast.unparse(node)} outside main and the guard")
    assert not wrong, wrong


@pytest.mark.parametrize("name", SCRIPTS)
def test_nothing_is_derived_from_a_setting_on_import(name):
    """Default arguments, decorators and module-level values would freeze the default."""
    read = {symbol.get_name() for symbol in module_table(name).get_symbols() if symbol.is_referenced()}
    assert not read & set(defaults(name)), sorted(read & set(defaults(name)))


@pytest.mark.parametrize("name", SCRIPTS)
def test_main_assigns_no_setting(name):
    for scope, of_main in scopes(module_table(name)):
        changed = {symbol.get_name() for symbol in scope.get_symbols() if symbol.is_assigned()
                   or symbol.is_declared_global()} & set(defaults(name))
        is_function_of_its_own = not of_main and scope.get_type() == "function"
        if is_function_of_its_own:
            changed = {word for word in changed if scope.lookup(word).is_declared_global()}
        if of_main or is_function_of_its_own:
            assert not changed, f"line {scope.get_lineno()}: {scope.get_name()} changes {sorted(changed)}"


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_setting_is_read_in_main(name):
    read = set().union(*(globals_read(scope) for scope, of_main in scopes(module_table(name)) if of_main))
    main = next(node for node in tree(name).body if getattr(node, "name", "") == "main")
    source = ast.unparse(main)
    read |= set(re.findall(r"\bsettings\['(\w+)'\]", source))
    if "GPTConfig.__dataclass_fields__" in source:  # the model settings are handed to GPTConfig all at once
        read |= set(GPTConfig.__dataclass_fields__)
    assert not set(defaults(name)) - read, sorted(set(defaults(name)) - read)


def test_every_model_setting_is_a_setting_with_the_same_default():
    settings = defaults("train.py")
    fields = {name: field.default for name, field in GPTConfig.__dataclass_fields__.items()}
    assert fields | {"vocab_size": 0} == {name: settings[name] for name in fields}


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_setting_has_a_comment(name):
    bare = [setting for setting, node in setting_nodes(name)
            if len(re.findall(r"[A-Za-z]", comments(name).get(node.end_lineno, ""))) < 3]
    assert not bare, bare


@pytest.mark.parametrize("name", SCRIPTS)
def test_settings_are_literals(name):
    for setting, node in setting_nodes(name):
        value, line = node.value, ast.unparse(node)
        value = value.operand if isinstance(value, ast.UnaryOp) else value  # a minus sign
        assert isinstance(value, ast.Constant) and type(value.value) in (bool, int, float, str), line
        assert isinstance(node, ast.Assign) and len(node.targets) == 1, f"one setting a line: {line}"
    found = configurator.settings({**defaults(name), "Ranks": 1, "_own": 1})
    assert found == defaults(name)


def test_no_setting_comes_after_the_guard():
    """A lower-case value at module level further down would be taken for a setting."""
    for name in SCRIPTS:
        found = configurator.settings(vars(__import__(name.removesuffix(".py"))))
        assert found.keys() == defaults(name).keys()


@pytest.mark.parametrize("name", SCRIPTS)
def test_words_are_judged_before_torch_is_imported(name):
    """Docstring, light imports, settings, the configure line, imports, functions, main, the guard."""
    body = tree(name).body
    guards = [i for i, node in enumerate(body) if is_guard(node)]
    assert ast.get_docstring(tree(name)) and len(guards) == 2 and guards[1] == len(body) - 1
    assert ast.unparse(body[guards[0]].body) == "configurator.configure(globals(), sys.argv[1:])"
    assert ast.unparse(body[guards[1]].body) == "main()" and body[guards[1] - 1].name == "main"
    before = {module for node in body[:guards[0]] for module in modules_of(node)}
    assert before <= {"configurator"} | (sys.stdlib_module_names - {"torch"}), before
    assert not local_imports("configurator.py")
    outside = {module.partition(".")[0] for module in imported("configurator.py")} - sys.stdlib_module_names
    assert not outside, f"configurator.py is standard library only; it imports {outside}"
    kinds = ["imports" if isinstance(node, (ast.Import, ast.ImportFrom)) else
             "functions" if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else "" for node in body]
    first_function = kinds.index("functions")
    assert "imports" not in kinds[first_function:], "all imports stand before the first function"
    assert "functions" not in kinds[:guards[0]]


# -- imports

HOSTILE = ["--hostile=1", "--max_steps=3", "--help", "nonsense", "config/124m.py", "verify"]
LOOK = """
import gc, hashlib, json, os, random, signal, sys, threading, warnings
import numpy, safetensors.torch, torch, torch.distributed

def digest(value):
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]

def state():
    return {
        "environment": dict(os.environ), "folder": os.getcwd(), "files": sorted(os.listdir()),
        "argv": sys.argv[:],
        "umask": [os.umask(0o022), os.umask(0o022)][1], "threads": threading.active_count(),
        "torch threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "handlers": {number.name: repr(signal.getsignal(number)) for number in signal.valid_signals()
                     if isinstance(number, signal.Signals)},
        "random": [digest(random.getstate()), digest(numpy.random.get_state()[1].tolist()),
                   digest(torch.get_rng_state().tolist())],
        "modes": [torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(),
                  torch.backends.cudnn.benchmark, str(torch.get_default_dtype()), torch.is_grad_enabled()],
        "hooks": [repr(sys.excepthook), repr(sys.displayhook), gc.isenabled(), gc.get_threshold(),
                  digest(warnings.filters), sys.getrecursionlimit()],
        "started": [torch.cuda.is_initialized(), torch.distributed.is_initialized()],
    }

before, changed = state(), {}
print("begin", flush=True)
print("begin", file=sys.stderr, flush=True)
for name in NAMES:
    __import__(name)
    after = state()
    changed[name] = [key for key in before if before[key] != after[key]]
    before = after
sys.stdout.flush()
print("end " + json.dumps(changed))
"""


def test_importing_does_nothing(tmp_path):
    """No output, file, environment, thread, handler, random draw or mode, whatever the words typed."""
    names = [*(name.removesuffix(".py") for name in TOP if name not in SCRIPTS), "data.prepare", "sample",
             "train"]
    bare = {key: os.environ[key] for key in ("PATH", "HOME", "LD_LIBRARY_PATH") if key in os.environ}
    found = subprocess.run([sys.executable, "-c", LOOK.replace("NAMES", repr(names)), *HOSTILE],
                           cwd=tmp_path, capture_output=True, text=True, timeout=120,
                           env=bare | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"})
    assert found.returncode == 0, found.stderr
    said = found.stdout.partition("begin\n")[2]
    assert said.startswith("end ") and not found.stderr.partition("begin\n")[2], found.stdout + found.stderr
    changed = json.loads(said.removeprefix("end "))
    assert changed.keys() == set(names) and not any(changed.values()), changed
    assert not list(tmp_path.iterdir())


def modules_of(node):
    """The modules that an import statement names, as far as it can be told without running it."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or "", *(f"{node.module or ''}.{alias.name}".strip(".") for alias in node.names)]
    return []


def imported(name):
    """Every module that a file imports anywhere, dotted."""
    nodes = list(ast.walk(tree(name)))
    by_name = [ast.literal_eval(node.args[0]) for node in nodes if isinstance(node, ast.Call) and node.args
               and ast.unparse(node.func) in ("__import__", "importlib.import_module", "runpy.run_module")
               and isinstance(node.args[0], ast.Constant)]
    return {module for node in nodes for module in modules_of(node)} | set(by_name)


def local_imports(name):
    return {path for module in imported(name) if (path := module.replace(".", "/") + ".py") in CODE}


def test_nothing_that_train_imports_imports_train():
    """Under torchrun the script is __main__; a second import would be a second copy with default settings."""
    reached, todo = set(), {"train.py"}
    while todo:
        name = todo.pop()
        reached.add(name)
        assert "train.py" not in local_imports(name), f"{name} imports train"
        todo |= local_imports(name) - reached
    assert {"model.py", "checkpoint.py", "data/prepare.py"} <= reached


@pytest.mark.parametrize("name", [name for name in CODE if not name.startswith("bench/")])
def test_imports_go_one_way(name):
    wrong = local_imports(name) - MAY_IMPORT.get(name, set())
    assert not wrong, f"{name} may not import {sorted(wrong)}"


@pytest.mark.parametrize("name", CODE)
def test_optional_packages_are_imported_where_they_are_used(name):
    inside = {id(node) for part in ast.walk(tree(name)) if isinstance(part, ast.FunctionDef)
              for node in ast.walk(part) if node is not part}
    for node in ast.walk(tree(name)):
        tops = {module.partition(".")[0] for module in modules_of(node)}
        if id(node) not in inside:
            wrong = tops & {"wandb", "psutil", "pynvml", "tiktoken", "huggingface_hub", "transformers", "pyarrow",
                            "tokenizers"}
            assert not wrong, f"line {node.lineno}: {wrong}"


# -- config files

@functools.cache
def resolved(name):
    """The settings under a config file; fails with the configurator's message."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return configurator.configure(defaults("train.py"), [str(ROOT / name)])
    except SystemExit:
        raise AssertionError(said.getvalue()) from None


@functools.cache
def meta_model(name):
    settings = resolved(name)
    config = {field: settings[field] for field in GPTConfig.__dataclass_fields__}
    config["vocab_size"] = config["vocab_size"] or VOCABULARY[settings["data_dir"]]
    with torch.device("meta"):
        return GPT(GPTConfig(**config))


def parameters_of(name):
    return parameter_counts(meta_model(name))["total"]


def horizon_of(name):
    s = resolved(name)
    return preflight.horizon_of(s["max_steps"], s["max_tokens"], s["tokens_per_parameter"],
                                parameters_of(name), s["batch_tokens"])


def factor_of(name, i):
    s = resolved(name)
    return train.lr_factor(i, s["schedule"], horizon_of(name), s["warmup_steps"], s["decay_ratio"],
                           s["min_lr_ratio"])


def prose(name):
    """The leading comment of a config file in one line; a label ('a step') keeps the spaces after it."""
    return " ".join(line.strip("# ") for line in re.match("(#.*\n)*", text(name))[0].splitlines())


def stated(name, pattern):
    """The numbers that the pattern's groups find in the leading comment of a config file."""
    found = re.search(pattern, prose(name))
    assert found, f"{name}: its comment says nothing like {pattern!r}"
    return [float(number.replace(",", "")) if "." in number else int(number.replace(",", ""))
            for number in found.groups()]


def micro_batches(name, world_size):
    s = resolved(name)
    return preflight.micro_batches_of(s["batch_tokens"], s["block_size"], s["batch_size"], world_size)


def shares_of(count, world_size):
    return [len(share_of(count, preflight.Ranks(rank, world_size, None))) for rank in range(world_size)]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_resolves_and_can_work(name):
    settings = resolved(name)
    preflight.check_settings(settings)
    assert settings["warmup_steps"] < horizon_of(name) and settings["schedule"] != "constant"
    assert settings["out_dir"] not in {resolved(other)["out_dir"] for other in CONFIGS if other != name}
    assert "Expected" in prose(name), "a config file says what to expect"
    for setting in ("prompts_file", "probes_file"):
        assert not settings[setting] or (ROOT / settings[setting]).is_file()


def test_every_path_of_the_bare_defaults_exists_or_is_prepared():
    assert all((ROOT / defaults("train.py")[setting]).is_file() for setting in ("prompts_file", "probes_file"))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_states_its_parameters(name):
    assert stated(name, r"\bparameters {2,}([\d,]+\d)") == [parameters_of(name)]


@pytest.mark.parametrize("world_size", [1, 2, 8])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_states_its_step(name, world_size):
    settings, count = resolved(name), micro_batches(name, 1)
    assert stated(name, r"\ba step {2,}([\d,]+) tokens = ([\d,]+) windows? of ([\d,]+) = "
                        r"([\d,]+) micro-batch(?:es)? of ([\d,]*\d)") == [
        settings["batch_tokens"], settings["batch_tokens"] // settings["block_size"], settings["block_size"],
        count, settings["batch_size"]]
    if count < world_size:
        with pytest.raises(ValueError, match=f"too few for {world_size} ranks"):
            micro_batches(name, world_size)
    else:
        assert micro_batches(name, world_size) == count
        shares = shares_of(count, world_size)
        assert sum(shares) == count and max(shares) - min(shares) <= 1 and min(shares) >= 1


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_states_the_share_of_a_rank(name):
    for ranks, low, high in re.findall(r"(\d+) ranks? (?:do |does )?(\d+)(?: or (\d+))?", prose(name)):
        shares = set(shares_of(micro_batches(name, int(ranks)), int(ranks)))
        assert shares == {int(low), int(high or low)}, f"{ranks} ranks do {shares}"


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_states_its_run(name):
    steps, batch_tokens, tokens = stated(name, r"\bthe run {2,}([\d,]+) steps x ([\d,]+) = ([\d,]+) tokens\b")
    assert (steps, batch_tokens) == (horizon_of(name), resolved(name)["batch_tokens"])
    assert tokens == steps * batch_tokens
    for ratio in re.findall(r"tokens, ([\d.]*\d) (?:tokens per|a) parameter", prose(name)):
        assert f"{tokens / parameters_of(name):.{len(ratio.partition('.')[2])}f}" == ratio


@pytest.mark.parametrize("name", CONFIGS)
def test_every_wsd_config_states_where_it_decays(name):
    if resolved(name)["schedule"] == "wsd":
        [start] = stated(name, r"(?:decays|falls) from step ([\d,]*\d)")
        assert start == horizon_of(name) - round(resolved(name)["decay_ratio"] * horizon_of(name))
        assert factor_of(name, start) == 1 > factor_of(name, start + 1)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_product_in_a_config_comment_holds(name):
    for product, result in re.findall(r"((?:[\d,]+ x )+[\d,]+\d) = ([\d,]+\d)", prose(name)):
        value = 1
        for number in product.split(" x "):
            value *= int(number.replace(",", ""))
        assert value == int(result.replace(",", "")), f"{product} = {value:,}, not {result}"


@pytest.mark.parametrize("name", CONFIGS)
def test_a_stated_checkpoint_size_is_that_of_its_tensors(name):
    if found := re.search(r"\ba checkpoint +([\d.]+) GB", prose(name)):
        weights = state = 0
        for kind, _, named in train.group_parameters(meta_model(name), resolved(name)["optimizer"]):
            count = sum(parameter.numel() for _, parameter in named)
            weights, state = weights + count, state + count * (1 if kind == "muon" else 2)
        assert f"{(weights + state) * 4 / 1e9:.1f}" == found[1]


def assert_settings(name, **wanted):
    assert {key: resolved(name)[key] for key in wanted} == wanted


def test_the_124m_config_is_the_known_run():
    name = "config/124m.py"
    assert_settings(name, schedule="cosine", optimizer="adamw", batch_tokens=524288)
    assert (parameters_of(name), horizon_of(name)) == (124_475_904, 19_073)


def test_the_two_t4_config_is_the_known_run():
    name = "config/106m_2xt4.py"
    assert_settings(name, batch_tokens=262144, dtype="float16", checkpoint_interval=127, schedule="wsd",
                    learning_rate=6e-4, min_lr_ratio=0.0)
    assert (parameters_of(name), horizon_of(name), micro_batches(name, 2)) == (106_194_240, 3_814, 32)
    rate_of_step_3800 = resolved(name)["learning_rate"] * factor_of(name, 3800 - 1)
    assert f"{rate_of_step_3800:.2e}" == "1.18e-05"


def test_the_8_gpu_config_is_the_known_run():
    name = "config/1b_8xh200.py"
    assert_settings(name, optimizer="muon", muon_learning_rate=0.02, learning_rate=6e-4, min_lr_ratio=0.1,
                    weight_decay=0.1, block_size=4096, vocab_size=32768, warmup_steps=2000, schedule="wsd",
                    checkpoint_interval=400, milestone_interval=5000)
    assert resolved(name)["loss_chunk_tokens"] > 0
    assert horizon_of(name) == 120_000
    assert factor_of(name, 95_999) == factor_of(name, 96_000) == 1 > factor_of(name, 96_001)
    assert 80_000 - round(resolved(name)["decay_ratio"] * 80_000) == 64_000


# -- what is never done, and sizes

def test_top_level_files_are_the_known_ones():
    assert not set(TOP) - KNOWN, sorted(set(TOP) - KNOWN)
    assert len(TOP) >= 6


@pytest.mark.parametrize("name,most", [("train.py", 1000), ("model.py", 450)])
def test_sizes_hold(name, most):
    assert len(text(name).splitlines()) <= most


@pytest.mark.parametrize("name", CODE)
def test_nothing_is_pickled(name):
    loads = r"pickle|marshal|shelve|joblib|\bdill\b|torch\.(load|save)\("
    measured = {"bench/checkpoint.py": "torch.save(saver.live, file)"}.get(name, "nothing")  # to compare with
    wrong = [f"{i}: {line.strip()}" for i, line in enumerate(text(name).splitlines(), 1)
             if re.search(loads, line.replace(measured, ""))]
    never = {"torch.load", "torch.save", "np.load", "numpy.load"}
    wrong += [f"{node.lineno}: {ast.unparse(node)}" for node in ast.walk(tree(name))
              if isinstance(node, ast.Attribute) and ast.unparse(node) in never and ast.unparse(node) not in measured]
    wrong += [f"{module} is imported" for module in imported(name) & never]
    assert not wrong, wrong


@pytest.mark.parametrize("name", CODE + TESTS)
def test_no_except_is_bare_and_broad_ones_say_why(name):
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"line {node.lineno}: a bare except"
            caught = {part.id for part in ast.walk(node.type) if isinstance(part, ast.Name)}
            if caught & {"Exception", "BaseException"}:
                reason = comments(name).get(node.lineno, "")
                assert len(reason.split()) >= 3, f"line {node.lineno}: a broad except without its reason"


def test_no_machine_paths():
    places = [path for pattern in ("*", "config/*", "data/*", "tests/*", ".ci/*", "bench/**/*")
              for path in ROOT.glob(pattern) if path.is_file() and path.name != ".gitignore"]
    wrong = []
    for path in places:
        for i, line in enumerate(path.read_bytes().decode("utf-8", "replace").splitlines(), 1):
            if re.search(r"(?<![\w.])/(work\b|tmp/|root\b|home/)", line):
                wrong.append(f"{path.relative_to(ROOT)}:{i}: {line.strip()[:100]}")
    assert len(places) > 15 and not wrong, wrong


def is_bounded(loop):
    """Whether a loop ends by itself: over a range, or with a clock in its condition or body."""
    words = (ast.unparse(node) for node in ast.walk(loop) if isinstance(node, (ast.Name, ast.Attribute)))
    clock = re.compile("monotonic|perf_counter|deadline")
    return isinstance(loop, ast.For) or any(map(clock.search, words))


@pytest.mark.parametrize("name", TESTS)
def test_no_test_sleeps_to_be_right(name):
    """Only a polling loop that ends by itself may sleep between two looks."""
    loops = (node for node in ast.walk(tree(name)) if isinstance(node, (ast.For, ast.While)))
    polled = {id(node) for loop in loops if is_bounded(loop) for node in ast.walk(loop)}
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Call) and re.fullmatch(r"(\w+\.)?sleep", ast.unparse(node.func)):
            assert id(node) in polled, f"line {node.lineno}: a sleep outside a bounded polling loop"


@pytest.mark.parametrize("name", CODE + TESTS)
def test_source_is_ascii_in_lines_of_at_most_120(name):
    wrong = [f"{i}: {len(line)} characters" + ", not ASCII" * (not line.isascii())
             for i, line in enumerate(text(name).splitlines(), 1)
             if len(line) > 120 or not line.isascii()]
    assert not wrong, wrong


def test_every_requirement_file_is_installed_by_the_ci_script():
    script = text(".ci/run")
    assert os.access(ROOT / ".ci/run", os.X_OK) and "set -euo pipefail" in script
    for name in ("requirements.txt", "requirements-dev.txt"):
        assert f"\npip install -r {name}\n" in script
    assert "python -m pytest" in script and len(script.splitlines()) <= 15
    assert not re.search(r"https?:|index|find-links|trusted|\s-[if]\s", script), "no host and no index"


# -- the README

ENDS = ("&&", "||", "|", ";", "&", ">", ">>")  # of a command in a shell line


@functools.cache
def readme_commands():
    """[(script, its words)] of the lines in the README's code blocks that start one of ours."""
    found = []
    for block in re.findall(r"^```\w*\n(.*?)^```", text("README.md"), re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if re.match(r"\s*(\$ )?(\w+=\S+ )*(python3?|torchrun) ", line):
                words = shlex.split(line, comments=True)
                words = words[:next((i for i, word in enumerate(words) if word in ENDS), None)]
                scripts = [i for i, word in enumerate(words) if word.endswith(".py")]
                if scripts:
                    found.append((words[scripts[0]], words[scripts[0] + 1:]))
    return found


def test_the_readme_names_every_file():
    missing = [name for name in [*TOP, *CONFIGS, "data/prepare.py"] if name not in text("README.md")]
    assert not missing, missing


def test_the_readme_names_only_files_that_exist():
    named = set(re.findall(r"\b(?:config|data|bench|tests)/\w+\.py\b", text("README.md")))
    named |= set(re.findall(r"`(\w+\.py)`", text("README.md"))) & KNOWN
    missing = [name for name in sorted(named) if not (ROOT / name).is_file()]
    assert not missing, missing


def test_the_readme_installs_what_the_ci_script_installs():
    for name in ("requirements.txt", "requirements-dev.txt"):
        assert f"-r {name}" in text("README.md")
    assert "python -m pytest" in text("README.md")


def test_the_readme_commands_are_accepted(monkeypatch, capsys):
    """Each names a script that is there, with words that the script takes."""
    monkeypatch.chdir(ROOT)
    assert {"train.py", "sample.py"} <= {script for script, _ in readme_commands()}
    for script, words in readme_commands():
        line = f"{script} {' '.join(words)}"
        assert (ROOT / script).is_file(), line
        try:
            if script in SCRIPTS and "--help" not in words:
                configurator.configure(defaults(script), words)
            elif script == "data/prepare.py" and "[" not in line and "--help" not in words:
                prepare.parse(words)
            elif script == "checkpoint.py":
                assert words[0] in ("list", "verify", "rollback"), line
        except SystemExit:
            pytest.fail(f"{line}: {capsys.readouterr().err}")
