"""``pyringar completion``: print a script that completes the command line in bash or zsh."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from pyringar.cli.parser import Parser

_TARGETS = {"audit target": ("gloo", "ringar", "nccl")}  # no `choices`: a function is a target, too
_EPILOG = """\
Add this line to ~/.bashrc, with zsh in place of bash to ~/.zshrc:
  eval "$(pyringar completion bash)"
"""
_SCRIPT = """\
_pyringar() {{
    local choices= word="${{COMP_WORDS[COMP_CWORD]}}"
    case "${{COMP_CWORD}}:${{COMP_WORDS[1]}}:${{COMP_WORDS[COMP_CWORD-1]}}" in
        1:*) choices="{commands}" ;;
{cases}
    esac
    COMPREPLY=($(compgen -W "$choices" -- "$word"))
}}
complete -o default -F _pyringar pyringar
"""
# zsh reads bash completions through bashcompinit.
_ZSH_START = """\
autoload -U +X compinit && compinit
autoload -U +X bashcompinit && bashcompinit
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "completion",
        help="print a completion script for bash or zsh",
        description="Print a shell script that completes commands, options and their choices.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=("bash", "zsh"), help="the shell that reads the script")


def run(args: argparse.Namespace) -> int:
    from pyringar.cli import make_parser

    parsers = make_parser()[1]
    cases = [f'        *:help:*) choices="{" ".join(parsers)}" ;;']
    for name, parser in parsers.items():
        cases += _cases(name, parser)
    commands = " ".join(["help", *parsers, "--help", "--version"])
    start = _ZSH_START if args.shell == "zsh" else ""
    print(start + _SCRIPT.format(commands=commands, cases="\n".join(cases)), end="")
    return 0


def _cases(name: str, parser: Parser) -> Iterator[str]:
    names: list[str] = []
    options: list[str] = []
    for action in parser._actions:
        choices = " ".join(map(str, action.choices or _TARGETS.get(f"{name} {action.dest}") or ()))
        names += [] if action.option_strings else choices.split()
        options += [option for option in action.option_strings if option != "-h"]
        if action.nargs != 0:
            for option in action.option_strings:
                yield f'        *:{name}:{option}) choices="{choices}" ;;'
    # Words that are no options may be file names, which the shell completes by default.
    yield f'        *:{name}:*) choices="{" ".join(names)}"'
    yield f'            [[ "$word" != -* ]] || choices="{" ".join(options)}" ;;'
