"""What runs in other processes, and how the driver speaks with it."""
