import json
import math

from rich.console import Console

from moejax.data.tokens import from_documents
from moejax.evaluate import report
from moejax.evaluate.documents import DocumentScore
from moejax.evaluate.report import Result, print_tables
from moejax.train.evaluation import Score

SOURCE = from_documents([b"abcd", b"ef"])
DOCUMENTS = [DocumentScore("a.txt", 5, 4, 10.0), DocumentScore("b.txt", 3, None, 6.0)]


def shown(result, width=120):
    console = Console(width=width)
    with console.capture() as text:
        print_tables(result, console)
    return text.get()


def test_text_without_targets_has_no_score():
    text = shown(Result("run/4", 4, ["a.bin"], from_documents([b"a"]), Score(0.0, 0), None))
    assert "no targets" in text
    assert "nan" not in text


def test_json_has_totals_and_documents():
    result = Result("run/4", 4, ["a.bin"], SOURCE, Score(16.0, 8), DOCUMENTS)
    found = json.loads(result.to_json())
    documents = found.pop("documents")
    assert found == {
        "checkpoint": "run/4",
        "step": 4,
        "data": ["a.bin"],
        "tokens": 8,
        "bytes": 6,
        "nats": 16.0,
        "nats_per_token": 2.0,
        "perplexity": math.exp(2),
        "bits_per_byte": 2 / math.log(2) * (8 / 6),
    }
    assert documents[0] == {
        "document": "a.txt",
        "tokens": 5,
        "bytes": 4,
        "nats": 10.0,
        "bits_per_byte": 10 / math.log(2) / 4,
    }
    assert documents[1]["bits_per_byte"] is None


def test_numbers_that_json_does_not_have_are_null():
    broken = [DocumentScore("a", 1, 1, math.nan)]
    found = json.loads(Result("run/4", 4, [], SOURCE, Score(math.nan, 8), broken).to_json())
    assert (found["nats"], found["perplexity"], found["bits_per_byte"]) == (None, None, None)
    assert found["documents"][0]["nats"] is None
    assert Result("", 0, [], SOURCE, Score(1e9, 1)).perplexity == math.inf


def test_tables_show_the_same(monkeypatch):
    result = Result("run/4", 4, ["a.bin"], SOURCE, Score(16.0, 8), DOCUMENTS)
    text = shown(result)
    for part in ("run/4 (step 4)", "2.0000", "7.389", "3.8472", "a.txt", "3.6067"):
        assert part in text
    monkeypatch.setattr(report, "SHOWN", 1)
    assert "b.txt" not in shown(result)
    assert "and 1 more: --json has all of them" in shown(result)


def test_long_names_of_documents_are_told_apart():
    """By their ends, however narrow the terminal is."""
    folder = "/data/" + "deep/" * 20
    names = [f"{folder}{number:04}.txt, line {number}" for number in (1, 2)]
    documents = [DocumentScore(name, 5, 4, 10.0) for name in names]
    text = shown(Result("run/4", 4, [], SOURCE, Score(16.0, 8), documents), width=130)
    assert f"documentsin{folder}" in "".join(text.split())
    text = shown(Result("run/4", 4, [], SOURCE, Score(16.0, 8), documents), width=70)
    for number in (1, 2):
        assert f"{number:04}.txt, line {number} " in text
    assert "\u2026" not in text
    other = [DocumentScore(f"{'Z' * 90}{number}", 5, 4, 10.0) for number in (1, 2)]
    text = shown(Result("run/4", 4, [], SOURCE, Score(16.0, 8), other), width=70)
    assert text.count("Z") == 180
