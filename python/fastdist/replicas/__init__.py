"""What one replica is: its context, its values, its variables, and how the others are started."""
