"""The manifests of launch/kubernetes: what they say, and that their schemas take them."""

import re
import sys

import pytest
import yaml

from tests.launch.modules import module

launcher = module("kubernetes")
manifest = sys.modules["manifest"]

NEEDED = ["--name", "olmoe", "--image", "registry/moejax:1", "--hosts", "4", "--claim", "runs"]
TPU = ["--tpus", "4", "--tpu_accelerator", "tpu-v5p-slice", "--tpu_topology", "2x2x4"]
COMMAND = ["sh", "-c", 'echo "$HOME: $1" $$; exit 3\n', "yes", "- a: {b}", "1e3", "null", "~", ""]


@pytest.fixture
def write(monkeypatch, capsys):
    """Returns the launcher's exit code, and what it printed."""

    def write(*flags, command=("moejax", "train")):
        monkeypatch.setattr(sys, "argv", ["kubernetes", *NEEDED, *flags, "--", *command])
        return launcher.main(), *capsys.readouterr()

    return write


@pytest.fixture
def wanted(write):
    """Returns the manifest that the launcher prints."""

    def wanted(*flags, **command):
        code, out, err = write(*flags, **command)
        assert (code, err) == (0, "")
        return yaml.safe_load(out)

    return wanted


def job_of(jobset):
    (job,) = jobset["spec"]["replicatedJobs"]
    assert job["replicas"] == 1
    return job["template"]["spec"]


def container_of(jobset):
    (container,) = job_of(jobset)["template"]["spec"]["containers"]
    return container


def test_words_of_the_command_stay_whole(wanted):
    """Kubernetes replaces $(NAME) if there is such a variable, and $$ by $."""
    jobset = wanted(command=COMMAND)
    read = [re.sub(r"\$\$", "$", word) for word in container_of(jobset)["command"]]
    assert read == COMMAND


@pytest.mark.parametrize(
    ("flags", "limits", "node"),
    [
        ([], None, None),
        (["--gpus", "8"], {"nvidia.com/gpu": "8"}, None),
        (
            TPU,
            {"google.com/tpu": "4"},
            {
                "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
                "cloud.google.com/gke-tpu-topology": "2x2x4",
            },
        ),
    ],
)
def test_devices_are_asked_for(wanted, flags, limits, node):
    jobset = wanted(*flags)
    assert container_of(jobset).get("resources", {}).get("limits") == limits
    assert job_of(jobset)["template"]["spec"].get("nodeSelector") == node


def test_runs_are_on_the_claim(write, tmp_path):
    out = tmp_path / "it.yaml"
    code, said, _ = write("--mount", "/runs", "--namespace", "me", "--out", str(out))
    assert (code, said) == (0, "")
    jobset = yaml.safe_load(out.read_text())
    assert jobset["metadata"]["namespace"] == "me"
    mounts = {one["name"]: one["mountPath"] for one in container_of(jobset)["volumeMounts"]}
    volumes = {one["name"]: one for one in job_of(jobset)["template"]["spec"]["volumes"]}
    assert mounts["runs"] == "/runs"
    assert volumes["runs"]["persistentVolumeClaim"] == {"claimName": "runs"}
    assert mounts.keys() == volumes.keys()


