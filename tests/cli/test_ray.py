"""Preparation, generation and serving on one Ray cluster: the bytes of one process, also when actors are killed."""

from __future__ import annotations

import builtins
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fault_records import record
from run_fixtures import Command, colour_pairs

from transduce.cli import bulk_generate
from transduce.cli.bulk_generate import ShardGeneration
from transduce.data.sharded_work import cluster, mark_done, records, run_tasks, unfinished
from transduce.errors import InputError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    """A cluster of two workers, which the commands find and leave running."""
    import ray

    own_print = builtins.print  # Ray replaces it
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"] = "50"  # read by the processes of the cluster
    # With 15, actors wait for all other work of the machine.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
    memory = {"object_store_memory": 100 << 20, "_memory": 1 << 30}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error", **memory)
    yield
    ray.shutdown()
    builtins.print = own_print


def test_a_killed_actor_is_replaced_and_errors_come_back(tmp_path: Path) -> None:
    class DiesOnce:  # sent by value: actors do not import the tests
        """Work whose actor is killed once in the middle of a task."""

        def __init__(self, folder: Path) -> None:
            self.folder = folder

        def __call__(self, task: int) -> None:
            mark = self.folder / f"killed-{task}"
            if task == 2 and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if task == 5:
                raise InputError("a bad line", where="file:5", remedy="correct it")
            mark_done(self.folder, task, {"task": task})

    with cluster("ray", 2):
        run_tasks(DiesOnce(tmp_path), range(5), workers=2, backend="ray")
        assert (tmp_path / "killed-2").exists()
        assert unfinished(tmp_path, range(5)) == []
        assert [record["task"] for record in records(tmp_path, range(5))] == list(range(5))
        with pytest.raises(InputError, match="a bad line") as caught:
            run_tasks(DiesOnce(tmp_path), [5], workers=2, backend="ray")
    assert (caught.value.where, caught.value.remedy) == ("file:5", "correct it")


def test_ray_prepares_the_bytes_of_one_process(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "pairs.tsv"
    pairs = colour_pairs(400, seed=2)
    path.write_text("".join(f"{one} {number % 350}\t{other}\n" for number, (one, other) in enumerate(pairs)))
    options = ["--shard-lines", "150", "--drop-duplicates", "--near-duplicates", "0.9"]
    for backend in ("local", "ray"):
        called = command("prepare", path, "--output", tmp_path / backend, *options, "--backend", backend)
        assert called.code == 0, called.err
    names = [sorted(file.name for file in (tmp_path / backend).iterdir()) for backend in ("local", "ray")]
    assert names[0] == names[1] == ["manifest.json", *(f"shard-{number:06}.parquet" for number in range(3))]
    for name in names[0]:
        assert (tmp_path / "local" / name).read_bytes() == (tmp_path / "ray" / name).read_bytes(), name


def test_ray_generates_the_bytes_of_one_process_also_when_an_actor_or_the_driver_is_killed(
    command: Command, attention_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class KilledOnce(ShardGeneration):
        """Generation whose actor is killed once in the middle of a shard."""

        def __call__(self, number: int) -> None:
            mark = Path(self.folder).parent / "killed"
            if number == 1 and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            super().__call__(number)

    text = tmp_path / "sources.txt"
    text.write_text("".join(f"{source}\n" for source, _ in colour_pairs(90, seed=3)))
    given = ["generate", attention_run, text, "--device", "cpu", "--shard-lines", "3", "--output"]
    assert command(*given, tmp_path / "local", "--backend", "local").code == 0
    with monkeypatch.context() as patched:
        patched.setattr(bulk_generate, "ShardGeneration", KilledOnce)
        called = command(*given, tmp_path / "ray", "--backend", "ray")
    assert called.code == 0, called.err
    assert (tmp_path / "killed").exists()
    record("actor of Ray killed", "restarted, same bytes as one process", 1, 1)

    arguments = [*map(str, given), str(tmp_path / "killed-driver"), "--backend", "ray"]
    driver = subprocess.Popen([sys.executable, "-m", "transduce", *arguments], env=_environment())
    parts = tmp_path / "killed-driver.parts"
    while not parts.is_dir() or len(unfinished(parts, range(30))) == 30:
        assert driver.poll() is None
        time.sleep(0.005)
    driver.kill()
    assert driver.wait() == -signal.SIGKILL
    assert not (tmp_path / "killed-driver").exists()
    done = 30 - len(unfinished(parts, range(30)))
    called = command(*arguments)
    assert called.code == 0, called.err
    first = re.search(r"shards: (\d+) of 30", called.err.splitlines()[0])
    assert first
    assert int(first[1]) > done  # more, where an actor ended a shard after its driver
    for name in ("ray", "killed-driver"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "local").read_bytes(), name
    record("driver on Ray killed", "continued, no shard done twice, same bytes", 1, 1)


def _environment() -> dict[str, str]:
    """Of a process that uses the cluster of this one."""
    import ray

    return {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}


def test_two_replicas_of_ray_serve_answer_like_one_process(attention_run: Path) -> None:
    """Answers, streams, refusals and keys of the same application; the metrics of both replicas are added up."""
    pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'transduce[ray]'")
    import httpx

    from transduce.inference import load
    from transduce.serving.application import ServerSettings
    from transduce.serving.models import ModelSpec
    from transduce.serving.ray_backend import RayPlan, ReplicaScale, deployed
    from transduce.serving.workers import Address

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = Address(port=free.getsockname()[1])
    plan = RayPlan(
        [ModelSpec(str(attention_run), "colours")],
        {"device": "cpu"},
        ServerSettings(("secret",)),
        address,
        ReplicaScale(2),
    )
    texts = [source for source, _ in colour_pairs(24, seed=4)]
    expected = [one.text for one in load(attention_run, device="cpu").generate(texts)]
    with (
        deployed(plan),
        httpx.Client(
            base_url=f"http://127.0.0.1:{address.port}", headers={"Authorization": "Bearer secret"}, timeout=60
        ) as client,
        ThreadPoolExecutor(8) as pool,
    ):
        answers = list(pool.map(lambda text: client.post("/v1/transduce", json={"input": text}), texts))
        assert [one.json()["results"][0][0]["text"] for one in answers] == expected
        stream = client.post("/v1/transduce", json={"input": texts[0], "stream": True}).text
        events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: ")]
        assert "".join(one["text"] for one in events) == expected[0]
        assert client.post("/v1/transduce", json={"input": 3}).status_code == 400
        assert httpx.get(f"{client.base_url}/v1/models").status_code == 401
        metrics = client.get("/metrics").text
        assert 'transduce_sources_total{model="colours"} 27.0' in metrics  # and the first decode of two replicas
        assert 'transduce_requests_total{method="POST",route="/v1/transduce",status="200"} 25.0' in metrics
