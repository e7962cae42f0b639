"""lm-eval scores an export and a server, offline and as documented, as the logits here do."""

import json
import math
import os
import re
import shlex
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from moejax.config.schema import MeshConfig
from moejax.step.state import Batch
from tests.cases import place
from tests.hf.golden import cases_of, loaded
from tests.hf.random_models import draw_all, write_folder

pytestmark = [pytest.mark.parity, pytest.mark.exhaustive]

ROOT = Path(__file__).parents[2]
TEXTS = ROOT / "tests" / "parity" / "lm_eval" / "local_text.jsonl"
BOS, EOS, PAD, VOCABULARY, LONGEST = 256, 257, 258, 259, 512
ALLOWED = 1e-5  # of a sum of nats; float32 on both sides


def byte_case() -> dict:
    """A golden Mixtral whose vocabulary is the bytes and the tokens around a text."""
    case = cases_of("mixtral")["even, llama3 positions"]
    config = case["config"] | {"vocab_size": VOCABULARY, "max_position_embeddings": LONGEST}
    config |= {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    table = {"model.embed_tokens.weight": [VOCABULARY, config["hidden_size"]]}
    assert config["tie_word_embeddings"]
    return {**case, "config": config, "tensors": case["tensors"] | table}


def write_tokenizer(folder: Path) -> Tokenizer:
    """Writes the files of a tokenizer of bytes, and returns it."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={x: i for i, x in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>", "<pad>"])
    assert (tokenizer.token_to_id("<bos>"), tokenizer.token_to_id("<eos>")) == (BOS, EOS)
    # It begins texts by itself, as Mixtral's and DeepSeek's do.
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer


def run(words: list[str], home: Path, **environment: str) -> str:
    """Runs a command from the repository's root, and returns what it printed."""
    settings = os.environ | {"HF_HOME": str(home), "JAX_PLATFORMS": "cpu"} | environment
    done = subprocess.run(words, cwd=ROOT, env=settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def documented(page: str, replaced: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """The environment and the words of the command on a page, with other values."""
    lines = (ROOT / "docs" / page).read_text().split("\n")
    (first,) = (n for n, line in enumerate(lines) if "lm-eval run" in line)
    last = next(n for n in range(first, len(lines)) if not lines[n].endswith("\\"))
    words = shlex.split(" ".join(line.rstrip("\\") for line in lines[first : last + 1]))
    settings = dict(word.split("=") for word in words if word.startswith("HF_"))
    assert settings == {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    words = words[len(settings) :]
    assert words[0] == ".venv-parity/bin/lm-eval"
    assert all(any(old in word for word in words) for old in replaced)
    olds = re.compile("|".join(map(re.escape, replaced)))
    words = [olds.sub(lambda found: replaced[found[0]], word) for word in words]
    return settings, [sys.executable, "-m", "lm_eval", *words[1:]]


def nats_of(tmp_path: Path, case: dict, texts: list[list[int]]) -> tuple[float, float]:
    """Nats of all texts, each after the token that begins one, and of the tokens that end them."""
    rows = 8
    token_BT = np.full((rows, LONGEST), EOS, np.int32)
    target_BT = np.full((rows, LONGEST), -1, np.int32)
    for row, ids in enumerate(texts):
        token_BT[row, 0] = BOS
        token_BT[row, 1 : len(ids) + 1] = ids
        target_BT[row, : len(ids) + 1] = [*ids, EOS]
    with_tokens = case | {"tokens": token_BT.tolist()}
    train_step, state = loaded(tmp_path / "again", with_tokens, MeshConfig())
    batch = place(train_step, Batch(token_BT, target_BT, np.zeros_like(token_BT)))
    nats_BT = np.asarray(train_step.target_nll(state, batch), np.float64)
    ends = sum(nats_BT[row, len(ids)] for row, ids in enumerate(texts))
    return nats_BT.sum() - ends, ends


def bits_per_byte(scores: Path) -> float:
    """The result of a command of lm-eval."""
    (results,) = scores.rglob("results_*.json")
    return json.loads(results.read_text())["results"]["local_text"]["bits_per_byte,none"]


@contextmanager
def served(run: str, *words: str):
    """The port of a server of a run."""
    command = [sys.executable, "-m", "moejax", "serve", "--run", run, "--port", "0", *words]
    settings = os.environ | {"JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(
        command, cwd=ROOT, env=settings, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        found = re.search(r"is served at http://127\.0\.0\.1:(\d+)/v1", line)
        assert found, line
        try:
            yield found[1]
        finally:
            server.terminate()
        assert server.wait(60) == 0


def test_lm_eval_scores_an_export_and_a_server_as_the_logits_here_do(tmp_path):
    case = byte_case()
    folder = write_folder(tmp_path / "model", case["config"], draw_all(case["tensors"]))
    tokenizer = write_tokenizer(folder)
    moejax = [sys.executable, "-m", "moejax"]
    imported, exported = str(tmp_path / "imported"), tmp_path / "exported"
    run([*moejax, "hf", "import", str(folder), "--out", imported], tmp_path)
    export = ["hf", "export", imported, "--out", str(exported), "--dtype", "float32"]
    run([*moejax, *export], tmp_path)

    own = {"exported/olmoe": str(exported)}
    replaced = own | {"scores": str(tmp_path / "scores")}
    settings, command = documented("models.md", replaced)
    run(command, tmp_path / "home", **settings)
    scored = bits_per_byte(tmp_path / "scores")

    texts = [json.loads(line)["text"] for line in TEXTS.read_text().splitlines()]
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    nats, ends = nats_of(tmp_path, case, ids)
    size = sum(len(text.encode()) for text in texts)
    assert scored * math.log(2) * size == pytest.approx(nats, rel=ALLOWED)

    told = run([*moejax, "eval", "--run", imported, "--data", str(TEXTS), "--json"], tmp_path)
    ours = json.loads(told)
    assert ours["bytes"] == size
    assert ours["nats"] == pytest.approx(nats + ends, rel=ALLOWED)

    with served(imported, "--model-name", "olmoe", "--slots", "2", "--positions", "256") as port:
        replaced = own | {"scores": str(tmp_path / "served"), ":8000": f":{port}", "2048": "256"}
        settings, command = documented("guide/serve.md", replaced)
        run(command, tmp_path / "home", **settings)
    scored = bits_per_byte(tmp_path / "served")
    assert scored * math.log(2) * size == pytest.approx(nats, rel=ALLOWED)
