"""Where this process stands among the ranks of its job, and on which machines the others are."""

from fastdist.cluster.launch import Launch, detect_launch

__all__ = ["Launch", "detect_launch"]
