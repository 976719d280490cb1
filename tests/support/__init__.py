# SPDX-License-Identifier: Apache-2.0
"""What tests and benchmarks share: tiny models, plain engines, servers, patience."""
