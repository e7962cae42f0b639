"""Runs the commands of a page in a folder of its own, in this process, with little to do."""

import io
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest

from moejax.__main__ import main as moejax
from tests.docs.checks import recipe
from tests.docs.pages import ASSIGNED, ROOT, Block, Command, blocks_of, commands_of
from tests.hf.golden import cases_of, golden_folder

# In place of what a command does not set, so that a run takes seconds.
TRAIN = {
    "train.num_steps": 2,
    "train.log_every": 1,
    "train.eval_every": "none",
    "train.eval_batches": 1,
    "train.sample_tokens": 0,
    "checkpoint.save_every": "none",
    "optimizer.warmup_steps": 1,
}
PROFILED = {"profile.num_steps": 1}
TINY = {"model.num_layers": 1, "data.sequence_length": 32}
# In place of what it sets, for the same reason.
FEWER = {
    r"--config\.train\.num_steps=\d+": "--config.train.num_steps=2",
    r"--config\.profile\.start_step=\d+": "--config.profile.start_step=1",
    r"--config\.lora\.rank=16": "--config.lora.rank=4",  # the model's smallest matrix is 8 wide
    r"none,int4\+feedback@100": "none,int4+feedback@1",
}
ROWS = 300  # so that a hundredth of them, held out, is some
# Commands of other pages from which a page goes on.
BEFORE = {"docs/guide/run.md": "make train"}
TEXT = "A token goes to its expert, and what the expert says comes back. " * 4
# What the pages take for the reader's own; the words are those of the tokenizer below.
WORDS = sorted(set(re.findall(r"\w+|[^\w\s]", TEXT)))


def run_page(
    page: str,
    wanted: Callable[[Command], bool],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    whole: bool,
) -> int:
    """Runs the wanted commands of a page. Returns how many ran.

    Args:
      whole: run its Python too, and what it goes on from.
    """
    give_files(folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "200")
    names: dict[str, object] = {}
    count, out = 0, ""
    if page in BEFORE and whole:
        text = BEFORE[page]
        run(Command(page, 0, text, tuple(text.split())), monkeypatch, capsys)
    for block in blocks_of(page):
        if block.kind == "file":
            path = folder / block.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text if path.suffix != ".jsonl" else many_rows(block.text))
        elif block.kind == "python" and whole:
            run_python(block, names)
        elif block.kind == "text" and out:
            assert_shown(block, out)
        out = ""
        for command in commands_of(block):
            if wanted(command):
                out = run(command, monkeypatch, capsys)
                count += 1
    return count


def many_rows(text: str) -> str:
    """Returns the rows that a page shows, and more of the kind of the first."""
    first = text.splitlines()[0]
    return text + "".join(f"{first.replace('mesh', f'mesh {n}')}\n" for n in range(ROWS))


def run(command: Command, monkeypatch, capsys) -> str:
    """Runs a command of moejax, maybe with a file as its input. Returns what it printed."""
    words = list(command.words)
    if words[0] == "make":
        words = recipe(words[1:])
    if "|" in words:
        assert words[0] == "cat", command
        given = io.TextIOWrapper(io.BytesIO(Path(words[1]).read_bytes()))
        monkeypatch.setattr(sys, "stdin", given)
        words = words[words.index("|") + 1 :]
    target = None
    if ">" in words:
        words, target = words[: words.index(">")], words[words.index(">") + 1]
    while ASSIGNED.match(words[0]):
        words = words[1:]
    if PurePosixPath(words[0]).name == "moejax":
        words = words[1:]
    else:
        assert words[1] == "-m", command
        words = [words[2].removeprefix("moejax."), *words[3:]]
    words = [word if "*" not in word or "=" in word else _matches(word) for word in words]
    words = [part for word in words for part in (word if isinstance(word, list) else [word])]
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["moejax", *shorter(words)])
    code = moejax()
    printed = capsys.readouterr()
    assert code == 0, f"{command}\n{printed.out}\n{printed.err}"
    if target is not None:
        Path(target).write_text(printed.out)
    return printed.out


def _matches(pattern: str) -> list[str]:
    return sorted(map(str, Path().glob(pattern)))


def shorter(words: list[str]) -> list[str]:
    """Returns a command that does the same with less: few steps, one layer, short sequences."""
    for pattern, fewer in FEWER.items():
        words = [re.sub(pattern, fewer, word) for word in words]
    if words[0] == "generate":
        return [*words, "--tokens", "3"]
    looked_at = {"--settings", "--print_config", "--dry_run"} & set(words)
    if words[0] != "train" or looked_at:
        return words
    settings = TRAIN | (TINY if any(word.endswith("tiny.py") for word in words) else {})
    given = " ".join(words)
    if "profile.start_step" in given:
        settings |= PROFILED
    return words + [
        f"--config.{k}={v}" for k, v in settings.items() if f"--config.{k}=" not in given
    ]


def run_python(block: Block, names: dict[str, object]) -> None:
    """Runs the Python of a block with few steps and one layer."""
    small = ", ".join(f'"{k}={v}"' for k, v in (TRAIN | TINY).items())
    code = block.text.replace('"train.num_steps=50"', small)
    exec(compile(code, f"{block.page}:{block.line}", "exec"), names)


def assert_shown(block: Block, out: str) -> None:
    """What a page shows below a command is what the command printed, but for frames and spaces."""

    def plain(text):
        return " ".join(re.sub(r"[│┃|]", " ", text).split())

    printed = [plain(line) for line in out.splitlines()]
    for line in block.text.splitlines():
        if plain(line) != "...":
            assert plain(line) in printed, f"{block.page}: {line!r} is not in\n{out}"


def give_files(folder: Path) -> None:
    """Writes what the pages take for the reader's own, and copies the configs."""
    shutil.copytree(ROOT / "configs", folder / "configs", ignore=shutil.ignore_patterns("__*"))
    for name in ("books", "later", "new"):
        (folder / name).mkdir()
        for number in range(ROWS if name == "books" else 4):
            (folder / name / f"{number}.txt").write_text(f"{name} {number}. " + TEXT)
    rows = [json.dumps({"body": f"{number}. " + TEXT}) for number in range(ROWS)]
    (folder / "articles.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "questions.txt").write_text("A token\nthe expert\n")
    model = folder / "downloads" / "OLMoE-1B-7B-0924"
    golden_folder(model, cases_of("olmoe")["even, linear positions, biases"])
    give_tokenizer(model)


def give_tokenizer(model: Path) -> None:
    """Writes a tokenizer with a chat template, whose ids the model has."""
    import tokenizers
    from tokenizers import models, pre_tokenizers

    vocab = {word: i for i, word in enumerate(["<unk>", "<|user|>", "<|endoftext|>", *WORDS])}
    made = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(["<|user|>", "<|endoftext|>"])
    made.save(str(model / "tokenizer.json"))
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }} "
        "{% else %}{{ m.content }}<|endoftext|>{% endif %}{% endfor %}"
    )
    (model / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": template, "eos_token": "<|endoftext|>"})
    )
