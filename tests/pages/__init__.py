# SPDX-License-Identifier: Apache-2.0
"""What the pages of a run show in a browser, its own and those of MLflow and Prefect: `make test-pages`."""
