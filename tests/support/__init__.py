"""What tests and benchmarks share: tiny models, plain engines, servers, patience."""
