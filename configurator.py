"""Plain Python config files and --key=value words that override a script's settings.

    python train.py config/quickstart.py --max_steps=2000       (applied left to right, the later wins)

A setting is a lower-case module-level bool, int, float or str of the script, and its default gives its type.
A config file is Python that sees the settings so far; names of its own start with _ or are functions, classes
or modules. Choices, ranges and what settings mean together are not looked at here.
"""

import difflib
import math
import os
import reprlib
import sys
import tokenize
import traceback
import types

OLD_NAMES = {  # nanoGPT's settings that have no namesake here -> what to write instead
    "always_save_checkpoint": "checkpoint_interval (saves wait for no better loss; keep_checkpoints stay)",
    "backend": "device (the process group's backend follows from it)",
    "dataset": "data_dir (the folder of the shards and their manifest.json, such as data/stdlib)",
    "decay_lr": "schedule ('constant' does not decay, 'wsd' and 'cosine' do)",
    "eval_iters": "eval_tokens (validation tokens in one evaluation, 0 = all)",
    "gradient_accumulation_steps": "batch_tokens (tokens per step over all ranks; "
                                   "the micro-batches follow from it)",
    "lr_decay_iters": "max_steps (the decay ends there; under wsd it is the last decay_ratio of them)",
    "max_iters": "max_steps (exactly that many steps; or max_tokens, or tokens_per_parameter)",
    "min_lr": "min_lr_ratio (a share of learning_rate, 0 to 1)",
    "warmup_iters": "warmup_steps (steps of batch_tokens)",
}


def settings(namespace):
    """Returns {name: value} of a script's settings in the order of their definition."""
    return {name: value for name, value in namespace.items()
            if name == name.lower() and not name.startswith("_") and type(value) in (bool, int, float, str)}


def from_text(text, wanted):
    """Returns the text as a value of the wanted type, or as it is where it is none."""
    if wanted is bool:
        return {"true": True, "True": True, "false": False, "False": False}.get(text, text)
    try:  # base 0 reads ints as Python does: 1_000 and 0x10 are some, 010 is none
        return int(text, 0) if wanted is int else float(text) if wanted is float else text
    except ValueError:
        return text


def parse_flag(word, defaults):
    """Returns {name: value} of a --key=value word, without a look at whether it fits."""
    name, equals, text = word.removeprefix("--").partition("=")
    if not word.startswith("--"):
        raise ValueError("a word is a config file or --key=value")
    wanted = type(defaults.get(name))
    if name in defaults and not equals:
        raise ValueError(f"needs a value; write {word}={'True' if wanted is bool else 'VALUE'}")
    return {name: from_text(text, wanted)}


def run_file(path, current):
    """Returns {name: value} that a config file leaves, the names of its own taken out."""
    scope = {"__file__": path, **current}
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        advice = "a word is a config file or --key=value"
        raise ValueError(f"cannot be read ({error.strerror}); {advice}") from error
    try:
        exec(compile(source, path, "exec"), scope)
    except (Exception, SystemExit) as error:  # a person's code may raise anything
        lines = [line for frame, line in traceback.walk_tb(error.__traceback__)
                 if frame.f_code.co_filename == path]
        at = f"line {lines[-1]}: " if lines else ""  # a SyntaxError says its line itself
        raise ValueError(f"{at}{type(error).__name__}: {error}") from error
    return {name: value for name, value in scope.items() if name in current or not (
        name.startswith("_") or callable(value) or isinstance(value, types.ModuleType))}


def checked(name, value, defaults, otherwise):
    """Returns the value in its default's type.

    Raises: ValueError for another type, and for a name that no setting has (`otherwise` where none is near).
    """
    if name not in defaults:
        near = difflib.get_close_matches(name.lower(), defaults, n=1)
        advice = f"did you mean {near[0]!r}?" if near else otherwise
        if name in OLD_NAMES:
            advice = f"write {OLD_NAMES[name]}"
        raise ValueError(f"no setting is named {name!r}; {advice}")
    wanted = type(defaults[name])
    if wanted is float and type(value) is int:
        value = float(value) if abs(value) <= sys.float_info.max else math.inf
    if type(value) is wanted and (wanted is not float or math.isfinite(value)):
        return value
    number = from_text(value, float) if type(value) is str else value  # for 1e5 and '1e5': write 100_000
    advice = (f"; write {wanted()!r} for off" if value is None
              else "; write True or False" if wanted is bool
              else "; write a finite number" if type(value) is wanted
              else f"; write {int(number):_}" if wanted is int and type(number) is float and number % 1 == 0
              else "")
    kind = "an int" if wanted is int else f"a {wanted.__name__}"
    raise ValueError(f"{name} is {kind} (default {defaults[name]!r}), got {reprlib.repr(value)}{advice}")


def help_text(namespace):
    """Returns every setting with its type and trailing comment, under the script's headings ("# -- ...")."""
    heading, notes = "", {}
    with tokenize.open(namespace["__file__"]) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.COMMENT:
                if token.line.startswith("# -- "):
                    heading = token.string.strip("# -")
                name = token.line.partition("=")[0].rstrip()
                notes.setdefault(name, (heading, token.string.strip("# ")))
    script = os.path.basename(namespace["__file__"])
    lines = [f"usage: python {script} [CONFIG_FILE | --KEY=VALUE] ...   (left to right, the later wins)"]
    shown = ""
    for name, value in settings(namespace).items():
        heading, note = notes.get(name, (shown, ""))
        if heading != shown:
            lines += ["", heading]
            shown = heading
        lines.append(f"  {f'{name} = {value!r}':34} {type(value).__name__:5}  {note}".rstrip())
    return "\n".join(lines)


def configure(namespace, words):
    """Applies config files and --key=value words to a script's namespace in place and returns its settings.

    Raises: SystemExit 2 after one message with all problems, the namespace untouched; 0 after --help.
    Ranks: all; rank 0 alone prints.
    """
    defaults = settings(namespace)
    speaks = os.environ.get("RANK", "0") == "0"
    if "--help" in words or "-h" in words:
        if speaks:
            print(help_text(namespace))
        raise SystemExit(0)
    current, problems = dict(defaults), []
    for word in words:
        is_flag = word.startswith("-")
        otherwise = "--help lists them all" if is_flag else "names of the file's own start with _"
        try:
            values = parse_flag(word, defaults) if is_flag else run_file(word, current)
        except ValueError as error:
            problems.append(f"{word}: {error}")
            continue
        for name, value in values.items():
            try:
                current[name] = checked(name, value, defaults, otherwise)
            except ValueError as error:
                problems.append(f"{word}: {error}")
    if problems:
        if speaks:
            print("\n".join(problems), file=sys.stderr)
        raise SystemExit(2)
    namespace.update(current)
    return settings(namespace)
