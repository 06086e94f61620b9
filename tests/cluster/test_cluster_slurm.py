"""Slurm: its short lists, and where each task of a step runs."""

import itertools

import pytest
from fastdist.cluster import SlurmClusterResolver
from fastdist.cluster.slurm import expand_hostlist, parse_tasks_per_node
from fastdist.errors import ClusterConfigError
from hypothesis import given
from hypothesis import strategies as st

NODES = "n[1-2],gpu5"
HOSTS = ["n1", "n2", "gpu5"]
TASKS = "2(x2),1"
BLOCK = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
CYCLIC = [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1)]


def srun(rank: int, places: list[tuple[int, int]] = BLOCK, **changes: str | None) -> dict[str, str]:
    """Return srun's variables for a task of a step of five, in a larger allocation."""
    node, number = places[rank]
    environ: dict[str, str | None] = {
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST": "n[1-9],gpu5",
        "SLURM_LOCALID": str(number),
        "SLURM_NODEID": str(node),
        "SLURM_NTASKS": "80",
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": NODES,
        "SLURM_STEP_NUM_TASKS": "5",
        "SLURM_STEP_TASKS_PER_NODE": TASKS,
        "SLURM_TASKS_PER_NODE": "8(x10)",
    }
    return {name: value for name, value in (environ | changes).items() if value is not None}


@pytest.mark.parametrize(
    ("places", "changes"),
    [
        (BLOCK, {}),
        (BLOCK, {"SLURM_DISTRIBUTION": "block:cyclic"}),
        (CYCLIC, {"SLURM_DISTRIBUTION": "cyclic"}),
        (CYCLIC, {"SLURM_DISTRIBUTION": "cyclic:block"}),
    ],
)
def test_every_task_sees_the_same_cluster(
    places: list[tuple[int, int]], changes: dict[str, str]
) -> None:
    expected = tuple(f"{HOSTS[node]}:{8888 + number}" for node, number in places)
    for rank in range(5):
        resolver = SlurmClusterResolver(environ=srun(rank, places, **changes))
        assert resolver.cluster_spec().as_dict() == {"worker": list(expected)}
        assert (resolver.task_type, resolver.task_id) == ("worker", rank)
        assert (resolver.rank, resolver.world_size) == (rank, 5)
        assert resolver.coordinator_address == "n1:8888"
        assert resolver.is_chief == (rank == 0)


def test_jobs_take_tasks_in_their_order() -> None:
    jobs = {"worker": 2, "ps": 1, "chief": 1, "evaluator": 1}
    expected = {
        "chief": ["n2:101"],
        "worker": ["n1:100", "n1:101"],
        "ps": ["n2:100"],
        "evaluator": ["gpu5:100"],
    }
    tasks = [("worker", 0), ("worker", 1), ("ps", 0), ("chief", 0), ("evaluator", 0)]
    ranks = [1, 2, None, 0, None]
    for number in range(5):
        resolver = SlurmClusterResolver(jobs, port_base=100, environ=srun(number))
        assert resolver.cluster_spec().as_dict() == expected
        assert (resolver.task_type, resolver.task_id) == tasks[number]
        assert resolver.rank == ranks[number]
        assert resolver.coordinator_address == "n2:101"


def test_variables_of_the_allocation_stand_in_for_the_step() -> None:
    environ = {name: value for name, value in srun(3).items() if "STEP_N" not in name}
    environ |= {"SLURM_NTASKS": "5", "SLURM_JOB_NODELIST": NODES, "SLURM_TASKS_PER_NODE": TASKS}
    del environ["SLURM_STEP_TASKS_PER_NODE"]
    assert SlurmClusterResolver(environ=environ).cluster_spec().num_tasks("worker") == 5


