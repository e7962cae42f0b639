"""The list of commands, their help, and their completion in a real shell."""

import os
import shutil
import subprocess
import sys
from importlib import import_module

import pytest

from moejax import __main__, __version__, completion
from moejax.commands import COMMANDS
from moejax.config.fields import fields

SCREEN = 55  # lines of a common window


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


@pytest.mark.parametrize("name", [*COMMANDS, "plan probe"])
def test_help_fits_a_screen_and_has_an_example(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    module = "moejax.plan.probe.command" if name == "plan probe" else COMMANDS[name].parser_module
    shown = import_module(module).parser().format_help()
    assert "examples:" in shown
    assert f"moejax {name}".split()[-1] in shown.split("examples:")[1]
    assert len(shown.splitlines()) <= SCREEN


def test_help_needs_no_jax():
    """So that it comes at once."""
    script = "import sys; sys.argv = ['moejax', '--help']; import moejax.__main__ as m; m.main()"
    script += "; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("completion") / "moejax.bash"
    code, shown, errors = moejax("completion", "bash")
    assert (code, errors) == (0, "")
    path.write_text(shown)
    return path


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
    assert {word.strip() for word in found.stdout.split()} == wanted


def test_every_setting_can_be_completed():
    whole = completion.whole_parser()
    train = next(a for a in whole._actions if a.dest == "command").choices["train"]
    known = {name for action in train._actions for name in action.option_strings}
    assert {f"--config.{name}" for name in fields()} <= known
    assert "usage: moejax" in __main__.usage()
