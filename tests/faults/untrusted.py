"""Readers of files from elsewhere, and trials that give them broken ones.

Each trial changes some bytes of a whole file and reads it. It may be read, or refused with an
InputError; nothing else may come of it.
"""

import gzip
import json
import random
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from moejax.checkpoint.manifest import read_manifest, write_manifest
from moejax.config.load import load_config
from moejax.data.prepare.documents import read_documents
from moejax.data.routing import ModelExperts, open_recorded
from moejax.data.tokenizer import FileTokenizer
from moejax.data.tokens import open_files, verify
from moejax.errors import InputError
from moejax.hf.reader import Folder
from moejax.plan import cluster
from moejax.plan.cluster.file import load_topology
from moejax.plan.price.routing import read_expert_load
from moejax.plan.published import read_published
from moejax.plan.search.file import Plan, load_plan, save_plan
from moejax.report.goodput import read_goodput
from moejax.report.page import page_data
from moejax.serve.samples import Sample, write_routing
from tests.hf.golden import cases_of, golden_folder
from tests.integration.runs import describe, write_config, write_tokens

KNOWN = Path(cluster.__file__).parent / "known"
NUMBERS = (b"-1", b"0", b"1e999", b"NaN", b"99999999999999999999", b"true", b'"x"', b"null", b"[]")


Reader = Callable[[Path], tuple[list[Path], Callable[[], object]]]


def topology(folder):
    path = Path(shutil.copy(KNOWN / "dgx_h100.json", folder / "topology.json"))
    return [path], lambda: load_topology(str(path))


def plan(folder):
    path = folder / "plan.json"
    predicted = {"seconds": 1.0, "terms": {"experts": 0.5}}
    save_plan(Plan("h200", 8, 2, "balanced", {"mesh.expert": 8}, predicted), path)
    return [path], lambda: load_plan(path)


def routing(folder):
    path = folder / "routing.json"
    path.write_text(json.dumps({"step": 10, "load": [[5, 6, 7, 8], [1, 20, 3, 4]]}))
    return [path], lambda: read_expert_load(str(path), 4)


def recorded_routing(folder):
    path, rng = folder / "samples.npz", np.random.default_rng(0)
    sample = Sample([1, 2], [3, 4, 5])
    sample.expert_TLK = np.argsort(rng.random((5, 2, 4)))[..., :2].astype(np.int16)
    write_routing(str(path), [sample] * 3, layers=[0, 2], num_experts=4)
    experts = ModelExperts(num_experts=4, experts_per_token=2, layers=(0, 2))
    return [path], lambda: open_recorded([str(path)], model_vocab=8, experts=experts)


def config(folder):
    # Relative, so that the bytes do not depend on where the folder is.
    path = write_config(Path(), describe(10, simulated_devices=4), Path("run")) / "config.yaml"
    assert path.absolute().parent == folder
    return [path], lambda: load_config(path)


def config_json(folder):
    path = folder / "config.json"
    path.write_text(json.dumps({"train": {"num_steps": 5}, "mesh": {"expert": 2}, "run_dir": "x"}))
    return [path], lambda: load_config(path)


def tokens(folder):
    path = write_tokens(folder / "a.train.bin")

    def read():
        for source in open_files([str(path)], "bin", model_vocab=300).sources:
            verify(source)

    return [path, path.with_name(f"{path.name}.json")], read


def jsonl(folder):
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"text {n} \u00e9"}) + "\n" for n in range(40)))
    return [path], lambda: [list(d.pieces()) for d in read_documents([path], "text")]


def gzipped(folder):
    path = folder / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "a text"}\n' * 40))
    return [path], lambda: [list(d.pieces()) for d in read_documents([path], "text")]


def parquet(folder):
    import pyarrow
    import pyarrow.parquet

    path = folder / "a.parquet"
    table = pyarrow.table({"text": [f"text {n}" for n in range(40)]})
    pyarrow.parquet.write_table(table, path, row_group_size=7)
    return [path], lambda: [list(d.pieces()) for d in read_documents([path], "text")]


