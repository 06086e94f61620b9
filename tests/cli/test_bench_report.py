"""`fastdist bench report` and `fastdist bench compare`."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastdist.cli.bench import add_parser, command, peers
from fastdist.cli.bench.cases import Case, array_cases
from fastdist.cli.bench.command import Plan, make_plan, measure, report_cases
from fastdist.cli.bench.comparison import RecordedRun, compare, control
from fastdist.cli.bench.peers import Engine
from fastdist.cli.bench.report import page, recorded_object
from fastdist.cli.bench.results import (
    SAMPLES,
    Measurement,
    Report,
    Row,
    combined,
    median_interval,
    ratio_interval,
)
from fastdist.cli.bench.session import Effort, EngineError
from fastdist.cli.machine_facts import machine_facts
from fastdist.cli.main import main

makes_pages = all(map(importlib.util.find_spec, ("matplotlib", "jinja2")))

TIMES = {"fastdist": 1.0, "gloo": 8.0, "mpich": 0.5}


def measured(name: str, us: float) -> Measurement:
    return Measurement(name, us, 2 * us, 10, 0)


def a_pass(factor: Callable[[], float]) -> list[Row]:
    """Rows of every case, as one pass would measure them."""
    rows = []
    for case in report_cases(2):
        us = {name: times * (2 + case.bytes / 1000) * factor() for name, times in TIMES.items()}
        if case.collective == "barrier":
            us["mpich"] *= 4
        ours, *others = (measured(name, us[name]) for name in TIMES)
        if case.collective == "barrier":
            others[0] = Measurement("gloo", unsupported="has <none>")
        rows.append(Row(case, 2, 1.0, ours, tuple(others), fits_caches=case.bytes < 1 << 20))
    return rows


def a_report(seed: int, spread: float = 0.0, slower: float = 1.0) -> Report:
    generator = np.random.default_rng(seed)

    def factor() -> float:
        return float(slower * np.exp(spread * generator.standard_normal()))

    passes = [a_pass(factor) for _ in range(SAMPLES)]
    rows = [combined(rows) for rows in zip(*passes, strict=True)]
    engines = {name: f"{name} 1" for name in TIMES}
    return Report(2, machine_facts(), engines, {"impi": "pip install </script>"}, 50.0, rows)


def write(path: Path, report: Report, **changed: Any) -> dict[str, Any]:
    recorded = recorded_object(report, 1.0) | changed
    path.write_text(json.dumps(recorded))
    return recorded


# Intervals


def test_the_interval_of_a_median_is_that_of_the_tables() -> None:
    interval = median_interval([4, 6, 1, 5, 2, 3])
    assert (interval.estimate, interval.low, interval.high) == (3.5, 1, 6)


def test_the_interval_of_a_ratio_is_that_of_the_tables() -> None:
    before, after = 2.0 ** np.arange(6), 3.0 ** np.arange(6)
    ratios = np.sort(np.divide.outer(after, before).ravel())
    interval = ratio_interval(list(before), list(after))
    # From either end one more than Mann and Whitney's critical value at 5 %, two-sided, which is 5.
    assert (interval.low, interval.high) == (ratios[5], ratios[-6])
    assert interval.estimate == np.median(ratios)


@pytest.mark.parametrize("factor", [1.0, 1.07])
@pytest.mark.parametrize("heavy", [False, True])
def test_intervals_miss_the_true_ratio_in_at_most_five_of_a_hundred_runs(
    factor: float, heavy: bool
) -> None:
    generator = np.random.default_rng(1)
    runs = 2000
    draws = generator.standard_t(2, (runs, 12)) if heavy else generator.normal(size=(runs, 12))
    samples = np.exp(0.05 * draws)
    found = [ratio_interval(run[:6], factor * run[6:]) for run in samples]
    missed = sum(not interval.low <= factor <= interval.high for interval in found) / runs
    # 4.1 % is the exact share, 0.44 % its standard error.
    assert 0.028 < missed < 0.054


# Comparing


def two_runs(slower: float, spread: float = 0.02) -> list[RecordedRun]:
    reports = a_report(1, spread), a_report(2, spread, slower)
    return [RecordedRun("", recorded_object(report, 1.0)) for report in reports]


def test_a_shift_is_told_in_percent_with_its_interval() -> None:
    runs = two_runs(1.25)
    changes = compare(*runs)
    assert all(change["low"] > 0 for change in changes)
    covered = sum(c["low"] <= 25 <= c["high"] for c in changes)
    assert covered >= len(changes) - 3
    (change,) = compare(*two_runs(1.07, 0.0))[3:4]
    assert change["word"] == "all_reduce 1 MiB: 7 % slower, 95 %: 7 to 7"
    (change,) = compare(*two_runs(0.5, 0.0))[3:4]
    assert change["word"] == "all_reduce 1 MiB: 50 % faster, 95 %: 50 to 50"
    (change,) = compare(*two_runs(1.0, 0.0))[3:4]
    assert change["word"].startswith("all_reduce 1 MiB: no change found, 95 %: ")
    assert control(*runs)["gloo"] == pytest.approx(1.25, abs=0.02)


def test_files_are_compared_and_fail_only_if_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = str(tmp_path / "a.json"), str(tmp_path / "b.json")
    write(Path(old), a_report(1, 0.01))
    write(Path(new), a_report(2, 0.01, 1.2))
    assert main(["bench", "compare", old, new]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if "% slower, 95 %:" in line]) == len(report_cases(2))
    assert lines[-2].startswith("the time of peers, which are the same programs: gloo +")
    assert lines[-1].startswith("without any change, chance alone would call up to 1.2 of 24")
    assert main(["bench", "compare", old, new, "--fail-slower", "10"]) == 1
    assert main(["bench", "compare", old, new, "--fail-slower", "40"]) == 0
    assert main(["bench", "compare", new, old, "--fail-slower", "0"]) == 0
    capsys.readouterr()
    assert main(["bench", "compare", old, new, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["changes"][0]
    assert first["case"] == "all_reduce 8 B"
    assert 10 < first["low"] < first["percent"] < first["high"] < 30


def test_other_machines_are_compared_only_by_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "a.json", tmp_path / "b.json"
    recorded = write(old, a_report(1))
    write(new, a_report(1), machine={**recorded["machine"], "cores": "77"})
    files = ["bench", "compare", str(old), str(new)]
    assert main(files) == 2
    assert "cores " in (error := capsys.readouterr().err)
    assert "and 77; --force" in error
    assert main([*files, "--force"]) == 0
    assert "warning: other machine: cores" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "FileNotFoundError(2, 'No such file or directory')"),
        ("{", "JSONDecodeError("),
        ("[]", "TypeError("),
        ('{"rows": []}', "KeyError('when')"),
    ],
)
def test_a_file_that_is_no_report_is_named(
    content: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    write(good, a_report(1))
    if content is not None:
        bad.write_text(content)
    assert main(["bench", "compare", str(good), str(bad)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"fastdist bench compare: {bad} is not a JSON file of `fastdist bench")
    assert message in error


def test_samples_that_are_none_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.json"
    for samples, message in (
        ([1.0] * 5, "6 samples above 0, got [1.0, "),
        ([0.0] * 6, "got [0.0, "),
    ):
        recorded = recorded_object(a_report(1), 1.0)
        recorded["rows"][2]["samples_us"] = samples
        path.write_text(json.dumps(recorded))
        assert main(["bench", "compare", str(path), str(path)]) == 2
        assert message in capsys.readouterr().err
    report = a_report(1)
    write(path, report)
    write(tmp_path / "b.json", report, ranks=4)
    assert main(["bench", "compare", str(path), str(tmp_path / "b.json")]) == 2
    assert "2 ranks and" in capsys.readouterr().err


def test_cases_of_one_file_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "a.json", tmp_path / "b.json"
    rows = write(old, a_report(1))["rows"]
    write(new, a_report(2), rows=rows[:20])
    assert main(["bench", "compare", str(old), str(new)]) == 0
    alone = f"only in {old}: all_to_all 1 MiB, send_recv 1 KiB, send_recv 1 MiB, and 1 more"
    assert alone in capsys.readouterr().out.splitlines()
    write(old, a_report(1), rows=rows[20:])
    assert main(["bench", "compare", str(old), str(new)]) == 2
    assert "no case in common" in capsys.readouterr().err


# What is measured


def test_every_row_has_the_command_that_measures_it() -> None:
    report = a_report(1)
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    for row in recorded_object(report, 1.0)["rows"]:
        program, *arguments = row["command"].split()
        options = parser.parse_args(arguments)
        assert program == "fastdist"
        assert options.vs == "gloo,mpich"
        plan = make_plan(options)
        assert plan.report.ranks == 2
        (case,) = plan.cases
        assert {name: row[name] for name in Case.__slots__} == asdict(case)


class Silent:
    """A progress that keeps its lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)

    def update(self, label: str, steps: int = 0) -> None:
        pass


