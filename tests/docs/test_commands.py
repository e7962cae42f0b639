"""Commands of README and guides: each is read by its own parser, and run where that can be.

`checks.py` checks flags, settings and files of all of them. What is not run has a reason in
`NOT_RUN`. Quick ones run in `make test`, the others, which compile or train more, in
`make test-all CASES=every`.
"""

import ast
import re
import subprocess
from fnmatch import fnmatch

import pytest

from tests.docs.checks import BadCommandError, Made, check_command, note_file, parsed_by
from tests.docs.pages import ROOT, Block, Command, blocks_of, commands_of, messages_in, paths_in
from tests.docs.running import run_page

GUIDES = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs/guide").glob("*.md"))]
PAGES = ["README.md", "docs/index.md", *GUIDES, "docs/models.md"]
PAGES += [str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs/api").glob("*.md"))]

# By page or command: why a command is checked and not run.
NOT_RUN = {
    "README.md:*": "a tour: the guides run the same commands",
    "docs/models.md:*": "docs/guide/model.md and tests/convert run them",
    "*sbatch *": "needs Slurm; tests/launch/test_clusters.py starts one",
    "*launch/ssh *": "needs hosts; tests/launch/test_ssh.py starts an sshd",
    "*launch/host *": "needs hosts; tests/launch/test_host.py starts four",
    "*launch/kubernetes *": "a manifest; tests/launch/test_kubernetes.py",
    "*kubectl *": "needs a cluster",
    "*launch/tpu_pod *": "needs TPUs; tests/launch/test_tpu_pod.py has stand-ins",
    "*launch/emulate *": "needs root, ip and tc; tests/launch and benchmarks run it",
    "*launch/local *": "several processes: tests/integration/test_several_processes.py",
    "*pip install*": "needs a package index",
    "*--replay_step *": "a step of a longer run; tests/train/test_replay.py",
    "*make aot*": "an environment of its own, in CI",
    "*moejax.aot *": "compilers of .venv-aot, and minutes; tests/aot",
    "*make test*": "runs tests",
    "*mesh.platform=gpu*": "needs a GPU",
    "*--live*": "serves until Ctrl-C; tests/report/test_serve.py",
    "*runs/a runs/b*": "runs of the reader; tests/report compares runs",
    "*http.server*": "serves until Ctrl-C",
    "*moejax serve*": "serves until Ctrl-C; tests/serve/endpoint",
    "docs/guide/serve.md:*lm-eval*": "needs a server; tests/parity/test_lm_eval.py",
    "*xprof *": "a program of another project",
    "*jupyter *": "serves until Ctrl-C; make notebooks runs the notebooks",
    "*torchrun *": "starts another trainer",
    "*plan --hf *": "models that others published; tests/plan/test_published.py",
    "*plan_picture*": "draws the page that the command before wrote",
    "*--as maxtext*": "minutes; tests/plan/test_command.py runs it on a small model",
}
# What `make test` runs; `make test-all CASES=every` runs all that can be.
QUICK = {
    "docs/guide/first_run.md": ("*: make train", "*--settings*", "*--print_config*"),
    "docs/guide/data.md": ("*moejax prepare*",),
    "docs/guide/cluster.md": ("*moejax doctor*",),
    "docs/guide/plan.md": ("*mixtral_8x7b.py --dry_run",),
    "docs/guide/model.md": ("*mine.yaml --dry_run",),
}


def reason_not_to_run(command: Command) -> str | None:
    """Why a command is only checked; None if it runs."""
    text = str(command)
    return next((why for pattern, why in NOT_RUN.items() if fnmatch(text, pattern)), None)


def all_blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks_of(page)]


