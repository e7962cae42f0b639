"""The manifest of `launch/kubernetes`: a JobSet of one indexed Job, a pod a host, and its text.

Fields are those of jobset.x-k8s.io/v1alpha2 and batch/v1. Standard library only, so the text is
written here: YAML, of which any value in JSON's form is a part.
"""

import json
import re
from argparse import Namespace
from typing import Any

PORT = 29400
JOB = "worker"
# docs/formats/exit.md: bad input and a run that diverged end the same way when they start again.
FINAL_CODES = (2, 4)
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
USER = 1000  # of the Dockerfile
PLAIN = re.compile(r"[A-Za-z/][\w./-]*")  # needs no quotes in YAML, unless it is one of these words
WORDS = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}

Json = dict[str, Any]


def pod(name: str, index: int) -> str:
    """The name, and the name in DNS, that JobSet gives a pod."""
    return f"{name}-{JOB}-0-{index}"


def coordinator(name: str) -> str:
    """ADDRESS:PORT of process 0, by the JobSet's headless service, which has the JobSet's name."""
    return f"{pod(name, 0)}.{name}:{PORT}"


def job_set(args: Namespace, pod: Json) -> Json:
    """Returns the JobSet of a command line, by what a pod runs.

    A pod that fails fails its Job, which is one program: the others wait for it in vain. JobSet
    then starts all pods again, except after an exit code of FINAL_CODES.
    """
    codes = {"containerName": "moejax", "operator": "In", "values": list(FINAL_CODES)}
    job = {
        "completionMode": "Indexed",
        "completions": args.hosts,
        "parallelism": args.hosts,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": codes}]},
        "template": {"spec": pod},
    }
    final = {
        "name": "final",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    namespace = {} if args.namespace is None else {"namespace": args.namespace}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": args.name, **namespace},
        "spec": {
            # A pod is known by name before it is ready: none is, until all have met.
            "network": {
                "enableDNSHostnames": True,
                "publishNotReadyAddresses": True,
                "subdomain": args.name,
            },
            "failurePolicy": {"maxRestarts": args.max_restarts, "rules": [final]},
            "replicatedJobs": [{"name": JOB, "replicas": 1, "template": {"spec": job}}],
        },
    }


def pod_spec(args: Namespace, limits: dict[str, str], labels: dict[str, str]) -> Json:
    """Returns what a pod of a command line runs.

    Args:
      limits: devices that it asks for.
      labels: that its node must have.
    """
    container = {
        "name": "moejax",
        "image": args.image,
        # Kubernetes would take $(NAME) and $$ for its own.
        "command": [word.replace("$", "$$") for word in args.command],
        "env": environment(coordinator(args.name), args.hosts),
        "ports": [{"name": "coordinator", "containerPort": PORT, "protocol": "TCP"}],
        "volumeMounts": [
            {"name": "runs", "mountPath": args.mount},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
        "securityContext": {"allowPrivilegeEscalation": False},
    }
    if limits:
        # For devices Kubernetes takes the limit as the request too.
        container["resources"] = {"limits": limits}
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": args.grace_seconds,
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "runAsUser": USER, "fsGroup": USER},
        **({"nodeSelector": labels} if labels else {}),
        # NCCL's processes share memory, and a container has 64 MB of it by default.
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": args.claim}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
        "containers": [container],
    }


def environment(coordinator: str, hosts: int) -> list[Json]:
    """Returns a pod's variables. Which process it is says an annotation of the indexed Job."""

    def field(name: str, path: str) -> Json:
        return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}

    return [
        {"name": "PYTHONUNBUFFERED", "value": "1"},
        {"name": "MOEJAX_COORDINATOR", "value": coordinator},
        {"name": "MOEJAX_PROCESSES", "value": str(hosts)},
        field("MOEJAX_PROCESS", INDEX),
        # Process 0 listens at its pod's address alone, whether or not DNS knows the pod yet. It
        # must be an IPv4 address: around another one brackets would have to stand.
        field("POD_ADDRESS", "status.podIP"),
        {"name": "JAX_COORDINATOR_BIND_ADDRESS", "value": f"$(POD_ADDRESS):{PORT}"},
    ]


def yaml(value: Any, indent: int = 0) -> str:
    """Returns maps, lists, texts, numbers and truth values as YAML."""
    space = "  " * indent
    if isinstance(value, dict):
        return "".join(f"{space}{_scalar(k)}:{_below(v, indent + 1)}" for k, v in value.items())
    # The dash stands where the first line of what it holds has its last two spaces.
    return "".join(f"{space}- {_item(item, indent + 1)}" for item in value)


def _below(value: Any, indent: int) -> str:
    return f"\n{yaml(value, indent)}" if isinstance(value, dict | list) else f" {_scalar(value)}\n"


def _item(value: Any, indent: int) -> str:
    nested = isinstance(value, dict | list)
    return yaml(value, indent).lstrip(" ") if nested else f"{_scalar(value)}\n"


def _scalar(value: Any) -> str:
    plain = isinstance(value, str) and PLAIN.fullmatch(value) and value.lower() not in WORDS
    return value if plain else json.dumps(value)
