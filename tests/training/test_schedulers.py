"""The scripts of docs/scale.md for SLURM and Kubernetes: what they save, and with which code they end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from training_fixtures import free_port

from transduce.training.checkpoint import CheckpointManager

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parents[2] / "docs" / "scale.md").read_text(encoding="utf-8")
RECIPE = """
data: {train: pairs.tsv, cache: cache}
model: {encoder: {kind: recurrent, width: 8}, decoder: {kind: recurrent, width: 8}}
tokens: {source: {kind: words}, target: {kind: words}}
training: {steps: 1000000, checkpoint_every: 1000000, validate_every: 1000000, log_every: 1, batch_tokens: 128}
"""


def example(language: str, marker: str) -> str:
    blocks = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    (found,) = [block for block in blocks if marker in block]
    return str(found)


def kubernetes_script() -> str:
    job = yaml.safe_load(example("text", "PyTorchJob"))
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    assert container["command"] == ["bash", "-c"]
    (script,) = container["args"]
    return str(script).replace("/runs/", "runs/")


def slurm_script() -> str:
    script = example("sh", "#SBATCH").replace("--nnodes 2 --nproc-per-node 8", "--nnodes 1 --nproc-per-node 1")
    return script.replace("--max-restarts 3", "--max-restarts 0").replace(":29500", f":{free_port()}")


def start(script: str, folder: Path, recipe: str) -> subprocess.Popen[bytes]:
    """The script, with the commands of a cluster on its path."""
    (folder / "pairs.tsv").write_text("".join(f"{n} {n % 7}\t{n % 7} {n}\n" for n in range(100)))
    (folder / "recipe.yaml").write_text(recipe)
    commands = {
        "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
        "srun": 'exec "$@"',
        "scontrol": 'if [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" >> requeued; fi',
    }
    for name, content in commands.items():
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{content}\n")
        path.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    environment |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        ["bash", "-c", textwrap.dedent(script)], cwd=folder, env=environment, stderr=subprocess.DEVNULL
    )


def await_updates(run: Path, process: subprocess.Popen[bytes]) -> None:
    log, end = run / "log.jsonl", time.monotonic() + 300
    while not log.exists() or log.read_text().count('"kind": "update"') < 5:
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.05)


def agent(folder: Path) -> int:
    """The process of torchrun in this folder."""
    for entry in Path("/proc").iterdir():
        try:
            if b"torch.distributed.run" in (entry / "cmdline").read_bytes() and (entry / "cwd").readlink() == folder:
                return int(entry.name)
        except OSError:
            continue
    raise AssertionError("torchrun does not run")


def test_a_pod_that_kubernetes_terminates_saves_and_ends_with_a_code_that_is_restarted(tmp_path: Path) -> None:
    with start(kubernetes_script(), tmp_path, RECIPE) as process:
        await_updates(tmp_path / "runs" / "two-nodes", process)
        process.send_signal(signal.SIGTERM)
    assert process.returncode == 143
    assert CheckpointManager(tmp_path / "runs" / "two-nodes" / "checkpoints").steps()


def test_a_slurm_job_that_nears_its_limit_saves_and_is_put_back_into_the_queue(tmp_path: Path) -> None:
    with start(slurm_script(), tmp_path, RECIPE) as process:
        await_updates(tmp_path / "runs" / "two-nodes", process)
        os.kill(agent(tmp_path), signal.SIGUSR1)  # SLURM signals the processes of srun, not the script
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    assert CheckpointManager(tmp_path / "runs" / "two-nodes" / "checkpoints").steps()


@pytest.mark.parametrize("script", [kubernetes_script, slurm_script])
def test_an_error_that_comes_again_with_every_start_is_not_tried_again(
    script: Callable[[], str], tmp_path: Path
) -> None:
    with start(script(), tmp_path, RECIPE.replace("steps:", "stepss:")) as process:
        pass
    assert process.returncode == 1
    assert not (tmp_path / "requeued").exists()