@pytest.fixture(scope="module")
def made_anywhere(tmp_path_factory):
    """What the commands of all pages make, so that a page may go on with another one's files."""
    made = Made()
    for block in all_blocks():
        if block.kind == "file":
            note_file(block, made, tmp_path_factory.getbasetemp() / "shown")
    left = [command for block in all_blocks() for command in commands_of(block)]
    for _ in range(2):  # a page may stand before the one that it goes on from
        commands, left = left, []
        for command in commands:
            try:
                check_command(command, made, made)
            except BadCommandError:  # told by its own page's test
                left.append(command)
    return made


@pytest.mark.parametrize("page", PAGES)
def test_flags_settings_and_files_of_every_command_are_known(page, made_anywhere, tmp_path):
    made, wrong = Made(), []
    for block in blocks_of(page):
        if block.kind == "file":
            note_file(block, made, tmp_path)
        for command in commands_of(block):
            try:
                check_command(command, made, made_anywhere)
            except BadCommandError as error:
                wrong.append(str(error))
    assert not wrong, "\n".join(wrong)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
def test_git_ignores_what_the_commands_make_and_no_file_of_the_project(made_anywhere):
    def ignored(paths: list[str], *flags: str) -> set[str]:
        command = ["git", "check-ignore", "--stdin", *flags]
        text = "\n".join(paths)
        found = subprocess.run(command, input=text, capture_output=True, text=True, cwd=ROOT)
        assert found.returncode in (0, 1), found.stderr
        return set(found.stdout.splitlines())

    written = {block.name for block in all_blocks() if block.kind == "file"}  # by the reader
    made = {path for path in made_anywhere.paths - written if not path.startswith("/")}
    assert {"report.html", "plan.json", "imported/olmoe"} <= made
    assert made - ignored(sorted(made)) == set()
    command = ["git", "ls-files"]
    tracked = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    assert ignored(tracked.splitlines(), "--no-index") == set()


@pytest.mark.parametrize("page", PAGES)
def test_python_of_every_page_is_python(page):
    for block in blocks_of(page):
        if block.kind == "python":
            ast.parse(block.text, f"{block.page}:{block.line}")


def test_every_reason_not_to_run_is_of_some_command():
    texts = [str(command) for block in all_blocks() for command in commands_of(block)]
    for pattern in NOT_RUN:
        assert any(fnmatch(text, pattern) for text in texts), f"{pattern} matches no command"
    for page, patterns in QUICK.items():
        for pattern in patterns:
            assert any(fnmatch(text, pattern) for text in texts if text.startswith(page)), pattern


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in GUIDES if page in QUICK])
@pytest.mark.usefixtures("unchecked_annotations")
def test_quick_commands_run(page, tmp_path, monkeypatch, capsys):
    def wanted(command):
        return reason_not_to_run(command) is None and any(
            fnmatch(str(command), pattern) for pattern in QUICK[page]
        )

    assert run_page(page, wanted, tmp_path, monkeypatch, capsys, whole=False) > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("page", [*GUIDES, *(page for page in PAGES if "/api/" in page)])
@pytest.mark.usefixtures("unchecked_annotations")
def test_commands_and_python_run(page, tmp_path, monkeypatch, capsys):
    def wanted(command):
        return reason_not_to_run(command) is None

    run_page(page, wanted, tmp_path, monkeypatch, capsys, whole=True)


@pytest.mark.parametrize("page", [*GUIDES, "CONTRIBUTING.md"])
def test_paths_in_code_exist(page):
    # A path may be one that the reader writes, which is in capitals.
    missing = [
        path
        for path in paths_in(page)
        if not re.search(r"NEW|NAME|mine\.", path) and not list(ROOT.glob(path.partition(":")[0]))
    ]
    assert not missing


def texts_of_the_code() -> list[str]:
    """All texts of the code; what an f-string computes is `...`."""
    found = []
    for path in [*(ROOT / "moejax").rglob("*.py"), *(ROOT / "launch").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    str(p.value) if isinstance(p, ast.Constant) else "..." for p in node.values
                ]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def says(texts: list[str], message: str) -> bool:
    """Whether a text has the parts of a message, in order."""
    parts = [re.escape(part.strip()) for part in message.split("...") if part.strip()]
    pattern = re.compile(".*".join(parts), re.DOTALL)
    return any(pattern.search(text) for text in texts)


