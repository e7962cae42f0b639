"""The list of commands, their help, and their completion in a real shell."""

import os
import re
import shutil
import subprocess
import sys
from importlib import import_module

import pytest

from moejax import __main__, __version__, completion
from moejax.commands import COMMANDS
from moejax.config.fields import fields

LINES, WIDTH = 40, 80  # of a small window


def moejax(*words):
    """Returns (exit code, output, errors) of the console script."""
    found = subprocess.run(
        [sys.executable, "-m", "moejax", *words], capture_output=True, text=True, timeout=60
    )
    return found.returncode, found.stdout, found.stderr


def test_the_list_of_commands_names_all_and_their_modules_have_what_it_says():
    code, shown, _ = moejax("--help")
    assert code == 0
    for name, command in COMMANDS.items():
        assert f"  {name} " in shown
        assert command.summary in shown
        assert callable(import_module(command.module).main)
        assert import_module(command.parser_module).parser().prog == f"moejax {name}"


def test_version_and_unknown_commands():
    assert moejax("--version") == (0, f"moejax {__version__}\n", "")
    code, _, errors = moejax("trane")
    assert (code, errors.count("\n")) == (2, 1)
    assert "no command 'trane'. Known: train, " in errors


def parser_of(name):
    """The parser of a command, as `hf export`."""
    if name == "plan probe":
        return import_module("moejax.plan.probe.command").parser()
    first, *inner = name.split()
    found = import_module(COMMANDS[first].parser_module).parser()
    return found._subparsers._group_actions[0].choices[inner[0]] if inner else found


@pytest.mark.parametrize("name", [*COMMANDS, "hf import", "hf export", "plan probe", ""])
def test_help_fits_a_screen_and_has_an_example(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    shown = parser_of(name).format_help() if name else __main__.usage()
    lines = shown.splitlines()
    assert len(lines) <= LINES
    assert [line for line in lines if len(line) > WIDTH] == []
    _, example = re.split(r"^examples?:$", shown, maxsplit=1, flags=re.MULTILINE)
    assert f"moejax {name}" in example
    assert "python -m" not in shown


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "hf"])
def test_every_command_can_show_a_traceback(name):
    known = {flag for action in parser_of(name)._actions for flag in action.option_strings}
    assert "--debug" in known or name == "prepare"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "tiny"], "Got tiny. Did you mean --config tiny?"),
        (["train", "my.yaml"], "Got my.yaml. Did you mean --config my.yaml?"),
        (["train", "--config", "tiny", "--dry-run"], "Got --dry-run. Did you mean --dry_run?"),
        (["train", "num_steps=5"], "Did you mean --config.train.num_steps=5?"),
        (["train", "--mesh.expert", "2"], "Did you mean --config.mesh.expert=VALUE?"),
        (["train", "--colour", "2"], "Got --colour. Leave it out."),
        (["prepare", "a", "--text_field", "b"], "Did you mean --text-field?"),
        (["plan", "--as", "megatorn"], "It is one of maxtext, megatron, torchtitan. Did you mean"),
        (["generate", "--run", "x"], "one of the arguments --prompt --prompts is required"),
        (["eval"], "the following arguments are required: --run. moejax eval --help says more."),
        (["--print-completion", "fsh"], "Got fsh. It is one of bash, zsh, tcsh, fish"),
        (["hf", "exportt", "x"], "Did you mean export?"),
        (["traim"], "Did you mean train?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_words_are_one_line_that_says_what_was_meant(words, said, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["moejax", *words])
    try:
        code = __main__.main()
    except SystemExit as ended:
        code = ended.code
    errors = capsys.readouterr().err
    assert code == 2
    assert errors.startswith("moejax: error: ")
    assert errors.count("\n") == 1
    assert said in errors


def test_help_needs_no_jax():
    """So that it comes at once."""
    script = "import sys; sys.argv = ['moejax', '--help']; import moejax.__main__ as m; m.main()"
    script += "; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("completion") / "moejax.bash"
    code, shown, errors = moejax("--print-completion", "bash")
    assert (code, errors) == (0, "")
    path.write_text(shown)
    return path


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        (["tr"], {"train"}),
        (["re"], {"report"}),
        (["train", "--config.mesh.exp"], {"--config.mesh.expert", "--config.mesh.expert_weights"}),
        (["train", "--config.model.dtype", ""], {"float32", "bfloat16"}),
        (["report", "--l"], {"--live"}),
        (["plan", "--config.moe.num_ex"], {"--config.moe.num_experts"}),
        (["plan", "pro"], {"probe"}),
        (["plan", "probe", "--qu"], {"--quick"}),
        (["hf", "ex"], {"export"}),
        (
            ["hf", "import", "--config.mesh.exp"],
            {"--config.mesh.expert", "--config.mesh.expert_weights"},
        ),
        (["hf", "export", "--dtype", "b"], {"bfloat16"}),
        (["prepare", "--form"], {"--format"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bash_completes(script, typed, wanted):
    assert set(completions(script, typed)) == wanted


def completions(script, typed):
    """What bash offers for the last of the words."""
    words = " ".join(f"'{word}'" for word in ["moejax", *typed])
    command = (
        f"source {script}; COMP_WORDS=({words}); COMP_CWORD={len(typed)}; "
        f"COMP_LINE='moejax {' '.join(typed)}'; COMP_POINT=${{#COMP_LINE}}; "
        "function=$(complete -p moejax | sed 's/.*-F \\([^ ]*\\).*/\\1/'); "
        f"$function moejax '{typed[-1]}' ''; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    env = {**os.environ, "LC_ALL": "C"}
    found = subprocess.run(
        ["bash", "--norc", "-c", command], capture_output=True, text=True, timeout=60, env=env
    )
    assert found.stderr == ""
    return [word.strip() for word in found.stdout.split()]


def test_every_setting_can_be_completed():
    whole = completion.whole_parser()
    train = next(a for a in whole._actions if a.dest == "command").choices["train"]
    known = {name for action in train._actions for name in action.option_strings}
    assert {f"--config.{name}" for name in fields()} <= known
    assert "usage: moejax" in __main__.usage()