def test_master_addr_says_where_worker_0_listens() -> None:
    master = {"MASTER_ADDR": "n1-ib", "MASTER_PORT": "29500"}
    resolver = SlurmClusterResolver(environ=srun(1, **master))
    assert resolver.coordinator_address == "n1-ib:29500"
    assert resolver.cluster_spec().task_address("worker", 1) == "n1:8889"
    jobs = SlurmClusterResolver({"chief": 1, "worker": 4}, environ=srun(1, **master))
    assert jobs.coordinator_address == "n1:8888"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"SLURM_PROCID": None}, "expected a process that srun started"),
        ({"SLURM_STEP_ID": None}, "expected a process that srun started"),
        ({"SLURM_STEP_ID": "4294967291"}, "expected a process that srun started"),
        ({"SLURM_STEP_ID": "x"}, "SLURM_STEP_ID='x'"),
        ({"SLURM_PROCID": "5"}, "SLURM_PROCID='5'; expected an integer from 0 to 4"),
        ({"SLURM_STEP_NUM_TASKS": "6"}, "is 5 tasks on 3 nodes; expected 6 tasks on the 3 nodes"),
        ({"SLURM_STEP_NODELIST": "n[1-2]"}, "5 tasks on 3 nodes; expected 5 tasks on the 2 nodes"),
        ({"SLURM_STEP_NODELIST": "n[1-"}, "SLURM_STEP_NODELIST: malformed host list 'n[1-'"),
        ({"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST: malformed host list ''"),
        (
            {"SLURM_STEP_NODELIST": None, "SLURM_JOB_NODELIST": None},
            "SLURM_NODELIST: malformed host list ''",
        ),
        ({"SLURM_STEP_NODELIST": "n1,n1,n2"}, "worker 0 and worker 2 have the same address"),
        ({"SLURM_STEP_NODELIST": "n1,n 2,n3"}, "malformed host list"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(y2)"}, "'2(y2)'; expected tasks per node"),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x999999999)"}, "999999999 nodes; expected 5 tasks"),
        (
            {"SLURM_STEP_NUM_TASKS": "999999999", "SLURM_STEP_TASKS_PER_NODE": "333333333(x3)"},
            "is 999999999 tasks on 3 nodes",
        ),
        ({"SLURM_NODEID": None}, "SLURM_NODEID is not set"),
        ({"SLURM_NODEID": "2"}, "task 3 is number 1 on node 2; expected number 1 on node 1"),
        ({"SLURM_DISTRIBUTION": "cyclic"}, "expected number 1 on node 0"),
        (
            {"SLURM_DISTRIBUTION": "arbitrary", "SLURM_LOCALID": "0"},
            "--distribution=block or cyclic",
        ),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "x"}, "MASTER_PORT='x'"),
    ],
)
def test_bad_variables(changes: dict[str, str | None], message: str) -> None:
    with pytest.raises(ClusterConfigError) as caught:
        SlurmClusterResolver(environ=srun(3, **changes))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        ({"worker": 2, "ps": 2}, "are 4 tasks; expected 5, as SLURM_STEP_NUM_TASKS='5'"),
        ({"worker": 6, "ps": -1}, "{'worker': 6, 'ps': -1}"),
        ({}, "are 0 tasks"),
        ({"master": 1, "worker": 4}, "unknown job 'master'"),
        ({"chief": 2, "worker": 3}, "2 chiefs"),
        ({"ps": 5}, "no worker and no chief"),
    ],
)
def test_bad_jobs(jobs: dict[str, int], message: str) -> None:
    with pytest.raises(ClusterConfigError) as caught:
        SlurmClusterResolver(jobs, environ=srun(3))
    assert message in str(caught.value)


def test_ports_end_at_65535() -> None:
    with pytest.raises(ClusterConfigError, match="malformed address 'n1:65536'"):
        SlurmClusterResolver(port_base=65535, environ=srun(0))


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node0", ["node0"]),
        ("node[01-03,07],gpu5", ["node01", "node02", "node03", "node07", "gpu5"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[2,1,1]", ["n2", "n1", "n1"]),
        ("n[1-2]-ib,a.b", ["n1-ib", "n2-ib", "a.b"]),
        ("r[1-2]n[0-1]", ["r1n0", "r1n1", "r2n0", "r2n1"]),
        ("r[01-2,5]x[3]", ["r01x3", "r02x3", "r5x3"]),
        ("[1-2]", ["1", "2"]),
    ],
)
def test_host_lists(text: str, hosts: list[str]) -> None:
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize(
    "text",
    [
        *("", ",", "a,", ",a", "a,,b", "a b", "a, b", "n[", "n]", "n[]", "n[1", "n1]", "n[[1]]"),
        *("n[a]", "n[1-]", "n[-1]", "n[1--2]", "n[2-1]", "n[1,]", "n[1 ]", "n[1-2-3]", "n[1]]"),
        *(
            "n[٣]",
            "n[0-1048576]",
            "n[0-1023]m[0-1024]",
            "n[0-99999999999]",
            "[0-999][0-999][0-999]",
        ),
    ],
)
def test_bad_host_lists(text: str) -> None:
    with pytest.raises(ValueError, match="host list"):
        expand_hostlist(text)


@st.composite
def part(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A part of a host's name with the texts it stands for: fixed text, or numbers in brackets."""
    if draw(st.booleans()):
        text = draw(st.text("ab-.7", min_size=1, max_size=3))
        return text, [text]
    entries, numbers = [], []
    for first, more in draw(
        st.lists(st.tuples(st.integers(0, 120), st.integers(0, 3)), min_size=1, max_size=3)
    ):
        width = draw(st.integers(1, 4))
        written = [str(number).rjust(width, "0") for number in range(first, first + more + 1)]
        entries.append(f"{written[0]}-{written[-1]}" if more else written[0])
        numbers += written
    return f"[{','.join(entries)}]", numbers


@given(st.lists(st.lists(part(), min_size=1, max_size=3), min_size=1, max_size=3))
def test_host_lists_expand_to_what_they_were_made_of(
    items: list[list[tuple[str, list[str]]]],
) -> None:
    text = ",".join("".join(written for written, _ in parts) for parts in items)
    hosts = [
        "".join(chosen)
        for parts in items
        for chosen in itertools.product(*(stands_for for _, stands_for in parts))
    ]
    assert expand_hostlist(text) == hosts


@given(st.text(alphabet="n019[]-, x", max_size=14))
def test_any_text_is_expanded_or_refused(text: str) -> None:
    try:
        hosts = expand_hostlist(text)
    except ValueError:
        return
    assert hosts
    assert all(host and not set(host) & set("[], ") for host in hosts)


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 99)), min_size=1), st.data())
def test_tasks_per_node_round_trip(runs: list[tuple[int, int]], data: st.DataObject) -> None:
    def written(tasks: int, nodes: int) -> str:
        return str(tasks) if nodes == 1 and data.draw(st.booleans()) else f"{tasks}(x{nodes})"

    assert parse_tasks_per_node(",".join(written(*run) for run in runs)) == runs