def test_a_peer_that_fails_is_left_out_of_the_passes_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = array_cases("all_reduce", (8,), 2)[0]
    started: list[list[str]] = []

    class Session:
        """Fails to start `gloo`, and in the second session fails to measure `impi`."""

        def __init__(self, engines: Sequence[Engine], ranks: int, effort: Effort) -> None:
            started.append([engine.name for engine in engines])
            self._names = [name for name in started[-1] if name != "gloo"]
            self.failures = [EngineError("", "gloo", "no network")] if "gloo" in started[-1] else []
            self.versions = {name: f"{name} 1" for name in self._names}
            self.copy_gb_per_s = 1.0

        def __enter__(self) -> Session:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def measure(self, case: Any, update: Any) -> Row:
            if len(started) == 2:
                raise EngineError("", "impi", "too late")
            ours, *others = (measured(name, len(started)) for name in self._names)
            return Row(case, 2, 1.0, ours, tuple(others))

    monkeypatch.setattr(command, "Session", Session)
    engines = [Engine(name, "mpi", ()) for name in ("fastdist", "gloo", "impi", "mpich")]
    plan = Plan(Report(2, machine_facts(), {}, {}), (case,), Effort(), engines, [])
    progress = Silent()
    measure(plan, 3, progress)
    report = plan.report
    assert started == [
        ["fastdist", "gloo", "impi", "mpich"],
        ["fastdist", "impi", "mpich"],
        ["fastdist", "mpich"],
        ["fastdist", "mpich"],
    ]
    assert report.failed == {"gloo": "no network", "impi": "too late"}
    (row,) = report.rows
    assert row.ours.samples_us == (1, 3, 4)
    assert row.ours.p50_us == 3
    assert row.ours.iterations == 30
    assert [other.engine for other in row.others] == ["mpich"]
    assert progress.lines[0] == "pass 1 of 3"
    del started[1:]
    with pytest.raises(EngineError):
        measure(replace(plan, engines=[Engine("impi", "mpi", ())]), 3, Silent())


