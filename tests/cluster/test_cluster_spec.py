"""The tasks of a cluster: what makes a spec, what it answers, and what is refused."""

import dataclasses
import ipaddress
import json
import pickle
from typing import Any

import pytest
from fastdist.cluster import ClusterSpec, join_address, split_address
from fastdist.errors import ClusterConfigError
from hypothesis import given
from hypothesis import strategies as st

FULL = {
    "evaluator": ["e:1"],
    "ps": ["p0:1", "p1:1"],
    "worker": ["w0:1", "w1:1", "w2:1"],
    "chief": ["c:1"],
}

LABELS = st.from_regex(r"[a-z0-9_]([a-z0-9-]{0,5}[a-z0-9_])?", fullmatch=True)
HOST_NAMES = (
    st.lists(LABELS, min_size=1, max_size=4).map(".".join).filter(lambda h: not is_digits(h))
)
HOSTS = HOST_NAMES | st.ip_addresses().map(str)
PORTS = st.integers(1, 65535)


def is_digits(host: str) -> bool:
    return host.replace(".", "").isdigit()


def test_what_a_spec_answers() -> None:
    spec = ClusterSpec(FULL)
    assert spec.jobs == ("chief", "worker", "ps", "evaluator")
    assert [spec.num_tasks(job) for job in spec.jobs] == [1, 3, 2, 1]
    assert spec.job_tasks("ps") == ("p0:1", "p1:1")
    assert spec.task_address("worker", 2) == "w2:1"
    assert spec.as_dict() == FULL
    assert spec.num_training_tasks == 4
    assert spec.chief == ("chief", 0)


@pytest.mark.parametrize(
    ("cluster", "ranks"),
    [
        (
            FULL,
            {
                ("chief", 0): 0,
                ("worker", 0): 1,
                ("worker", 2): 3,
                ("ps", 1): None,
                ("evaluator", 0): None,
            },
        ),
        ({"worker": ["a:1", "b:1"]}, {("worker", 0): 0, ("worker", 1): 1}),
        ({"chief": ["a:1"]}, {("chief", 0): 0}),
        ({"worker": [None, None, "c:1"]}, {("worker", 0): 0, ("worker", 2): 2}),
    ],
)
def test_chief_first_then_workers(cluster: Any, ranks: dict[tuple[str, int], int | None]) -> None:
    spec = ClusterSpec(cluster)
    assert {task: spec.training_rank(*task) for task in ranks} == ranks
    assert spec.training_rank(*spec.chief) == 0


def test_tasks_whose_address_is_not_known() -> None:
    spec = ClusterSpec({"worker": ["a:1", None, "c:1"], "ps": ["p:1"]})
    assert spec.job_tasks("worker") == ("a:1", None, "c:1")
    assert spec.num_training_tasks == 3
    with pytest.raises(ClusterConfigError, match="address of worker 1 is not known") as caught:
        spec.task_address("worker", 1)
    assert str(spec) in str(caught.value)


def test_jobs_without_tasks_may_as_well_be_left_out() -> None:
    spec = ClusterSpec({"worker": ["a:1"], "ps": [], "chief": []})
    assert spec == ClusterSpec({"worker": ["a:1"]})
    assert spec.jobs == ("worker",)
    assert spec.job_tasks("ps") == ()


def test_a_value() -> None:
    spec, same = ClusterSpec(FULL), ClusterSpec(dict(reversed(FULL.items())))
    assert spec == same
    assert hash(spec) == hash(same)
    assert spec != ClusterSpec({**FULL, "ps": ["p1:1", "p0:1"]})
    assert pickle.loads(pickle.dumps(spec)) == spec
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec._jobs = ()  # type: ignore[misc]
    spec.as_dict()["ps"].clear()
    assert spec == same


def test_repr_makes_the_spec_again() -> None:
    spec = ClusterSpec({"ps": ["p:1"], "worker": ["a:1", None]})
    assert repr(spec) == "ClusterSpec({'worker': ['a:1', None], 'ps': ['p:1']})"
    assert eval(repr(spec)) == spec
    spec = ClusterSpec.of_ranks(4096, "a:1")
    assert repr(spec) == "ClusterSpec({'worker': ['a:1'] + [None] * 4095})"
    assert eval(repr(spec)) == spec


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ({"chief": ["a:1", "b:1"], "worker": ["c:1"]}, "2 chiefs; expected at most one"),
        ({"ps": ["a:1"]}, "no worker and no chief"),
        ({"evaluator": ["a:1"]}, "no worker and no chief"),
        ({"worker": [], "ps": ["a:1"]}, "no worker and no chief"),
        ({}, "no tasks"),
        ({"worker": []}, "no tasks"),
        ({"master": ["a:1"]}, "unknown job 'master'; expected chief, worker, ps, evaluator"),
        ({"Worker": ["a:1"]}, "unknown job 'Worker'"),
        ({3: ["a:1"]}, "unknown job 3"),
        ({"worker": ["a:1", "b:1", "a:1"]}, "worker 0 and worker 2 have the same address 'a:1'"),
        ({"worker": ["a:1"], "ps": ["A.:1"]}, "worker 0 and ps 0 have the same address 'A.:1'"),
        ({"worker": ["[::1]:1", "[0:0::1]:1"]}, "worker 0 and worker 1 have the same address"),
        ({"worker": ["a:1", "b"]}, "worker 1: malformed address 'b'"),
        ({"worker": "a:1"}, "tasks of job 'worker': 'a:1'; expected a list of addresses"),
        ({"worker": 3}, "tasks of job 'worker': 3"),
        ({"worker": None}, "tasks of job 'worker': None"),
        ({"worker": [3]}, "address 3 of job 'worker'"),
        ({"worker": [["a:1"]]}, "address ['a:1'] of job 'worker'"),
        ({"worker": {0: "a:1"}}, "tasks of job 'worker': {0: 'a:1'}; expected a list"),
        (["a:1"], "expected a dict from job to addresses, got list"),
        (None, "expected a dict from job to addresses, got NoneType"),
    ],
)
def test_what_makes_no_cluster_is_shown(cluster: Any, message: str) -> None:
    with pytest.raises(ClusterConfigError) as caught:
        ClusterSpec(cluster)
    assert message in str(caught.value)
    assert repr(cluster) in str(caught.value)