def test_the_whole_manifest_is_as_kubernetes_and_jobset_document_it(wanted):
    """Every field by its name, as `make cluster` checks with their schemas."""

    def field(path):
        return {"fieldRef": {"fieldPath": path}}

    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    container = {
        "name": "moejax",
        "image": "registry/moejax:1",
        "command": ["moejax", "train"],
        "env": [
            {"name": "PYTHONUNBUFFERED", "value": "1"},
            {"name": "MOEJAX_COORDINATOR", "value": "olmoe-worker-0-0.olmoe:29400"},
            {"name": "MOEJAX_PROCESSES", "value": "4"},
            {"name": "MOEJAX_PROCESS", "valueFrom": field(index)},
            {"name": "POD_ADDRESS", "valueFrom": field("status.podIP")},
            {"name": "JAX_COORDINATOR_BIND_ADDRESS", "value": "$(POD_ADDRESS):29400"},
        ],
        "ports": [{"name": "coordinator", "containerPort": 29400, "protocol": "TCP"}],
        "volumeMounts": [
            {"name": "runs", "mountPath": "/runs"},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
        "securityContext": {"allowPrivilegeEscalation": False},
        "resources": {"limits": {"nvidia.com/gpu": "8"}},
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 90,
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000},
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
        "containers": [container],
    }
    codes = {"containerName": "moejax", "operator": "In", "values": [2, 4]}
    job = {
        "completionMode": "Indexed",
        "completions": 4,
        "parallelism": 4,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": codes}]},
        "template": {"spec": pod},
    }
    final = {
        "name": "final",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    flags = ["--gpus", "8", "--mount", "/runs", "--grace_seconds", "90", "--max_restarts", "7"]
    assert wanted(*flags) == {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "olmoe"},
        "spec": {
            "network": {
                "enableDNSHostnames": True,
                "publishNotReadyAddresses": True,
                "subdomain": "olmoe",
            },
            "failurePolicy": {"maxRestarts": 7, "rules": [final]},
            "replicatedJobs": [{"name": "worker", "replicas": 1, "template": {"spec": job}}],
        },
    }


@pytest.mark.parametrize(
    "value",
    [
        {"a": [{"b": 1, "c": [2, {"d": "e"}]}, "f", [["g"], "h"]], "i": True, "j k": -1.5},
        ["", "a: b", "#", "'", '"', "\\", "\n", "Ä", "no", "0x1", "a/b-c.d", "1", "/", "- "],
    ],
)
def test_yaml_is_read_as_it_was_meant(value):
    assert yaml.safe_load(manifest.yaml(value)) == value


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "no command"),
        (["--name", "Big"], "--name is `Big`"),
        (["--name", "a" * 60], "52 at most"),
        (["--claim", "a/b"], "--claim is `a/b`"),
        (["--hosts", "0"], "--hosts is 0"),
        (["--max_restarts", "-1"], "--max_restarts is -1"),
        (["--gpus", "8", *TPU], "--gpus is 8 and --tpus is 4"),
        (["--tpus", "4"], "--tpus and --tpu_accelerator belong together"),
        (["--out", "/nowhere/it.yaml"], "--out is /nowhere/it.yaml, which cannot be written"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(write, flags, message):
    code, out, err = write(*flags, command=() if message == "no command" else ("true",))
    assert (code, out) == (2, "")
    assert err.startswith("kubernetes: error: ")
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.cluster
@pytest.mark.parametrize("flags", [[], ["--gpus", "8", "--namespace", "me"], TPU])
def test_kubernetes_knows_every_field(wanted, flags):
    """The Job inside, by the schema of Kubernetes, which takes no field that it does not know."""
    validate = pytest.importorskip("kubernetes_validate")
    spec = job_of(wanted(*flags))
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "it"}, "spec": spec}
    for version in ("1.31", "1.37"):
        validate.validate(job, version, strict=True)
    spec["podFailurePolicy"]["rules"][0]["onExitCode"] = {}
    with pytest.raises(validate.ValidationError):
        validate.validate(job, "1.37", strict=True)


@pytest.mark.cluster
@pytest.mark.parametrize("flags", [[], ["--gpus", "8", "--namespace", "me"], TPU])
def test_jobset_knows_every_field(wanted, flags):
    """By models of JobSet's API that Kubeflow's trainer carries, which drop what is not theirs."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    jobset = wanted(*flags)

    def read_back(value):
        return models.JobsetV1alpha2JobSet.from_dict(value).to_dict()

    assert read_back(jobset) == jobset
    jobset["spec"]["failurePolicy"]["maxRestart"] = 3
    assert read_back(jobset) != jobset
