"""How torch runs: compilation, determinism."""
