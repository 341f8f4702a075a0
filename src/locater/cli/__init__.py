"""The command line: finds the module of a verb, runs it, and explains what went wrong."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from importlib import import_module
from io import StringIO

from locater.cli.terminal import hush, plain, say
from locater.errors import FULL, LocaterError, unforeseen, unknown

# a command's summary and its example
_COMMANDS: dict[str, tuple[str, str]] = {
    "theory": (
        "ρ(θ) for one (ξ, η): as printed, corrected, exact at finite length",
        "locater theory --xi 5 --eta 0.1 --tokens 40 --dim 128 --out figure.html",
    ),
    "simulate": (
        "simulate ρ and attention entropy for drawn W_QK (Fig. 5), here or on Ray",
        "locater simulate fig5 --panels 'Σ = I' --draws 2 --out fig5.html",
    ),
    "audit": (
        "every head's query-key spectrum, from a file, a folder, a URL or a hub id",
        "locater audit model --top 8 --out page.html",
    ),
    "compare": (
        "what changed between two checkpoints, head by head",
        "locater compare model tuned --top 8",
    ),
    "probe": (
        "what every head does on a text: entropy, ρ, logits, distance; any model",
        "locater probe model --text text.txt --tokens 16 --blocks 100",
    ),
    "explain": (
        "whether the theory predicts what the heads do on a text, and why",
        "locater explain model --text text.txt --tokens 16 --blocks 100",
    ),
    "theories": (
        "everybody's formulas for a head in one table, against what the heads do",
        "locater theories model --text text.txt --tokens 16 --blocks 100",
    ),
    "moments": (
        "what a text gives of every head, in a small file for what-if",
        "locater moments model --text text.txt --out moments.safetensors",
    ),
    "what-if": (
        "what heads would do at another length, rotation or scale, or with an adapter",
        "locater what-if moments.safetensors --tokens 64",
    ),
    "trial": (
        "which method keeps your own model steady, and at which learning rates",
        "locater trial model --text text.txt --tokens 16 --steps 8 --seeds 2 --out trial.html",
    ),
    "train": (
        "train one model of the paper's, measured as it trains; run again to go on",
        "locater train --preset tiny --out run",
    ),
    "sweep": (
        "train a figure's or a question's settings with every seed; table and figure",
        "locater sweep tiny --out runs",
    ),
    "report": (
        "your own runs and audits on one page",
        "locater report model tuned --tokens 64 --out page.html",
    ),
    "reproduce": (
        "make every figure of the paper again, on one page",
        "locater reproduce --only fig1,fig4 --out out",
    ),
}

_HOMES = {
    "theory": "theory", "simulate": "theory", "audit": "audit", "compare": "audit",
    "probe": "probe", "moments": "probe", "explain": "reality", "theories": "reality",
    "what-if": "reality", "trial": "trial", "train": "lab", "sweep": "lab", "report": "report",
    "reproduce": "reproduce",
}  # fmt: skip
"""The module of each command, where it is `do_` and its name."""
_GO_ON = ("train", "sweep", "simulate", "reproduce", "trial")
"""Commands that keep what they did when they are stopped."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 is success, 1 an error that we explain, 2 a misuse of the command line."""
    try:
        code = _main(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if os.environ.get("LOCATER_TRACEBACK"):
            raise
        say(plain(f"error: {unforeseen(error)}"), is_error=True)
        if getattr(error, "errno", None) in FULL:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or it fails at exit
        return 1
    return code


def _main(arguments: list[str]) -> int:
    hush("--quiet" in arguments)
    arguments = [one for one in arguments if one != "--quiet"]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return 0 if arguments else 2
    if arguments[0] == "completion":
        print(_completion())
        return 0
    if arguments[0] == "--version":
        from locater import __version__

        print(__version__)
        return 0
    command = _COMMANDS.get(arguments[0])
    if command is None:
        say(f"error: {unknown('command', arguments[0], _COMMANDS)}", is_error=True)
        return 2
    try:
        _run(arguments[0], arguments[1:])
    except LocaterError as error:
        say(plain(f"error: {error}"), is_error=True)
        return 1
    except KeyboardInterrupt:
        again = "; run the same command again to go on" if arguments[0] in _GO_ON else ""
        say(f"interrupted{again}.", is_error=True)
        return 130
    except SystemExit as stop:  # tyro's help (0) and usage errors (2)
        if not stop.code:
            print(f"example:\n  {command[1]}")
        return stop.code if isinstance(stop.code, int) else 2 if stop.code else 0
    return 0


def _completion() -> str:
    """A script for bash and zsh: commands, then each one's flags, then files."""
    cases = []
    for name in _COMMANDS:
        with redirect_stdout(StringIO()) as help_text, suppress(SystemExit):
            _run(name, ["--help"])
        flags = sorted(set(re.findall(r"--[a-z][a-z-]+", help_text.getvalue())) | {"--quiet"})
        cases.append(f"{name}) words='{' '.join(flags)}' ;;")
    return _SCRIPT.replace("COMMANDS", " ".join(_COMMANDS)).replace("CASES", "\n    ".join(cases))


_SCRIPT = """\
[ -n "$ZSH_VERSION" ] && autoload -U +X bashcompinit && bashcompinit
_locater() {
  local words='' current=${COMP_WORDS[COMP_CWORD]}
  if [ "$COMP_CWORD" = 1 ]; then words='COMMANDS'
  elif [ "${current#-}" != "$current" ]; then case ${COMP_WORDS[1]} in
    CASES
  esac; fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}
complete -o default -F _locater locater"""


def _run(command: str, arguments: Sequence[str]) -> None:
    home = import_module(f"locater.cli.{_HOMES[command]}")
    getattr(home, f"do_{command.replace('-', '_')}")(arguments)


def _overview() -> str:
    width = max(map(len, _COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, (summary, _) in _COMMANDS.items()]
    return (
        "usage: locater COMMAND [OPTIONS]\n\n"
        "Where does a transformer's attention look, is it collapsing, and how do I control it?\n\n"
        "commands:\n" + "\n".join(lines) + "\n\n"
        "`locater COMMAND --help` lists a command's options and an example; --json prints data,\n"
        '--quiet says nothing but errors; `eval "$(locater completion)"` completes in bash and '
        "zsh.\n\n"
        f"example:\n  {_COMMANDS['theory'][1]}"
    )
