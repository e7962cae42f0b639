"""The benchmark of fine-tuning at toy size: all commands of a user, one after the other."""

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

from benchmarks.cpu import finetune
from benchmarks.cpu.finetune_page import page, summary, verdicts
from benchmarks.machine import stamp

TOY = finetune.Setup(
    vocabulary=300,
    questions=64,
    held_out=8,
    seeds=(0,),
    ranks=(2,),
    model=(
        "model.width=16",
        "model.num_layers=1",
        "model.num_heads=2",
        "model.num_kv_heads=1",
        "model.head_width=8",
        "moe.num_experts=4",
        "moe.expert_hidden=8",
    ),
    pretraining=(
        "train.num_steps=2",
        "train.batch_sequences=2",
        "data.sequence_length=32",
        "optimizer.warmup_steps=1",
    ),
    tuning=(
        "train.num_steps=30",
        "train.batch_sequences=4",
        "data.sequence_length=64",
        "optimizer.warmup_steps=2",
    ),
    full_rate=1e-2,
    adapter_rate=1e-2,
)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_model_is_trained_exported_imported_fine_tuned_and_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    texts = tuple(f"def name{n}(x):\n    return x + {n}\n".encode() for n in range(200))
    monkeypatch.setattr(finetune, "documents", lambda: (texts, ()))
    result = finetune.measure(tmp_path, TOY)
    assert result["text_bits_per_byte"]["runs/base"] == result["text_bits_per_byte"]["imported"]
    before, full, adapters = result["before"], result["runs"]["full"]["0"], result["runs"]["rank 2"]
    assert full["bits_per_token"] < before["bits_per_token"]
    assert adapters["0"]["bits_per_token"] < before["bits_per_token"]
    assert {*full["state"]} == {"weights", "gradients", "optimizer state"}
    assert {*adapters["0"]["state"]} == {
        "adapters",
        "frozen weights",
        "gradients",
        "optimizer state",
    }
    assert full["answer_tokens"] == before["answer_tokens"]
    assert summary(result)["full"]["gap"] == 0
    assert finetune.measure(tmp_path, TOY) == result, "what is finished is not repeated"
    told = page(result | stamp(), "What it is.")
    assert len(verdicts(result)) == told.count("\n- ")
    assert "| rank 2 |" in told


def test_sets_of_letters_are_on_one_side_only(tmp_path):
    sides = [
        finetune.write_questions(tmp_path / "rows.jsonl", 300, held_out=held_out, seed=1)
        for held_out in (False, True)
    ]
    train, held_out = ({row["completion"] for row in rows} for rows in sides)
    assert not train & held_out
    for row in sides[0]:
        letters = row["prompt"].removeprefix("sort ").split()
        assert sorted(letters) == row["completion"].split()


def test_bytes_of_state_are_read_from_the_table():
    table = """\
│ adapters                            │ 2 parameters are trained, of rank 2 │
│ adapters (float32 masters), a device │ 1.5 MiB │
│ frozen weights (bfloat16), a device  │ 3 KiB   │
│ gradients, a device                  │ 12 B    │
│ batch, a device                      │ 7 B     │
"""
    found = finetune.state_bytes(table)
    assert found == {"adapters": 1.5 * 2**20, "frozen weights": 3 * 2**10, "gradients": 12}
