import pytest

from moejax.config.checks.paths import check_folder, check_output
from moejax.errors import InputError


def test_what_can_be_written_passes_and_nothing_is_left(tmp_path):
    check_output(tmp_path / "new" / "deep" / "plan.json", "--out")
    check_folder(tmp_path / "run", "`run_dir`")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_is_refused_with_the_systems_reason(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"--out is .*, a folder"):
        check_output(tmp_path, "--out")
    for path in (tmp_path / "file" / "plan.json", "/proc/none/plan.json"):
        with pytest.raises(InputError, match=r"--out = .*plan.json cannot be written"):
            check_output(tmp_path / path, "--out")
