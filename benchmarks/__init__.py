"""What the docs measure: speed, memory, learning and recovery, each table by one command."""
