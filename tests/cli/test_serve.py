"""`fastdist serve`: a server for real clients."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fastdist.cli.main import main
from fastdist.cluster import TFConfigClusterResolver
from fastdist.errors import UnavailableError
from fastdist.ps import Client
from fastdist.ps.client.partition import Piece
from fastdist.ps.client.sharded import commit_round
from held_ports import free_port
from launched import wait_until
from serving import BIAS, Servers, end, fill, read_json_until
from sharded_things import ShardedVariable


@pytest.fixture
def servers() -> Iterator[Servers]:
    with Servers() as made:
        yield made


class TestServer:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    def test_signals_end_it(self, servers: Servers, number: signal.Signals) -> None:
        process, _ = servers.start_json()
        assert end(process, number) == (0, b"")

    def test_only_its_user_can_connect(self, servers: Servers) -> None:
        """Without an address it listens in a folder of its own, which it removes."""
        process, first = servers.start_json()
        folder = Path(first["address"].removeprefix("ipc://")).parent
        assert folder.stat().st_mode & 0o777 == 0o700
        assert folder.stat().st_uid == os.getuid()
        assert end(process, signal.SIGTERM) == (0, b"")
        assert not folder.exists()

    def test_is_used_by_the_address_in_tf_config(self, servers: Servers) -> None:
        cluster = {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"]}
        cluster["ps"] = [f"127.0.0.1:{free_port()}"]
        config = {"cluster": cluster, "task": {"type": "worker", "index": 0}}
        address = (
            TFConfigClusterResolver({"TF_CONFIG": json.dumps(config)})
            .cluster_spec()
            .task_address("ps", 0)
        )
        for _ in range(2):  # once more after a kill, at the same address
            process, first = servers.start_json("--address", address)
            assert first["address"] == f"tcp://{address}"
            fill(f"tcp://{address}")
            process.kill()
            process.wait()

    def test_clients_during_readings(self, servers: Servers) -> None:
        process, first = servers.start_json()
        fill(first["address"])
        with Client([first["address"]]) as client:
            requests = client.stats(0)["requests"]
        line = read_json_until(process, lambda line: line["requests"] == requests)
        objects = {entry["name"]: entry for entry in line["objects"]}
        assert (objects["bias"]["steps"], objects["words"]["rows"]) == (3, 5)
        assert line["repeated"] == line["malformed"] == 0
        assert end(process, signal.SIGTERM) == (0, b"")

    def test_serves_one_job_after_another(self, servers: Servers) -> None:
        process, first = servers.start_json()
        for _ in range(2):  # the second job counts its rounds from 1 again
            with Client([first["address"]], timeout_s=10) as client:
                client.reset(0)
                assert client.stats(0)["objects"] == []
                bias = ShardedVariable(client, BIAS, [Piece(0, 0, 3)], np.zeros(3, np.float32))
                client.wait_all(client.begin_change(bias.change(np.ones(3, np.float32)), 1))
                assert commit_round(client, 1, [(bias, None)])
                np.testing.assert_array_equal(bias.pull(), np.full(3, -0.5, np.float32))
                client.end(0)
        assert process.poll() is None
        assert end(process, signal.SIGTERM) == (0, b"")


class TestSecret:
    def test_clients_need_it(
        self, servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = tmp_path / "secret"
        file.write_text("of this server alone\n")
        file.chmod(0o600)
        del servers.environ["FASTDIST_SECRET"]
        servers.environ["FASTDIST_SECRET_FILE"] = str(file)
        process, first = servers.start_json("--address", "127.0.0.1:*")
        assert "of this server" not in json.dumps(first)
        with (
            Client([first["address"]], timeout_s=1) as client,
            pytest.raises(UnavailableError, match="its secret"),
        ):
            client.stats(0)
        monkeypatch.setenv("FASTDIST_SECRET", "of this server alone")
        fill(first["address"])
        assert end(process, signal.SIGTERM) == (0, b"")

    def test_it_is_made_for_the_user(
        self, servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        del servers.environ["FASTDIST_SECRET"]
        servers.environ["XDG_CONFIG_HOME"] = str(tmp_path)
        _, first = servers.start_json("--address", "127.0.0.1:*")
        monkeypatch.delenv("FASTDIST_SECRET")
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
        fill(first["address"])
        assert (tmp_path / "fastdist" / "secret").stat().st_mode & 0o777 == 0o600


class TestBadInput:
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--address", "7000"], "expected tcp://IP:PORT, got '7000'"),
            (["--address", ":7000"], "expected tcp://IP:PORT, got ':7000'"),
            (["--address", "udp://127.0.0.1:7000"], "expected tcp://IP:PORT"),
            (["--address", "127.0.0.1:70000"], "expected tcp://IP:PORT"),
            (["--address", "127.0.0.1:x"], "expected tcp://IP:PORT"),
            (["--address", "192.0.2.7:7000"], "cannot listen at tcp://192.0.2.7"),
            (["--address", "USED"], "Address already in use"),
            (["extra"], "unrecognized arguments: extra"),
        ],
    )
    def test_is_named(
        self,
        capfd: pytest.CaptureFixture[str],
        words: list[str],
        message: str,
    ) -> None:
        with socket.socket() as used:
            used.bind(("127.0.0.1", 0))
            used.listen()
            place = f"127.0.0.1:{used.getsockname()[1]}"
            words = [place if word == "USED" else word for word in words]
            with pytest.raises(SystemExit) as caught:  # argparse exits
                sys.exit(main(["serve", *words]))
        stdout, stderr = capfd.readouterr()
        assert (caught.value.code, stdout) == (2, "")
        assert message in stderr

    @pytest.mark.parametrize(
        ("before", "needs"),
        [
            (
                "sys.modules['cryptography'] = None",
                "encrypted connections need cryptography: pip install 'cryptography>=47'",
            ),
            (
                "os.environ['FASTDIST_SECRET'] = 'short'",
                "the secret FASTDIST_SECRET has 5 bytes, expected at least 16: set FASTDIST_SECRET",
            ),
        ],
    )
    def test_needs_of_tcp(self, before: str, needs: str) -> None:
        code = f"import os, sys; {before}\nfrom fastdist.cli.main import main\n"
        code += "sys.exit(main(['serve', '--address', '127.0.0.1:*']))"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 2
        assert done.stderr.startswith(f"fastdist serve: {needs}")


class TestWhatIsPrinted:
    def test_the_address_alone(self, servers: Servers) -> None:
        process = servers.start()
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"address: ipc:///")
        time.sleep(1.2)
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=20) == (b"", b"")

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

    def test_a_stalled_reader_does_not_keep_it(self, servers: Servers, tmp_path: Path) -> None:
        read, write = os.pipe()
        os.set_blocking(write, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(write, bytes(4096))
        os.set_blocking(write, True)
        process = servers.start("--json", stdout=write)
        writes = Path(f"/proc/{process.pid}/wchan")
        wait_until(lambda: "pipe" in writes.read_text())
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        os.close(read)
        os.close(write)
