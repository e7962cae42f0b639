"""What a run knows of the batches that it left out, and of checkpoints that it went back behind."""

import json

import pytest

from moejax.checkpoint.find import newest
from moejax.checkpoint.manifest import MANIFEST, finished_steps, write_manifest
from moejax.checkpoint.remote import Copies
from moejax.data.skipped import SkippedData
from moejax.errors import InputError
from moejax.train.records.skipped_data import (
    FILE,
    is_abandoned,
    known_skipped,
    quarantine_abandoned,
    read_skipped,
    to_json,
    write_skipped,
)

LEFT = [SkippedData(4, 3), SkippedData(6, 2)]


def write(run_dir, step, skipped=None):
    """A checkpoint of one file; without a list, as an older moejax wrote it."""
    path = run_dir / "checkpoints" / str(step)
    path.mkdir(parents=True)
    (path / "file").write_text(f"{step}")
    listed = {} if skipped is None else {"skipped_data": to_json(skipped)}
    write_manifest(path, {"step": step, **listed})
    return path


def test_the_list_comes_back_and_the_longer_one_counts(tmp_path):
    assert read_skipped(tmp_path) == []
    write_skipped(tmp_path, LEFT)
    assert read_skipped(tmp_path) == LEFT
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    for number, held in enumerate((None, [], LEFT[:1], LEFT, [*LEFT, SkippedData(8, 1)])):
        write(tmp_path / str(number), 10, held)
        saved, _ = newest(tmp_path / str(number) / "checkpoints", "full")
        known = known_skipped(tmp_path, saved)
        assert known == max(LEFT, held or [], key=len)
    write(tmp_path / "other", 10, [SkippedData(4, 2)])
    saved, _ = newest(tmp_path / "other" / "checkpoints", "full")
    with pytest.raises(InputError, match="contradict each other"):
        known_skipped(tmp_path, saved)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7",
        "[7]",
        '{"after_step": 1}',
        '[{"after_step": 1}]',
        '[{"after_step": 1, "skip": 0}]',
        '[{"after_step": -1, "skip": 2}]',
        '[{"after_step": true, "skip": 2}]',
        "[" * 9000,
    ],
)
def test_a_damaged_list_is_refused_in_one_line(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(InputError, match="list of skipped data is damaged") as found:
        read_skipped(tmp_path)
    assert "\n" not in str(found.value)


def test_checkpoints_that_a_run_went_back_behind_are_set_aside_and_no_others(tmp_path):
    write_skipped(tmp_path, LEFT)
    write(tmp_path, 4)  # from before all
    write(tmp_path, 6, LEFT[:1])  # the second entry goes back to it
    write(tmp_path, 7, LEFT[:1])
    write(tmp_path, 8, [])
    write(tmp_path, 9, LEFT)
    (write(tmp_path, 10, LEFT[:1]) / MANIFEST).write_text("{")  # damaged: not looked into
    notes = quarantine_abandoned(tmp_path)
    assert [note.split()[1] for note in notes] == ["7", "8"]
    assert sorted(finished_steps(tmp_path / "checkpoints")) == [4, 6, 9, 10]
    assert quarantine_abandoned(tmp_path) == []
    quarantine_abandoned(tmp_path, before=6)
    assert finished_steps(tmp_path / "checkpoints") == [4]


def test_a_copy_of_a_step_that_the_run_went_back_behind_is_not_fetched(tmp_path):
    run_dir, place = tmp_path / "run", tmp_path / "place"
    for step in (4, 8):
        write(run_dir, step, [])
    copies = Copies(str(place), keep=3)
    assert copies.copy_missing(run_dir / "checkpoints") == [8, 4]
    here = tmp_path / "here" / "checkpoints"
    here.mkdir(parents=True)

    def passed_over(manifest):
        return is_abandoned(manifest, LEFT[:1])

    notes = copies.fetch_newer(here, None, passed_over)
    assert notes == [f"checkpoint 4 fetched from {place}"]
    assert finished_steps(here) == [4]
    assert copies.fetch_newer(here, 4, passed_over) == []
    assert copies.fetch_newer(here, 4, lambda _: False) == [f"checkpoint 8 fetched from {place}"]
    assert json.loads((here / "8" / MANIFEST).read_text())["step"] == 8
