"""What every rank did last: records that other processes read, and what they tell."""
