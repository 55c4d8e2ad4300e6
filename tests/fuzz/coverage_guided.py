"""Coverage-guided fuzzing of the parsers with atheris: `python tests/fuzz/coverage_guided.py --runs 100000`.

Each parser runs in a process of its own, from the valid inputs of `parser_targets`; libFuzzer mutates them and keeps
what reaches new branches of the parser. A case may raise an error in words; any other exception, a case of more than
20 seconds or 2 GB ends the process. The inputs that fail are in the folder of --findings, the counts in FUZZ_RECORD.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
PARSED_BY = ["transduce", "yaml", "pickletools", "xml.etree", "html.parser", "zipfile"]  # packages written in Python
LIMITS = ("-timeout=20", "-rss_limit_mb=2048", "-max_len=4096", "-len_control=0", "-seed=1", "-print_final_stats=1")
# What may be called while a file is parsed; a pickle, a recipe or a template that calls more is a hole.
FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class", "socket.connect")


def fuzz_one(name: str, runs: int, findings: Path) -> None:
    """Fuzzes one parser in this process, which ends with it."""
    import atheris

    with atheris.instrument_imports(include=PARSED_BY):
        from parser_targets import REFUSALS, TARGETS

    target = TARGETS[name]
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    path = folder / f"file{target.suffix}"
    corpus = folder / "corpus"
    corpus.mkdir()
    for number, content in enumerate(target.seeds()):
        (corpus / str(number)).write_bytes(content)
    outcomes = {"refused": 0, "accepted": 0}
    parsing = False

    def audit(event: str, _: object) -> None:
        if parsing and event.startswith(FORBIDDEN):
            raise AssertionError(f"a file made the parser call {event}")

    def case(content: bytes) -> None:
        nonlocal parsing
        path.write_bytes(content)
        parsing = True
        try:
            target.parse(path)
            outcomes["accepted"] += 1
        except REFUSALS:
            outcomes["refused"] += 1
        finally:
            parsing = False
        if sum(outcomes.values()) % 1000 == 0:
            _counts_file(findings, name).write_text(json.dumps(outcomes))

    sys.addaudithook(audit)
    prefix = f"-artifact_prefix={findings / name.replace(' ', '-')}-"
    atheris.Setup([sys.argv[0], f"-runs={runs}", prefix, *LIMITS, str(corpus)], case)
    atheris.Fuzz()


def _counts_file(findings: Path, name: str) -> Path:
    return findings / f"{name.replace(' ', '-')}.counts"


def record(name: str, outcome: subprocess.CompletedProcess[str], findings: Path) -> dict[str, object]:
    """The counts of one parser; libFuzzer ends the process itself, so they are those of its last full thousand."""
    from parser_targets import TARGETS

    counts = _counts_file(findings, name)
    outcomes = json.loads(counts.read_text()) if counts.is_file() else {}
    failures = [] if outcome.returncode == 0 else [{"detail": outcome.stderr[-3000:]}]
    return {
        "name": f"{name}, guided",
        "subject": f"{TARGETS[name].subject}, by coverage",
        "cases": sum(outcomes.values()),
        "outcomes": outcomes,
        "failures": failures,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100_000, help="cases of each parser")
    parser.add_argument("--only", nargs="*", help="names of parsers")
    parser.add_argument("--findings", type=Path, default=Path(tempfile.gettempdir()) / "transduce-fuzz")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.findings.mkdir(parents=True, exist_ok=True)
    if given.one:
        fuzz_one(given.one, given.runs, given.findings)
        return
    from parser_targets import TARGETS

    failed = []
    for name in given.only or TARGETS:
        command = [sys.executable, __file__, "--one", name, "--runs", str(given.runs)]
        command += ["--findings", str(given.findings)]
        _counts_file(given.findings, name).unlink(missing_ok=True)
        outcome = subprocess.run(command, capture_output=True, text=True, check=False)
        content = record(name, outcome, given.findings)
        print(f"{name:20}{content['cases']:>10,} cases  {content['outcomes']}", flush=True)
        if outcome.returncode:
            failed.append(name)
            print(outcome.stderr[-3000:])
        if folder := os.environ.get("FUZZ_RECORD"):
            path = Path(folder) / f"guided-{name.replace(' ', '-')}.json"
            path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
