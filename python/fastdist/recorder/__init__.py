"""Records of every rank's last calls, which other processes read, and the reasons in them."""