def tokenizer(folder):
    import tokenizers as library

    words = {"<eos>": 0, "a": 1, "b": 2, "ab": 3}
    made = library.Tokenizer(library.models.BPE(vocab=words, merges=[("a", "b")]))
    path = folder / "tokenizer.json"
    made.save(str(path))
    return [path], lambda: FileTokenizer(path, "<eos>").encode("abba")


def manifest(folder):
    step = folder / "10"
    step.mkdir()
    (step / "weights").write_bytes(b"weights")
    write_manifest(step, {"step": 10, "config": {}})
    return [step / "moejax_manifest.json"], lambda: read_manifest(step)


def weights(folder):
    place = golden_folder(folder / "model", next(iter(cases_of("mixtral").values())))
    files = [path for path in place.iterdir() if path.suffix in (".json", ".safetensors")]

    def read():
        with Folder(place):
            pass

    return files, read


def published(folder):
    place = golden_folder(folder / "model", next(iter(cases_of("mixtral").values())))
    return [place / "config.json"], lambda: read_published(place, 8)


def run(folder):
    lines = [{"time": 1.5 * n, "event": "step", "step": n, "loss": 2.0} for n in range(20)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    events = [{"time": 1.0, "event": "begin", "step": 0}]
    events += [{"time": 9.0, "event": "steps", "first": 1, "step": 9, "step_s": 7, "input_s": 0}]
    (folder / "events").mkdir()
    text = "".join(json.dumps(line) + "\n" for line in events)
    (folder / "events" / "0.jsonl").write_text(text)
    (folder / "config.json").write_text("{}")

    def read():
        page_data([folder])
        read_goodput(folder)

    return [folder / "metrics.jsonl", folder / "events" / "0.jsonl"], read


READERS = (
    topology, plan, routing, config, config_json, tokens, jsonl, gzipped, parquet, tokenizer,
    manifest, weights, published, run, recorded_routing,
)  # fmt: skip
# Readers of packages that an extra installs -> the package.
NEEDS = {"parquet": "pyarrow", "tokenizer": "tokenizers"}


def broken(content: bytes, draw: random.Random) -> bytes:
    """Changes some bytes."""
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(content) + 1)
        kind = draw.choice(["flip", "cut", "insert", "repeat", "deep", "number"])
        if kind == "flip" and content:
            at = draw.randrange(len(content))
            changed = content[at] ^ (1 << draw.randrange(8))
            content = content[:at] + bytes([changed]) + content[at + 1 :]
        elif kind == "cut":
            content = content[:at]
        elif kind == "insert":
            content = content[:at] + draw.randbytes(draw.randint(1, 20)) + content[at:]
        elif kind == "repeat":
            content = content[:at] + content[at : at + 200] * 2 + content[at + 200 :]
        elif kind == "deep":
            content = content[:at] + draw.choice([b"[", b'{"a":', b"("]) * 5000 + content[at:]
        else:
            places = [n for n in range(len(content)) if content[n : n + 1].isdigit()]
            at = draw.choice(places or [0])
            content = content[:at] + draw.choice(NUMBERS) + content[at + 1 :]
    return content


@dataclass
class Tally:
    """What came of a reader's trials.

    Attributes:
      refused: in one line, with an InputError.
      crashed: by seed, any other exception.
    """

    read: int = 0
    refused: int = 0
    crashed: dict[int, str] = field(default_factory=dict)


def tally(reader: Reader, folder: Path, seeds: Iterable[int]) -> Tally:
    """Makes a reader's trials in a folder, which must be the working directory."""
    files, read = reader(folder)
    whole = {path: path.read_bytes() for path in files}
    read()
    found = Tally()
    for seed in seeds:
        draw = random.Random(f"{reader.__name__} {seed}")
        path = draw.choice(files)
        path.write_bytes(broken(whole[path], draw))
        try:
            read()
            found.read += 1
        except InputError as error:
            if "\n" in str(error).strip() or not str(error):
                found.crashed[seed] = f"{path.name}: not one line: {error!r}"
            else:
                found.refused += 1
        except Exception as error:  # of any kind: that there is none is what is tried
            found.crashed[seed] = f"{path.name}: {error!r}"
        finally:
            path.write_bytes(whole[path])
    return found
