"""Does fine-tuning learn a kind of task that the model has never read, and how far do adapters get?

By the commands of a user alone: a small model is trained on the source of Python's library, with a
tokenizer made from it; exported in bfloat16, as models are released, to a folder of safetensors, to
which a chat template is added; imported from there; and fine-tuned in bfloat16 on conversations, in
full and by adapters, equal tokens each. A conversation asks for letters in the order of the
alphabet. The sets of letters of held-out questions are in no training question. Settings were
chosen in trials with other seeds and other questions; the bars of finetune_page.py were written
before the first run. What is finished in the folder of --work is not repeated. Writes finetune.json
and finetune.md.

    python -m benchmarks.cpu.finetune --out benchmarks/results
"""

import argparse
import hashlib
import json
import math
import os
import random
import re
import string
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.cpu.finetune_page import page
from benchmarks.machine import ROOT, stamp
from moejax.data.corpus import documents

EOS = "<|endoftext|>"
TEMPLATE = """\
{{- '<|endoftext|>' }}{% for m in messages %}
{{- 'Question: ' + m.content + '\\n' if m.role == 'user' else
    'Answer: ' + m.content + '<|endoftext|>' }}
{%- endfor %}{% if add_generation_prompt %}{{ 'Answer:' }}{% endif %}
"""
FEWEST, MOST = 4, 8  # letters of a question
HELD_OUT_ONE_IN = 10  # sets of letters
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
STATE = ("weights", "adapters", "frozen weights", "gradients", "optimizer state")


@dataclass(frozen=True)
class Setup:
    """What is trained. Words are settings of `moejax train`."""

    vocabulary: int = 1024
    questions: int = 20_000
    held_out: int = 500
    seeds: tuple[int, ...] = (0, 1, 2)
    ranks: tuple[int, ...] = (4, 16)
    model: tuple[str, ...] = (
        "model.width=128",
        "model.num_layers=4",
        "model.num_heads=4",
        "model.num_kv_heads=2",
        "model.head_width=32",
        "moe.num_experts=16",
        "moe.experts_per_token=2",
        "moe.expert_hidden=128",
    )
    pretraining: tuple[str, ...] = (
        "train.num_steps=1000",
        "train.batch_sequences=16",
        "data.sequence_length=256",
        "optimizer.learning_rate=2e-3",
        "optimizer.warmup_steps=50",
    )
    tuning: tuple[str, ...] = (
        "train.num_steps=400",
        "train.batch_sequences=8",
        "data.sequence_length=512",
        "optimizer.warmup_steps=30",
    )
    full_rate: float = 3e-3
    adapter_rate: float = 5e-3


def moejax(place: Path, *words: Any) -> str:
    """Runs a command of moejax in a folder; returns what it printed."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    command = [sys.executable, "-m", "moejax", *map(str, words)]
    done = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"moejax {' '.join(map(str, words))}\nended with {done.returncode}\n{done.stderr}")
    return done.stdout


def settings(*words: str) -> list[str]:
    """Returns settings as a command takes them."""
    return [f"--config.{word}" for word in words]


def write_tokenizer(path: Path, texts: list[str], size: int) -> None:
    """Writes a byte-level BPE tokenizer of so many ids, learned from texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))


def is_held_out(letters: list[str]) -> bool:
    """Whether a set of letters is kept from training."""
    digest = hashlib.sha256("".join(sorted(letters)).encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def write_questions(path: Path, count: int, *, held_out: bool, seed: int) -> list[dict[str, str]]:
    """Writes conversations as JSONL, and returns them: a prompt and its completion each."""
    draw, rows = random.Random(seed), {}
    while len(rows) < count:
        letters = draw.sample(string.ascii_lowercase, draw.randint(FEWEST, MOST))
        if is_held_out(letters) == held_out:
            question = f"sort {' '.join(letters)}"
            rows[question] = {"prompt": question, "completion": " ".join(sorted(letters))}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows.values()))
    return list(rows.values())


