"""The output of `fastdist serve`: lines, JSON, a page on a terminal, and metrics for Prometheus."""

import fcntl
import os
import pty
import select
import signal
import struct
import termios
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from fastdist.cli.serve.lines import as_text
from fastdist.cli.serve.metrics import metrics_of
from fastdist.cli.serve.page import draw
from fastdist.cli.serve.reading import Reading
from fastdist.ps import Client, Keys
from launched import wait_until
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from serving import Servers, end, fill, free_port


@pytest.fixture
def servers() -> Iterator[Servers]:
    with Servers() as made:
        yield made


class TestMetrics:
    def test_are_scraped(self, servers: Servers) -> None:
        port = free_port()
        process, first = servers.start_json("--metrics-port", port)
        assert first["metrics"] == f"http://127.0.0.1:{port}/metrics"
        fill(first["address"])
        found = scrape(first["metrics"])
        assert found["fastdist_ps_object_steps_total", "bias"] == 3
        assert found["fastdist_ps_object_rows", "words"] == 5
        assert found["fastdist_ps_object_bytes", "bias"] == 12
        assert ("fastdist_ps_object_rows", "bias") not in found
        assert found["fastdist_ps_malformed_total", ""] == 0
        buckets = {le: found["fastdist_ps_staleness_steps_bucket", le] for le in ("0.0", "1.0")}
        assert buckets == {"0.0": 0, "1.0": 1}
        assert found["fastdist_ps_staleness_steps_bucket", "3.0"] == 2
        assert found["fastdist_ps_staleness_steps_bucket", "+Inf"] == 2
        assert 1e6 < found["process_resident_memory_bytes", ""] < 1e9
        before = found["fastdist_ps_requests_total", ""]
        with Client([first["address"]]) as client:
            client.hello(0)
        assert scrape(first["metrics"])["fastdist_ps_requests_total", ""] == before + 1
        assert end(process, signal.SIGTERM) == (0, b"")

    def test_on_a_free_port_of_an_address(self, servers: Servers) -> None:
        _, first = servers.start_json("--metrics-port", "127.0.0.2:0")
        assert first["metrics"].startswith("http://127.0.0.2:")
        assert scrape(first["metrics"])["fastdist_ps_requests_total", ""] == 0

    def test_staleness_adds_up(self) -> None:
        stats = statistics(staleness={"0": 10, "2-3": 4, "131072-262143": 1})
        (histogram,) = [m for m in metrics_of(stats) if m.name == "fastdist_ps_staleness_steps"]
        counts = {sample.labels["le"]: sample.value for sample in histogram.samples}
        assert [counts[le] for le in ("0.0", "1.0", "3.0", "65535.0", "+Inf")] == [
            10,
            10,
            14,
            14,
            15,
        ]


