"""The scripts and manifests of examples/cluster."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

CLUSTER = ROOT / "examples" / "cluster"

# Starts the tasks of two nodes with two tasks each, like srun, on this machine. Ranks of one
# machine share memory, whatever Slurm calls its nodes.
SRUN = """
    import os, subprocess, sys
    command = [a for a in sys.argv[1:] if not a.startswith("--kill-on-bad-exit")]
    def start(task):
        node, local = divmod(task, 2)
        env = {"SLURM_PROCID": task, "SLURM_LOCALID": local, "SLURM_NODEID": node}
        env |= {"SLURM_STEP_NUM_TASKS": 4, "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_ID": 0}
        env = os.environ | {name: str(value) for name, value in env.items()}
        return subprocess.Popen(command, env=env)
    sys.exit(max([p.wait() for p in [start(task) for task in range(4)]]))
"""
PROGRAM = """
    import os, numpy as np, fastdist as fd
    comm = fd.init(timeout=20)
    total = comm.all_reduce(np.array([comm.rank + 1.0]))[0]
    os.write(1, f"{total} {os.environ['OMP_NUM_THREADS']}\\n".encode())
"""


def script(path: Path, text: str) -> None:
    path.write_text(textwrap.dedent(text))
    path.chmod(0o755)


@pytest.mark.slow
def test_slurm_script(tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed")  # ranks of two nodes meet in its store
    script(tmp_path / "srun", f"#!{sys.executable}\n{textwrap.dedent(SRUN)}")
    script(
        tmp_path / "scontrol",
        "#!/bin/sh\n"
        f"if [ $1 = requeue ]; then echo $2 >{tmp_path}/requeued; exit; fi\n"
        "printf '127.0.0.1\\nother\\n'\n",
    )
    script(tmp_path / "train.py", PROGRAM)
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    env |= {"PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    env |= {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "node[1-2]"}
    env |= {"SLURM_CPUS_PER_TASK": "3"}
    command = ["sh", str(CLUSTER / "slurm.sh"), str(tmp_path / "train.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert (done.stdout.splitlines(), done.returncode) == (["10.0 3"] * 4, 0), done.stderr
    assert not (tmp_path / "requeued").exists()
    script(tmp_path / "train.py", "import sys; sys.exit(75)")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 75
    assert (tmp_path / "requeued").read_text() == f"{os.getpid()}\n"


def documents(name: str) -> list[Any]:
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all((CLUSTER / name).read_text()))


@pytest.mark.slow
def test_kubernetes_manifest() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    newest = kubernetes_validate.latest_version()
    service, job = documents("kubernetes.yaml")
    for document in (service, job):
        kubernetes_validate.validate(document, newest, strict=True)
    # The pods' names are <job>-<index>.<subdomain>, and the service must choose them.
    template = job["spec"]["template"]["spec"]
    assert template["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    command = template["containers"][0]["command"][-1]
    assert f"--rdzv {job['metadata']['name']}-0.{service['metadata']['name']}:" in command
    assert f"--nnodes {job['spec']['completions']} " in command


@pytest.mark.slow
def test_kubernetes_command_starts_the_ranks(tmp_path: Path) -> None:
    """The command of each pod, where the service's name stands for this machine."""
    pytest.importorskip("torch.distributed")
    job = documents("kubernetes.yaml")[1]
    shell = job["spec"]["template"]["spec"]["containers"][0]["command"]
    port = 20_000 + os.getpid() % 12_000
    shell[-1] = (
        shell[-1].replace("train-0.train:29500", f"127.0.0.1:{port}").replace("-n 4", "-n 1")
    )
    script(tmp_path / "train.py", PROGRAM)
    script(tmp_path / "fastdist", f'#!/bin/sh\nexec {sys.executable} -m fastdist "$@"\n')
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    pods = [
        subprocess.Popen(
            shell,
            cwd=tmp_path,
            env=env | {"JOB_COMPLETION_INDEX": str(index)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    assert [pod.communicate(timeout=60)[0] for pod in pods] == ["[0] 3.0 1\n", "[1] 3.0 1\n"]


@pytest.mark.slow
def test_trainjob_manifest() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    (document,) = documents("trainjob.yaml")
    assert models.TrainerV1alpha1TrainJob.from_dict(document).to_dict() == document