def pretrain(place: Path, setup: Setup) -> None:
    """Trains the first model, exports it, adds the template, and imports it; once."""
    if not (place / "data/text.train.bin").exists():
        texts = [text.decode() for part in documents() for text in part]
        (place / "text.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
        write_tokenizer(place / "tokenizer.json", texts, setup.vocabulary)
        files = ("--tokenizer", "tokenizer.json", "--eval-fraction", 0.05, "--out", "data/text")
        moejax(place, "prepare", "text.jsonl", *files)
    (place / "base.json").write_text('{"run_dir": "runs/base"}')
    words = (
        f"model.vocab_size={setup.vocabulary}",
        "data.source=tokens",
        "data.train_files=data/text.train.bin",
        "data.eval_files=data/text.eval.bin",
        "train.sample_tokens=0",
    )
    words += (*setup.model, *setup.pretraining)
    moejax(place, "train", "--config", "base.json", *settings(*words))
    if not (place / "exported").exists():
        moejax(place, "hf", "export", "runs/base", "--out", "exported", "--dtype", "bfloat16")
    (place / "exported/chat_template.jinja").write_text(TEMPLATE)
    if not (place / "imported").exists():
        moejax(place, "hf", "import", "exported", "--out", "imported")


def prepare_questions(place: Path, setup: Setup, seed: int = 0) -> list[dict[str, str]]:
    """Writes the token files of the task; returns the held-out questions."""
    write_questions(place / "train.jsonl", setup.questions, held_out=False, seed=seed)
    asked = write_questions(
        place / "held_out.jsonl", setup.held_out, held_out=True, seed=seed + 10_000
    )
    (place / "prompts.txt").write_text("".join(row["prompt"] + "\n" for row in asked))
    for name in ("train", "held_out"):
        words = ("--chat", "--tokenizer", "imported/hf/tokenizer.json", "--eval-fraction", 0)
        moejax(place, "prepare", f"{name}.jsonl", *words, "--out", f"data/{name}", "--overwrite")
    return asked


def tuning(setup: Setup, rank: int | None, seed: int) -> list[str]:
    """Returns the words of a fine-tuning; rank None trains all weights."""
    rate = setup.full_rate if rank is None else setup.adapter_rate
    words = (
        f"run_dir=runs/{'full' if rank is None else f'rank{rank}'}_{seed}",
        f"optimizer.learning_rate={rate}",
        "data.train_files=data/train.train.bin",
        "data.eval_files=data/held_out.train.bin",
        f"train.seed={seed}",
        "train.sample_tokens=0",
        *setup.tuning,
    )
    adapters = () if rank is None else (f"lora.rank={rank}", "lora.base_dtype=bfloat16")
    return ["--config", "imported/config.json", *settings(*words, *adapters)]


def state_bytes(table: str) -> dict[str, float]:
    """Returns bytes by kind of training state, as the table of `moejax train --dry_run` has them.

    They are of one device, and rounded to a tenth of their unit.
    """
    found = {}
    for line in table.splitlines():
        row = re.search(r"([a-z ]+?)(?: \(.*\))?, a device\W+([\d.]+) (\w+)", line)
        if row and row[1].strip() in STATE:
            found[row[1].strip()] = float(row[2]) * UNITS[row[3]]
    return found


def measure_run(place: Path, run: str, asked: list[dict[str, str]]) -> dict[str, Any]:
    """Returns the held-out likelihood of answers, and the share of exact ones, of a run."""
    evaluation = ("--data", "data/held_out.train.bin", "--json")
    # In long sequences few conversations are cut.
    long = settings("data.sequence_length=4096", "train.batch_sequences=1")
    found = json.loads(moejax(place, "eval", "--run", run, *evaluation, *long))
    prompts = ("--chat", "--prompts", "prompts.txt", "--tokens", 4 * MOST, "--json")
    batch = settings("train.batch_sequences=100")
    answers = json.loads(moejax(place, "generate", "--run", run, *prompts, *batch))["texts"]
    pairs = list(zip(answers, asked, strict=True))
    exact = sum(got["text"].strip() == row["completion"] for got, row in pairs)
    return {
        "answer_tokens": found["tokens"],
        "bits_per_token": found["nats_per_token"] / math.log(2),
        "exact": exact / len(asked),
        "examples": [[row["prompt"], got["text"].strip()] for got, row in pairs[:5]],
    }


def fine_tune(
    place: Path, setup: Setup, rank: int | None, seed: int, asked: list[dict[str, str]]
) -> dict[str, Any]:
    """Fine-tunes once; returns what it is worth, what it holds, and the seconds of the command."""
    words = tuning(setup, rank, seed)
    state = state_bytes(moejax(place, "train", *words, "--dry_run"))
    began = time.perf_counter()
    moejax(place, "train", *words)
    seconds = time.perf_counter() - began
    run = words[2].removeprefix("--config.run_dir=")
    return {**measure_run(place, run, asked), "state": state, "seconds": seconds}


def held_out_text(place: Path, setup: Setup, run: str) -> float:
    """Returns bits per byte of the first text's held-out part, in the batches of its training.

    The export's tokenizer is another file, so that an imported model has token files of its own.
    """
    tokens = "text"
    if run == "imported":
        tokens, tokenizer = "imported", ("--tokenizer", "imported/hf/tokenizer.json")
        files = (*tokenizer, "--eval-fraction", 0.05, "--out", "data/imported", "--overwrite")
        moejax(place, "prepare", "text.jsonl", *files)
    batch = [w for w in setup.pretraining if w.startswith(("data.", "train.batch_sequences"))]
    words = ("--data", f"data/{tokens}.eval.bin", "--json", *settings(*batch))
    found = moejax(place, "eval", "--run", run, *words)
    return json.loads(found)["bits_per_byte"]


def measure(place: Path, setup: Setup) -> dict[str, Any]:
    """Runs everything in a folder, or what is left of it, and returns the results.

    Raises:
      SystemExit: if the folder holds results of other settings.
    """
    record = place / "result.json"
    result = json.loads(record.read_text()) if record.exists() else first_part(place, setup)
    if result["setup"] != str(setup):
        sys.exit(f"{place} holds results of other settings. Name another --work.")
    asked = [json.loads(line) for line in (place / "held_out.jsonl").read_text().splitlines()]
    for seed in setup.seeds:
        for rank in (None, *setup.ranks):
            name = "full" if rank is None else f"rank {rank}"
            runs = result["runs"].setdefault(name, {})
            if str(seed) not in runs:
                runs[str(seed)] = fine_tune(place, setup, rank, seed, asked)
                record.write_text(json.dumps(result))
                print(f"seed {seed}, {name}: {runs[str(seed)]}", flush=True)
    return result


def first_part(place: Path, setup: Setup) -> dict[str, Any]:
    """Makes the first model and the task; returns the results before fine-tuning."""
    pretrain(place, setup)
    asked = prepare_questions(place, setup)
    before = measure_run(place, "imported", asked)
    # Who knows the form and the letters, and nothing of their order.
    orders = sum(math.log2(math.factorial(len(row["completion"].split()))) for row in asked)
    return {
        "setup": str(setup),
        "held_out": setup.held_out,
        "text_bits_per_byte": {
            run: held_out_text(place, setup, run) for run in ("runs/base", "imported")
        },
        "before": before,
        "form_alone": orders / before["answer_tokens"],
        "runs": {},
    }


def main() -> None:
    """Measures and writes the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument(
        "--work", type=Path, default=Path("runs/finetune"), help="folder kept for resuming (2 GB)"
    )
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    result = measure(args.work.absolute(), Setup()) | stamp()
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "finetune.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.out / "finetune.md").write_text(page(result, __doc__ or ""))
    print(page(result, __doc__ or ""))


if __name__ == "__main__":
    main()
