"""What the data stages make and a run reads."""