# The page


class Page(HTMLParser):
    """Collects what a page loads, its text and its data, and checks that elements are closed."""

    VOID = frozenset(("meta", "link", "br", "img"))

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.tags: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self._open.append(tag)
        self.loaded += [
            value or ""
            for name, value in attributes
            if name in ("src", "srcset", "href", "xlink:href", "action", "data", "poster")
        ]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.handle_endtag(tag)

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts.setdefault(self._open[-1], []).append(data)


@pytest.mark.skipif(not makes_pages, reason="matplotlib or jinja2 is not installed")
def test_the_page_holds_the_measurements_and_loads_nothing() -> None:
    report = a_report(1, 0.2)
    recorded = recorded_object(report, 1.0)
    text = page(report, recorded)
    found = Page(text)
    (data,) = found.texts["script"]
    assert json.loads(data) == json.loads(json.dumps(recorded))
    assert [value for value in found.loaded if not value.startswith(("#", "data:"))] == []
    (style, *chart_styles) = found.texts["style"]
    assert "prefers-color-scheme: dark" in style
    assert not [word for word in ("url(", "@import") if word in style + "".join(chart_styles)]
    assert found.tags.count("svg") == 1
    assert "mpich 1" in found.texts["text"]
    assert "var(--text)" in text.partition("<svg")[2]
    assert found.tags.count("h1") == 1
    codes = "".join(found.texts["code"])
    assert all(row["command"] in codes for row in recorded["rows"])
    items = found.texts["li"]
    assert set(report.sentences) <= set(items)
    assert "impi is not installed: pip install </script>" in items
    unstable = [row.case.title for row in report.rows if row.ours.interval.is_unstable]
    assert len(unstable) > 0
    assert any(item.endswith(", ".join(unstable)) for item in items)


