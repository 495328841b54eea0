"""The launch recipes are what their schedulers read, and say of the run what the program reads."""

import copy
import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from train.cli import _parser
from train.multihost import Launch, launch_of

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "configs" / "launch"
SCHEMA = yaml.safe_load(Path(__file__).with_name("jobset_schema.yaml").read_text())
KINDS = {"string": str, "integer": int, "boolean": bool, "quantity": (int, str)}


def check(value: Any, schema: Any, where: str = "jobset") -> None:
    """A value is of the form that the schema says.

    Raises:
      ValueError: it is not; names the place.
    """
    if isinstance(schema, str):
        kind, many = schema.removesuffix("*"), schema.endswith("*")
        for name, one in value.items() if many else [("", value)]:
            if not isinstance(one, KINDS[kind]) or (kind != "boolean" and isinstance(one, bool)):
                raise ValueError(f"{where}.{name}: expected a {kind}, got {one!r}")
    elif isinstance(schema, list):
        if not isinstance(value, list):
            raise ValueError(f"{where}: expected a list, got {value!r}")
        for place, one in enumerate(value):
            check(one, schema[0], f"{where}[{place}]")
    else:
        known = {name.rstrip("!"): below for name, below in schema.items()}
        unknown = value.keys() - known.keys()
        missing = {name.rstrip("!") for name in schema if name.endswith("!")} - value.keys()
        if unknown or missing:
            raise ValueError(f"{where}: expected known keys, got {sorted(unknown)}; missing {sorted(missing)}")
        for name, below in value.items():
            check(below, known[name], f"{where}.{name}")


@pytest.fixture
def jobset():
    return yaml.safe_load((LAUNCH / "jobset.yaml").read_text())


def trainer(jobset):
    (job,) = jobset["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    return job, container


def test_the_jobset_is_of_its_schema(jobset):
    check(jobset, SCHEMA)
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")


@pytest.mark.parametrize("damage", ["unknown", "missing", "type"])
def test_the_schema_finds_what_is_wrong(jobset, damage):
    wrong = copy.deepcopy(jobset)
    job, container = trainer(wrong)
    if damage == "unknown":
        job["template"]["spec"]["completion"] = 16
    elif damage == "missing":
        del container["name"]
    else:
        job["template"]["spec"]["completions"] = "16"
    with pytest.raises(ValueError, match=r"replicatedJobs\[0\]"):
        check(wrong, SCHEMA)


def test_the_jobset_starts_a_process_on_every_host_of_its_slice(jobset):
    job, container = trainer(jobset)
    spec = job["template"]["spec"]
    topology = spec["template"]["spec"]["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    hosts = math.prod(map(int, topology.split("x"))) // container["resources"]["limits"]["google.com/tpu"]
    assert (spec["completions"], spec["parallelism"], job["replicas"]) == (hosts, hosts, 1)
    assert (spec["completionMode"], spec["backoffLimit"]) == ("Indexed", 0)
    assert jobset["spec"]["coordinator"]["replicatedJob"] == job["name"]


def test_the_jobset_says_who_a_process_is_and_what_it_runs(jobset):
    _, container = trainer(jobset)
    fields = {
        entry["name"]: entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath") for entry in container["env"]
    }
    values = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert fields["COORDINATOR_HOST"] == "metadata.annotations['jobset.sigs.k8s.io/coordinator']"
    assert fields["JAX_PROCESS_ID"] == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    inside = {
        "JAX_COORDINATOR_ADDRESS": values["JAX_COORDINATOR_ADDRESS"].replace(
            "$(COORDINATOR_HOST)", "sat-jax-trainer-0-0"
        ),
        "JAX_NUM_PROCESSES": values["JAX_NUM_PROCESSES"],
        "JAX_PROCESS_ID": "3",
        "TPU_WORKER_HOSTNAMES": "a,b",
    }
    (port,) = (entry["containerPort"] for entry in container["ports"])
    assert launch_of(inside) == Launch(coordinator=f"sat-jax-trainer-0-0:{port}", processes=16, process=3)
    arguments = _parser().parse_args(container["command"][1:])
    assert str(arguments.runs).startswith(container["volumeMounts"][0]["mountPath"])


@pytest.mark.parametrize("tool", [["bash", "-n"], ["shellcheck"]], ids=["bash", "shellcheck"])
def test_the_slurm_script_is_a_script(tool):
    if shutil.which(tool[0]) is None:
        assert tool[0] == "shellcheck", "bash is everywhere"
        return
    done = subprocess.run([*tool, str(LAUNCH / "slurm.sh")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (1, False), (75, True)])
def test_the_slurm_script_goes_on_after_a_preemption_alone(tmp_path, code, requeued):
    for name, body in (("srun", f'echo "srun $*"; exit {code}'), ("scontrol", 'echo "scontrol $*"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["bash", str(LAUNCH / "slurm.sh"), "configs/quickstart.toml", "--record"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_SUBMIT_DIR": "/home/me", "SLURM_JOB_ID": "17"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code
    line, *rest = done.stdout.splitlines()
    assert line.endswith("sat-jax train configs/quickstart.toml --record --runs /home/me/runs --quiet")
    assert rest == (["scontrol requeue 17"] if requeued else [])
    _parser().parse_args(line.split("sat-jax ")[1].split())
