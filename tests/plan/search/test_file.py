"""Plan files: what no search wrote is refused."""

import json

import pytest

from moejax.errors import InputError
from moejax.plan.search.file import Plan, load_plan, save_plan


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "cannot be read"),
        ("[]", "is not one"),
        ('{"version": 99}', "version is 99"),
    ],
)
def test_what_is_no_plan_is_refused(tmp_path, content, said):
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(InputError, match=said):
        load_plan(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"settings": {"mesh.breadth": 2}}, "`mesh.breadth`, which no plan chooses"),
        ({"settings": {"train.num_steps": 2}}, "`train.num_steps`, which no plan chooses"),
        ({"settings": {"run_dir": "elsewhere"}}, "`run_dir`, which no plan chooses"),
        ({"settings": {"mesh.nodes": 2}}, "`mesh.nodes`, which no plan chooses"),
        ({"settings": {"mesh.expert": -1}}, r"plan\.json: `mesh.expert` must be .*at least"),
        ({"settings": {"mesh.expert": "two"}}, "`mesh.expert` must be an integer"),
        ({"settings": {"mesh.schedule": "gpipe"}}, "was removed: use '1f1b'"),
        ({"settings": []}, "names and values"),
        ({"devices": "8"}, "devices = '8'"),
        ({"nodes": 0}, "nodes = 0"),
        ({"topology": 3}, "topology = 3"),
        ({"cut": 3}, r"cut = 3\. It must be a text or null"),
        ({"platform": "abacus"}, "platform = 'abacus'"),
        ({"device_memory_bytes": 1.5}, r"device_memory_bytes = 1\.5"),
        ({"predicted": {}}, "predicted.seconds = None"),
        ({"predicted": {"seconds": float("nan")}}, "predicted.seconds = nan"),
        ({"runner_up": {"seconds": 1.0, "settings": {"run_dir": "x"}}}, "`run_dir`"),
    ],
)
def test_a_plan_that_no_search_wrote_is_refused(tmp_path, changes, said):
    path = tmp_path / "plan.json"
    save_plan(Plan("test", 8, 2, "balanced", {"mesh.expert": 8}, {"seconds": 1.0}), path)
    assert load_plan(path).settings == {"mesh.expert": 8}
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(InputError, match=said):
        load_plan(path)


def test_a_file_of_before_has_no_cut_no_platform_and_no_memory(tmp_path):
    path, later = tmp_path / "plan.json", ("cut", "platform", "device_memory_bytes")
    save_plan(Plan("test", 8, 2, "balanced", {"mesh.expert": 8}, {"seconds": 1.0}), path)
    data = json.loads(path.read_text())
    path.write_text(json.dumps({name: data[name] for name in data if name not in later}))
    assert [getattr(load_plan(path), name) for name in later] == [None, None, None]


def test_a_plan_whose_runner_up_is_no_longer_possible_is_read_without_it(tmp_path):
    path, other = tmp_path / "plan.json", {"seconds": 2.0, "settings": {"mesh.schedule": "gpipe"}}
    save_plan(Plan("test", 8, 2, "balanced", {"mesh.expert": 8}, {"seconds": 1.0}, other), path)
    assert load_plan(path).runner_up is None
