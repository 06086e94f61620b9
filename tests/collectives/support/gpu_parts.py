"""The parts of gpu_communicator.py."""

# Parts that need no other rank, parts that need one, and parts that lose a rank.
ALONE = [
    "every_op",
    "among_calls_on_the_host",
    "on_given_streams",
    "bad_arrays",
    "arrays_of_cupy",
    "in_ranges",
]
TOGETHER = [
    "disagreement",
    "hosts_beside",
    "one_rank_without_a_gpu",
    "groups",
    "shrinking",
    "aborting",
    "between_two",
]
LOSING = [
    "a_late_rank",
    "a_group_that_raises",
    "an_error_that_was_caught",
    "a_killed_rank",
    "a_silent_peer",
    "a_peer_that_does_not_call",
    "a_receive_in_vain",
]