def scrape(url: str) -> dict[tuple[str, str], float]:
    """Return samples by name and distinguishing label."""
    with urllib.request.urlopen(url, timeout=10) as response:
        text = response.read().decode()
    return {
        (sample.name, sample.labels.get("name") or sample.labels.get("le") or ""): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def statistics(**changes: Any) -> dict[str, Any]:
    """Return statistics as a server reports them."""
    return {
        "requests": 2000,
        "repeated": 0,
        "malformed": 0,
        "uptime_s": 3700.5,
        "staleness": {},
        "rounds": {"open": 0, "nbytes": 0},
        "objects": [
            {"name": "bias", "kind": "DenseSpec", "nbytes": 12, "steps": 400},
            {"name": "[red]words", "kind": "RowsSpec", "nbytes": 3 << 20, "steps": 600, "rows": 9},
        ],
    } | changes


class TestWhatIsShown:
    def test_rates(self) -> None:
        first = Reading.after(None, statistics())
        assert first.requests_per_s == pytest.approx(2000 / 3700.5)
        later = statistics(requests=2050, uptime_s=3710.5)
        later["objects"] = [
            {**later["objects"][0], "steps": 420},
            {"name": "new", "kind": "DenseSpec", "nbytes": 4, "steps": 5},
        ]
        second = Reading.after(first, later)
        assert second.requests_per_s == pytest.approx(5)
        assert second.steps_per_s == pytest.approx({"bias": 2, "new": 0.5})
        assert (second.nbytes, second.rows, second.steps) == (16, 0, 425)
        same = Reading.after(second, later)
        assert same.requests_per_s == 0

    def test_line(self) -> None:
        reading = Reading.after(None, statistics(uptime_s=10.0))
        assert as_text(reading) == (
            "up 0:00:10, 2 objects, 9 rows, 3 MiB, 1,000 steps, 200.0 requests/s"
        )
        full = statistics(uptime_s=10.0, malformed=3, repeated=1, staleness={"0": 3, "2-3": 1})
        assert as_text(Reading.after(None, full)).endswith(
            "requests/s, 1 repeated, 3 malformed; staleness 0: 75%, 2-3: 25%"
        )

    def test_page(self) -> None:
        stats = statistics(staleness={"0": 30, "2-3": 15})
        console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
        with console.file:
            console.print(draw(Reading.after(None, stats), {"address": "tcp://127.0.0.1:7"}))
            lines = [line.rstrip() for line in console.export_text().splitlines()]
        assert lines[0] == "address: tcp://127.0.0.1:7"
        assert lines[1].startswith("up 1:01:40   0.5 requests/s   2,000 requests, 0 repeated")
        bars = {line.split()[0]: line.count("█") for line in lines if "█" in line}
        assert bars == {"0": 30, "2-3": 15}
        names = [line.split("│")[1].strip() for line in lines if line.startswith("│")]
        assert names == ["[red]words", "bias", "2 in all"]  # the largest first
        (words,) = [line for line in lines if "[red]words" in line]
        assert [cell.strip() for cell in words.split("│")[2:6]] == ["table", "9", "3 MiB", "600"]

    def test_page_on_a_terminal(self, servers: Servers) -> None:
        keys = Keys.make()
        servers.environ["FASTDIST_PS_KEYS"] = keys.to_json()
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        address = f"127.0.0.1:{free_port()}"
        process = servers.start("--address", address, "--interval", 0.1, stdout=theirs)
        os.close(theirs)
        shown = read_terminal(ours, until=address.encode())
        fill(f"tcp://{address}", keys)
        shown += read_terminal(ours, until=b"words")
        process.send_signal(signal.SIGINT)
        shown += read_terminal(ours)
        os.close(ours)
        assert process.wait(10) == 0
        assert b"staleness" in shown
        assert b"variables and tables" in shown
        assert shown.endswith(b"\x1b[?25h") or b"\x1b[?25h" in shown[-40:]  # the cursor is restored

    def test_plain_lines_without_a_terminal(self, servers: Servers) -> None:
        process = servers.start("--interval", 0.1, "--metrics-port", 0)
        assert process.stdout is not None
        lines = [process.stdout.readline().decode() for _ in range(4)]
        assert lines[0].startswith("address: ipc:///")
        assert lines[1].startswith("metrics: http://127.0.0.1:")
        up = "0 objects, 0 rows, 0 B, 0 steps, 0.0 requests/s\n"
        assert [line.partition(", ")[2] for line in lines[2:]] == [up, up]
        assert end(process, signal.SIGTERM) == (0, b"")

    def test_it_continues_when_the_reader_is_gone(self, servers: Servers) -> None:
        process, first = servers.start_json()
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        said = process.stderr.readline()
        assert said == (b"fastdist serve: cannot write to stdout: Broken pipe; continues without\n")
        fill(first["address"])
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert process.stderr.read() == b""

    def test_a_stalled_reader_does_not_block_it(self, servers: Servers) -> None:
        process = servers.start("--json", "--interval", 0.05)
        assert process.stdout is not None
        size = fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)
        held = bytearray(4)

        def is_full() -> bool:
            assert process.stdout is not None
            fcntl.ioctl(process.stdout, termios.FIONREAD, held)
            return struct.unpack("i", held)[0] > size - 400

        wait_until(is_full)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


def read_terminal(fd: int, until: bytes | None = None) -> bytes:
    received = b""
    try:
        while until is None or until not in received:
            assert select.select([fd], [], [], 20)[0], received
            received += os.read(fd, 65536)
    except OSError:  # the other end is closed
        pass
    return received
