"""One run: what is open, what is known, what comes next."""
