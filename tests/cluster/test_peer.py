"""Tells processes of this user at the other end of a Unix socket from others."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

LISTEN = """
import socket, sys
from fastdist.link.peer import is_own_user
listener = socket.socket(socket.AF_UNIX)
listener.bind("\\0" + sys.argv[1])
listener.listen()
with socket.socket(socket.AF_UNIX) as own:
    own.connect("\\0" + sys.argv[1])
    print(is_own_user(listener.accept()[0]), flush=True)
print(is_own_user(listener.accept()[0]), flush=True)
"""


@pytest.mark.parametrize("user", ["65534", "1000"])
def test_a_process_outside_of_the_user_namespace(user: str, tmp_path: object) -> None:
    command = ["unshare", "--user", f"--map-user={user}", f"--map-group={user}"]
    if subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("user namespaces are not allowed here")
    name = str(tmp_path)
    with subprocess.Popen(
        [*command, sys.executable, "-c", LISTEN, name], stdout=subprocess.PIPE, text=True
    ) as inside:
        assert inside.stdout is not None
        assert inside.stdout.readline() == "True\n"
        with socket.socket(socket.AF_UNIX) as outside:
            outside.connect(f"\0{name}")
            # This user is mapped into the namespace, but looks like any other as 65534.
            assert inside.stdout.readline() == f"{user == '1000'}\n"