def test_a_sentence_per_peer_has_its_figures() -> None:
    gloo, mpich = a_report(1).sentences
    assert gloo.startswith("gloo 1 takes 8.0 times as long as fastdist in the median of 23 cases")
    assert gloo.endswith("fastdist is faster in 23, slower in none.")
    assert mpich.startswith("mpich 1 takes 0.50 times as long as fastdist in the median of 24")
    assert "to 2.0 (barrier); fastdist is faster in 1, slower in 23 (all_reduce 8 B, " in mpich
    open_ones = [s for s in a_report(1, 2.0).sentences if s.endswith("leave it open.")]
    assert open_ones


@pytest.mark.skipif(not makes_pages, reason="matplotlib or jinja2 is not installed")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ranks", "1"), "ranks from 2 to 999999, got '1'"),
        (("--out", "a.json"), "suffix .html, got a.json"),
    ],
)
def test_options_of_a_report_that_make_no_sense_are_refused(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:  # argparse exits by itself
        sys.exit(main(["bench", "report", *arguments]))
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not makes_pages, reason="matplotlib or jinja2 is not installed")
def test_a_report_is_measured_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = (sys.executable, "-m", "fastdist", "run", "-n", "2", "-m", "fastdist.cli.bench.worker")
    engines = (Engine("mpich", "fastdist", worker), Engine("impi", "mpi", ("/no/such/mpiexec",)))
    missing = {"gloo": "pip install torch"}
    cases = report_cases(2)[1:3]
    monkeypatch.setattr(peers, "find_peers", lambda *_: (engines, missing))
    monkeypatch.setattr(command, "report_cases", lambda ranks: cases)
    monkeypatch.setattr(command, "_REPORT_EFFORT", Effort(iterations=2, warmup=1, rounds=1))
    out = tmp_path / "a.html"
    assert main(["bench", "report", "--ranks", "2", "--out", str(out), "--json"]) == 1
    written = capsys.readouterr()
    recorded = json.loads(written.out)
    assert recorded == json.loads(out.with_suffix(".json").read_text())
    assert json.loads(Page(out.read_text()).texts["script"][0]) == recorded
    assert (
        "impi failed and is left out: cannot run /no/such/mpiexec: No such file or directory"
        in written.err
    )
    assert "pass 6 of 6, about " in written.err
    rows = recorded["rows"]
    assert [(row["collective"], row["bytes"]) for row in rows] == [
        (case.collective, case.bytes) for case in cases
    ]
    assert [len(row["samples_us"]) for row in rows] == [6, 6]
    assert [row["wrong"] for row in rows] == [0, 0]
    assert rows[0]["peers"]["mpich"]["wrong"] == 0