@pytest.mark.parametrize(
    ("job", "index", "message"),
    [
        ("worker", 3, "there is no worker 3; expected an index from 0 to 2"),
        ("worker", -1, "there is no worker -1"),
        ("evaluator", 0, "job 'evaluator' has no tasks"),
        ("master", 0, "unknown job 'master'"),
    ],
)
def test_tasks_that_do_not_exist(job: str, index: int, message: str) -> None:
    spec = ClusterSpec({"worker": ["a:1", "b:1", "c:1"]})
    for ask in (spec.task_address, spec.training_rank, spec.require_task):
        with pytest.raises(ClusterConfigError) as caught:
            ask(job, index)
        assert message in str(caught.value)
        assert str(spec) in str(caught.value)


@pytest.mark.parametrize(
    ("cluster", "missing"),
    [
        ({"worker": ["a:1"]}, "ps"),
        ({"chief": ["a:1"], "ps": ["b:1"]}, "worker"),
        ({"worker": ["a:1"], "ps": ["b:1"]}, "chief"),
        (FULL, None),
    ],
)
def test_parameter_servers_are_required(cluster: Any, missing: str | None) -> None:
    spec = ClusterSpec(cluster)
    if missing is None:
        spec.require_parameter_servers()
        return
    with pytest.raises(ClusterConfigError, match=f"no {missing} task") as caught:
        spec.require_parameter_servers()
    assert str(spec) in str(caught.value)


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("localhost:1", ("localhost", 1)),
        ("node-01.cluster_a.example.org:65535", ("node-01.cluster_a.example.org", 65535)),
        ("10.0.0.7:2222", ("10.0.0.7", 2222)),
        ("[::1]:80", ("::1", 80)),
        ("[fe80::1%eth0]:80", ("fe80::1%eth0", 80)),
        ("[::ffff:10.0.0.7]:80", ("::ffff:10.0.0.7", 80)),
        ("host.:80", ("host.", 80)),
    ],
)
def test_addresses(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts
    assert join_address(*parts) == address


@pytest.mark.parametrize(
    "address",
    [
        *("", ":", "a", "a:", ":80", "a:0", "a:65536", "a:080", "a:+80", "a: 80", "a:8_0", "a:٣"),
        *(
            "a b:80",
            " a:80",
            "a:80\n",
            "a:80 ",
            "http://a:80",
            "a:80/x",
            "u@a:80",
            "a,b:80",
            "-a:80",
        ),
        *("a..b:80", ".a:80", "a-:80", "::1:80", "[::1]", "[::1]80", "[a]:80", "[10.0.0.7]:80"),
        *("[]:80", "[::1:80", "::1]:80", "[[::1]]:80", "[::g]:80", "[::1%e/]:80", "300.0.0.1:80"),
        *("1.2.3:80", "12:80", "ä:80", f"{'a' * 254}:80", "[1::2::3]:80", "a:" + "9" * 5000),
    ],
)
def test_malformed_addresses(address: str) -> None:
    with pytest.raises(ValueError, match="malformed address"):
        split_address(address)
    with pytest.raises(ClusterConfigError, match="worker 0: malformed address"):
        ClusterSpec({"worker": [address]})


@given(HOSTS, PORTS)
def test_addresses_round_trip(host: str, port: int) -> None:
    address = join_address(host, port)
    assert split_address(address) == (host, port)
    assert join_address(*split_address(address)) == address
    assert address.startswith("[") == (":" in host)


@given(st.text(alphabet="a1.:[]%-f \n", max_size=12) | st.text(max_size=12))
def test_text_is_an_address_or_refused(text: str) -> None:
    try:
        host, port = split_address(text)
    except ValueError:
        return
    assert join_address(host, port) == text
    assert ":" not in host or ipaddress.IPv6Address(host)


@given(
    st.fixed_dictionaries(
        {"worker": st.integers(1, 4)}, optional={"chief": st.just(1), "ps": st.integers(1, 3)}
    ),
    st.data(),
)
def test_specs_round_trip_through_dict_and_json(sizes: dict[str, int], data: st.DataObject) -> None:
    addresses = data.draw(
        st.lists(
            st.builds(join_address, HOST_NAMES, PORTS),
            min_size=sum(sizes.values()),
            max_size=sum(sizes.values()),
            unique=True,
        )
    )
    drawn = iter(addresses)
    cluster = {
        job: [data.draw(st.none() | st.just(next(drawn))) for _ in range(size)]
        for job, size in sizes.items()
    }
    spec = ClusterSpec(cluster)
    assert spec.as_dict() == cluster
    assert ClusterSpec(json.loads(json.dumps(spec.as_dict()))) == spec
    assert eval(repr(spec)) == spec
    ranks = [
        spec.training_rank(job, index)
        for job in ("chief", "worker")
        for index in range(spec.num_tasks(job))
    ]
    assert ranks == list(range(spec.num_training_tasks))
