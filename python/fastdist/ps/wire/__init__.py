"""What parameter servers and their clients say to each other."""