def test_messages_that_are_quoted_are_messages_of_the_code():
    messages, texts = messages_in("docs/guide/trouble.md"), texts_of_the_code()
    assert len(messages) > 30
    assert [message for message in messages if not says(texts, message)] == []
    assert not says(texts, "mesh ... wants ... devices"), "the test can fail"


def test_flags_in_running_text_are_flags():
    """`moejax COMMAND --flag`, outside blocks."""
    for page in PAGES:
        for span in re.findall(r"`(moejax [^`\n]+)`", (ROOT / page).read_text()):
            command = Command(page, 0, span, tuple(span.split()))
            flags = [word for word in command.words if word.startswith("--")]
            if (
                not flags
                or flags[0] == "--help"
                or "--" in command.words
                or span.startswith("moejax COMMAND")
            ):
                continue
            known = flags_of(command.words[1:])
            for flag in flags:
                assert flag.startswith("--config.") or flag in known, f"{page}: {span}"


def flags_of(words: tuple[str, ...]) -> set[str]:
    """The flags of the command that words begin with."""
    from moejax.__main__ import main as moejax

    # Enough for each command to be read to its end.
    needed = {
        ("train",): [],
        ("prepare",): ["FILE"],
        ("eval",): ["--run", "RUN"],
        ("generate",): ["--run", "RUN", "--prompt", "TEXT"],
        ("serve",): ["--run", "RUN"],
        ("hf", "import"): ["PATH", "--out", "OUT"],
        ("hf", "export"): ["RUN", "--out", "OUT"],
        ("upcycle",): ["RUN", "--out", "OUT"],
        ("plan", "probe"): ["--out", "FILE"],
        ("plan",): [],
        ("sites",): ["FOLDER"],
        ("doctor",): [],
        ("report",): ["RUN"],
        ("aot",): ["--config", "FILE"],
    }
    name = next(name for name in (words[:2], words[:1]) if name in needed)
    return parsed_by(moejax, "moejax", [*name, *needed[name]])[1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (".venv/bin/moejax train --config tiny --dryrun", "unrecognized arguments: --dryrun"),
        (".venv/bin/moejax train --config tiny --dry", "no flag --dry"),
        (".venv/bin/moejax train --config tiny --config.model.wide=8", "unknown field"),
        (".venv/bin/moejax train --config tiny --config.mesh.expert=3", "expert axis of 3"),
        (".venv/bin/moejax train --config configs/huge.py", "nothing makes configs/huge.py"),
        (".venv/bin/moejax eval --run runs/nowhere", "nothing makes runs/nowhere"),
        ('make train ARGS="--config.train.steps=5"', "unknown field"),
        ("make fit", "no target fit"),
        ("launch/local --procs 2 -- .venv/bin/moejax train --config tiny", "--procs"),
        ("launch/local -- .venv/bin/moejax train --config tiny --fast", "--fast"),
        ("sbatch launch/slurm.sbatch .venv/bin/moejax train --config tiny --fast", "--fast"),
        (".venv/bin/pip install -e '.[cuda14]'", "no extra cuda14"),
        (".venv/bin/pytorch", "no check for"),
    ],
)
def test_a_wrong_command_is_told(text, said):
    (command,) = commands_of(Block("page.md", 1, "commands", text))
    with pytest.raises(BadCommandError, match=re.escape(said)):
        check_command(command, Made(), Made())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (".vnv/bin/moejax train --config tiny", "looks like a command"),
        ("moejax train --config tiny", "looks like a command"),
        ("make train\n    mak test", "begins with no known program"),
    ],
)
def test_a_command_with_an_unknown_program_is_not_taken_for_output(text, said):
    (block,) = blocks_of("page.md", f"Text.\n\n    {text}\n")
    with pytest.raises(ValueError, match=said):
        commands_of(block)
