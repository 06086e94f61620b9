"""Slurm's short forms: "node[01-03,07],gpu5" for hosts, "2(x3),1" for tasks on each host."""

import itertools
import re

# More nodes than any cluster has; a wrong digit must not fill the memory.
_MOST_HOSTS = 1 << 20
# One or more hosts: text and lists in brackets. A comma in brackets does not end the item.
_ITEM = re.compile(r"(?:[^\[\],\s]|\[[^\[\]]*\])+")
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_RUN = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def expand_hostlist(text: str) -> list[str]:
    """Expand a list such as "rack[1-2]n[08-10]" into its hosts, in order.

    Leading zeros are kept. With several brackets, the last varies fastest, as in the output of
    `scontrol show hostnames`.

    Raises:
        ValueError: the list is malformed or too long.
    """
    hosts: list[str] = []
    position = 0
    while True:
        item = _ITEM.match(text, position)
        if item is None:
            raise _malformed(text)
        choices = [_expand_part(part, text) for part in _PART.finditer(item[0])]
        product = itertools.product(*choices)
        hosts += itertools.islice(map("".join, product), _MOST_HOSTS + 1 - len(hosts))
        if len(hosts) > _MOST_HOSTS:
            raise _too_long(text)
        position = item.end()
        if position == len(text):
            return hosts
        if text[position] != ",":
            raise _malformed(text)
        position += 1


def parse_tasks_per_node(text: str) -> list[tuple[int, int]]:
    """Parse a list such as "2(x3),1" into pairs of tasks per node and number of nodes.

    Raises:
        ValueError: the list is malformed.
    """
    runs = []
    for entry in text.split(","):
        match = _RUN.fullmatch(entry.strip())
        if match is None:
            raise ValueError(f"malformed list {text!r}; expected tasks per node, as '4(x2),3'")
        runs.append((int(match[1]), int(match[2] or 1)))
    return runs


def _expand_part(part: re.Match[str], text: str) -> list[str]:
    if part[2] is not None:
        return [part[2]]
    numbers: list[str] = []
    for entry in part[1].split(","):
        match = _RANGE.fullmatch(entry)
        if match is None:
            raise _malformed(text)
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise _malformed(text)
        if len(numbers) + last - first >= _MOST_HOSTS:
            raise _too_long(text)
        width = len(match[1])
        numbers += [f"{number:0{width}}" for number in range(first, last + 1)]
    return numbers


def _malformed(text: str) -> ValueError:
    return ValueError(f"malformed host list {text!r}; expected hosts, as 'node[01-03,07],gpu5'")


def _too_long(text: str) -> ValueError:
    return ValueError(f"host list {text!r}; expected at most {_MOST_HOSTS} hosts")
